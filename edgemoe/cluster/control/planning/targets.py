"""From what boxes announce and report to a placement task, to the solver's question, and back to a plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgemoe.cluster.control.messages import Announce, EngineCard, Report
from edgemoe.cluster.control.planning.messages import PlacementAnswer, PlacementBox, PlacementQuestion
from edgemoe.cluster.control.planning.observation import Observation, observe
from edgemoe.errors import PlacementInfeasible
from edgemoe.policy.placement.problem import PlacementProblem, by_size
from edgemoe.policy.placement.uniform import uniform
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


class HomeInventory:
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
class PlacementTask:
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
class PlacementTarget:
    """Where experts are to be at home."""

    nodes: tuple[str, ...]
    homes: BoolArray  # [N, L, E] in memory
    disk: BoolArray  # [N, L, E] on disk, as no memory holds them
    heat: FloatArray  # [L, E] how often each is chosen in all: the hottest are moved first
    now_s: float = math.nan  # that requests wait for peers, a second, under the plan in force; nan: not known
    then_s: float = math.nan  # under this one
    policy: PlacementPolicy = "uniform"


def replan_reason(plan: PlacementPlan | None, engine: EngineCard, boxes: Sequence[ExpertHome], absent_s: float) -> str:
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


def make_plan(engine: EngineCard, target: PlacementTarget, epoch: int, version: int) -> PlacementPlan:
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


def question(
    task: PlacementTask, policy: PlacementPolicy = "uniform", isolation: float = 0.0, horizon_s: float = 0.0
) -> PlacementQuestion:
    """Returns the task as the solver is asked. Raises PlacementInfeasible where no box can be a home."""
    engine, there, now = task.engine, task.there, task.now
    layers, experts = engine.layers, engine.experts
    if not there:
        raise PlacementInfeasible("no box has room for experts yet", layers * experts * engine.expert_bytes)
    none = np.zeros((layers, experts), np.bool_)
    boxes = tuple(
        PlacementBox(
            rooms=box.rooms,
            disk=pack_bits(none if box.disk is None else box.disk),
            ram=pack_bits(none if box.ram is None else box.ram),
            homes=pack_bits(none if now is None else now.homes_of(box.node)),
            report=_fitting(task.reports.get(box.node), engine.model),
        )
        for box in there
    )
    return PlacementQuestion(
        number=0,
        policy=policy,
        layers=layers,
        experts=experts,
        layer_experts=engine.experts_of_layers,
        layer_bytes=engine.bytes_of_layers,
        replicas=task.replicas,
        isolation=isolation,
        boxes=boxes,
        horizon_s=horizon_s,
    )


def _fitting(report: Report | None, model: str) -> Report | None:
    return report if report is not None and report.model == model else None


def problem_of(asked: PlacementQuestion, seen: Observation) -> PlacementProblem:
    """Returns what the boxes have in memory and on disk, and what they ask for."""
    layers, experts = asked.layers, asked.experts
    exists: BoolArray = np.arange(experts) < np.array(asked.layer_experts, np.int64)[:, None]
    return PlacementProblem(
        slots=tuple((sum(box.rooms),) for box in asked.boxes),
        activations=np.where(exists, seen.activations, 0.0),
        expert_bytes=max(asked.layer_bytes),
        on_disk=np.stack([unpack_bits(box.disk, layers, experts) for box in asked.boxes]),
        in_ram=np.stack([unpack_bits(box.ram, layers, experts) for box in asked.boxes]),
        from_disk=True,
        exists=exists,
    )


def make_target(task: PlacementTask) -> PlacementTarget:
    """Returns the uniform placement over the boxes that are there. Raises PlacementInfeasible."""
    asked = question(task)
    seen = observe([box.report for box in asked.boxes], asked.layers, asked.experts)
    rooms = [box.rooms for box in asked.boxes]
    placement = by_size(problem_of(asked, seen), asked.layer_bytes, rooms, lambda part, _: uniform(part, task.replicas))
    return PlacementTarget(
        tuple(box.node for box in task.there), placement.homes, placement.disk, _heat(seen), policy="uniform"
    )


def read_target(task: PlacementTask, asked: PlacementQuestion, solved: PlacementAnswer) -> PlacementTarget:
    """Returns the solver's answer as the leader has it. Raises ValueError for one that does not fit the question."""
    homes, disk = (
        np.stack([unpack_bits(each, asked.layers, asked.experts) for each in bits])
        for bits in (solved.homes, solved.disk)
    )
    seen = observe([box.report for box in asked.boxes], asked.layers, asked.experts)
    known = task.now is not None and solved.known
    now_s, then_s = (solved.now_s, solved.then_s) if known else (math.nan, math.nan)
    nodes = tuple(box.node for box in task.there)
    return PlacementTarget(nodes, homes, disk, _heat(seen), now_s, then_s, solved.policy)


def _heat(seen: Observation) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(seen.activations.sum(axis=0), np.float32)
