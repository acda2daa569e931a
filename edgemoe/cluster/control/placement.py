"""When a leader makes a new plan, and from what. Pure: what the boxes have in, where experts are to be at home out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgemoe.cluster.rpc.control_messages import Announce, EngineCard, Report
from edgemoe.types.arrays import BoolArray, FloatArray
from edgemoe.types.experts import layers_of_sizes
from edgemoe.types.placement import PLAN_FORMAT, PlacementPlan, PlacementPolicy, pack_bits, unpack_bits


@dataclass(frozen=True, slots=True, eq=False)
class ExpertHome:
    """A box as a home of experts, and which it has. Without `disk` nothing is known of it yet."""

    node: str
    rooms: tuple[int, ...] = ()  # experts of each size, the smallest first
    disk: BoolArray | None = None  # [L, E]
    ram: BoolArray | None = None
    absent_s: float = 0.0
    leaving: bool = False
    plan: str = ""  # digest of the plan by which `ram` is at home there

    @property
    def there(self) -> bool:
        return self.disk is not None and not self.absent_s and not self.leaving


class HomesView:
    """Sees boxes as homes. Remembers since when they have been without an engine."""

    def __init__(self) -> None:
        self._bare: dict[str, float] = {}

    def forget(self) -> None:
        """Begins anew."""
        self._bare.clear()

    def look(
        self, cards: Mapping[str, Announce | None], absent_s: Callable[[str], float], serving: EngineCard, now_s: float
    ) -> tuple[ExpertHome, ...]:
        """Returns every box that is or could be a home, by what they have said of themselves."""
        boxes = []
        for node, card in cards.items():
            engine = card.engine if card is not None else None
            if card is not None and (card.role == "witness" or (engine is not None and not engine.shares)):
                continue
            away_s = absent_s(node)
            disk, ram = _has(engine, serving) if engine is not None else (None, None)
            if disk is not None:
                self._bare.pop(node, None)
            else:  # nothing to go by: as good as away
                away_s = max(away_s, now_s - self._bare.setdefault(node, now_s), 1e-3)
            rooms, plan = (_rooms(engine, serving), engine.plan) if engine is not None else ((), "")
            boxes.append(ExpertHome(node, rooms, disk, ram, away_s, card is not None and card.leaving, plan))
        return tuple(boxes)


@dataclass(frozen=True, slots=True, eq=False)
class PlanTask:
    """What a placement is made from."""

    engine: EngineCard
    boxes: tuple[ExpertHome, ...]
    replicas: int
    reports: Mapping[str, Report] = field(default_factory=dict)  # the latest of each box that has sent one
    now: PlacementPlan | None = None  # in force
    urgent: bool = True  # the present plan cannot go on; else a better one is looked for

    @property
    def there(self) -> list[ExpertHome]:
        """Returns the boxes that can be homes now, in order of their names."""
        return [box for box in sorted(self.boxes, key=lambda box: box.node) if box.there and any(box.rooms)]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where experts are to be at home."""

    nodes: tuple[str, ...]
    homes: BoolArray  # [N, L, E] in memory
    disk: BoolArray  # [N, L, E] on disk, as no memory holds them
    heat: FloatArray  # [L, E] how often each is chosen in all: the hottest are moved first
    now_s: float = math.nan  # that requests wait for peers, a second, under the plan in force; nan: not known
    then_s: float = math.nan  # under this one
    policy: PlacementPolicy = "uniform"


def why_anew(plan: PlacementPlan | None, engine: EngineCard, boxes: Sequence[ExpertHome], absent_s: float) -> str:
    """Returns why a new plan is due for the model that the engine serves.

    "" while the present one will do, or something may still come back.
    """
    known = {box.node: box for box in boxes}
    if plan is None or (plan.model, plan.layers, plan.experts) != (engine.model, engine.layers, engine.experts):
        awaited = [box for box in boxes if not box.there and not box.leaving and box.absent_s < absent_s]
        return "" if awaited else "there is none for this model"
    for node in plan.nodes:
        box = known.get(node)
        if box is None or box.leaving:
            return f"{node} leaves"
        if box.absent_s >= absent_s:
            return f"{node} is gone"
        if box.disk is not None and (np.array(_taken(plan, node, engine)) > box.rooms).any():
            return f"{node} has less room"
    if any(not box.there and not box.leaving and box.node in plan.nodes for box in boxes):
        return ""  # one of them may come back in a moment; then all is decided at once
    return next(
        (f"{box.node} has joined" for box in boxes if box.there and any(box.rooms) and box.node not in plan.nodes),
        "",
    )


def _taken(plan: PlacementPlan, node: str, engine: EngineCard) -> list[int]:
    """Returns how many experts of each size are at home at a node."""
    homes = plan.homes_of(node)
    return [int(homes[layers].sum()) for layers in layers_of_sizes(engine.bytes_of_layers)]


def plan_of(engine: EngineCard, target: Target, epoch: int, version: int) -> PlacementPlan:
    """Returns the plan of these homes for the engine's model."""
    return PlacementPlan(
        epoch,
        version,
        engine.model,
        engine.layers,
        engine.experts,
        target.nodes,
        tuple(map(pack_bits, target.homes)),
        format=PLAN_FORMAT,
        disk=tuple(map(pack_bits, target.disk)) if target.disk.any() else (),
        policy=target.policy,
    )


def _rooms(engine: EngineCard, serving: EngineCard) -> tuple[int, ...]:
    """Returns how many experts of each size of the serving model can be at home there; none where that is not said."""
    sizes = len(set(serving.bytes_of_layers))
    if len(engine.rooms) == sizes:
        return engine.rooms
    return (engine.budget_experts,) if sizes == 1 else (0,) * sizes


def _has(engine: EngineCard, serving: EngineCard) -> tuple[BoolArray | None, BoolArray | None]:
    """Returns experts [L, E] on the engine's disk and at home in its memory; None where it serves another model."""
    if engine.model != serving.model:
        return None, None
    try:
        disk, ram = (unpack_bits(bits, serving.layers, serving.experts) for bits in (engine.disk, engine.ram))
        return disk, ram
    except ValueError:
        return None, None
