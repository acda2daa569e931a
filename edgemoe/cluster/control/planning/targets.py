"""Turns announcements and reports into a placement task and the solver's question, and its answer into a plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgemoe.cluster.control.messages import Announce, BoxReport, ChannelDescription
from edgemoe.cluster.control.planning.observation import ActivityObservation, observe
from edgemoe.cluster.control.planning.planning_questions import PlacementAnswer, PlacementBox, PlacementQuestion
from edgemoe.errors import PlacementInfeasible
from edgemoe.policy.placement.problem import PlacementProblem, by_size
from edgemoe.policy.placement.uniform import uniform
from edgemoe.types.arrays import BoolArray, FloatArray
from edgemoe.types.experts import layers_of_sizes
from edgemoe.types.placement import PLAN_FORMAT, PlacementPlan, PlacementPolicy, pack_bits, unpack_bits


@dataclass(frozen=True, slots=True, eq=False)
class ExpertHome:
    """A box as a home of experts. `disk` and `ram` are None until its engine has announced them."""

    node: str
    rooms: tuple[int, ...] = ()  # for experts of each size, the smallest first
    disk: BoolArray | None = None  # [L, E]
    ram: BoolArray | None = None  # [L, E] pinned there by the plan of digest `plan`
    absent_s: float = 0.0
    leaving: bool = False
    plan: str = ""

    @property
    def is_available(self) -> bool:
        """Whether the box is present, stays, and has announced its experts."""
        return self.disk is not None and not self.absent_s and not self.leaving


class HomeInventory:
    """Lists the boxes that are or could be homes. Remembers since when each has been without an engine."""

    def __init__(self) -> None:
        self._engineless_since_s: dict[str, float] = {}

    def reset(self) -> None:
        """Forgets since when boxes have been without engines."""
        self._engineless_since_s.clear()

    def update(
        self,
        announcements: Mapping[str, Announce | None],
        absent_s: Callable[[str], float],
        serving: ChannelDescription,
        now_s: float,
    ) -> tuple[ExpertHome, ...]:
        """Returns every box that is or could be a home, by its announcement."""
        boxes = []
        for node, announced in announcements.items():
            engine = announced.engine if announced is not None else None
            if announced is not None and _is_no_home(announced):
                continue
            away_s = absent_s(node)
            disk, ram = _experts_of(engine, serving) if engine is not None else (None, None)
            if disk is not None:
                self._engineless_since_s.pop(node, None)
            else:  # without an engine the box counts as absent
                away_s = max(away_s, now_s - self._engineless_since_s.setdefault(node, now_s), 1e-3)
            rooms, plan = (_rooms(engine, serving), engine.plan) if engine is not None else ((), "")
            boxes.append(ExpertHome(node, rooms, disk, ram, away_s, announced is not None and announced.leaving, plan))
        return tuple(boxes)


def _is_no_home(announced: Announce) -> bool:
    """Whether a box never is a home: a witness, one that may leave, or one whose engine shares no experts."""
    shares = announced.engine is None or announced.engine.shares
    return announced.role == "witness" or announced.may_leave or not shares


@dataclass(frozen=True, slots=True, eq=False)
class PlacementTask:
    """A placement to find: the boxes, their reports, and the plan in force."""

    engine: ChannelDescription
    boxes: tuple[ExpertHome, ...]
    replicas: int
    reports: Mapping[str, BoxReport] = field(default_factory=dict)  # the latest of each box
    now: PlacementPlan | None = None  # in force
    urgent: bool = True  # the plan in force is not valid any more; otherwise a better one is wanted

    @property
    def available(self) -> list[ExpertHome]:
        """The boxes that can be homes now, in order of their names."""
        return [box for box in sorted(self.boxes, key=lambda box: box.node) if box.is_available and any(box.rooms)]


@dataclass(frozen=True, slots=True, eq=False)
class PlacementTarget:
    """The homes that the leader wants for every expert."""

    nodes: tuple[str, ...]
    homes: BoolArray  # [N, L, E] in memory
    disk: BoolArray  # [N, L, E] on disk, for experts that no memory holds
    heat: FloatArray  # [L, E] how often each is chosen; the most used move first
    now_s: float = math.nan  # waiting for peers per second under the plan in force; nan: unknown
    then_s: float = math.nan  # the same under this target
    policy: PlacementPolicy = "uniform"


def replan_reason(
    plan: PlacementPlan | None, engine: ChannelDescription, boxes: Sequence[ExpertHome], absent_s: float
) -> str:
    """Returns why a new plan is due for the model that the engine serves.

    "" if the plan is valid, or while an absent box may still come back.
    """
    known = {box.node: box for box in boxes}
    if plan is None or (plan.model, plan.layers, plan.experts) != (engine.model, engine.layers, engine.experts):
        awaited = [box for box in boxes if not box.is_available and not box.leaving and box.absent_s < absent_s]
        return "" if awaited else "there is none for this model"
    for node in plan.nodes:
        box = known.get(node)
        if box is None or box.leaving:
            return f"{node} leaves"
        if box.absent_s >= absent_s:
            return f"{node} is gone"
        if box.disk is not None and (np.array(_taken(plan, node, engine)) > box.rooms).any():
            return f"{node} has less room"
    if any(not box.is_available and not box.leaving and box.node in plan.nodes for box in boxes):
        return ""  # it may come back in a moment; then one plan covers all changes
    return next(
        (
            f"{box.node} has joined"
            for box in boxes
            if box.is_available and any(box.rooms) and box.node not in plan.nodes
        ),
        "",
    )


def _taken(plan: PlacementPlan, node: str, engine: ChannelDescription) -> list[int]:
    """Returns how many experts of each size a node is home to."""
    homes = plan.homes_of(node)
    return [int(homes[layers].sum()) for layers in layers_of_sizes(engine.bytes_of_layers)]


def make_plan(engine: ChannelDescription, target: PlacementTarget, epoch: int, version: int) -> PlacementPlan:
    """Returns the plan of the target's homes for the engine's model."""
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


def _rooms(engine: ChannelDescription, serving: ChannelDescription) -> tuple[int, ...]:
    """Returns how many experts of each size of the serving model fit there; zeros if the engine does not say."""
    sizes = len(set(serving.bytes_of_layers))
    if len(engine.rooms) == sizes:
        return engine.rooms
    return (engine.budget_experts,) if sizes == 1 else (0,) * sizes


def _experts_of(engine: ChannelDescription, serving: ChannelDescription) -> tuple[BoolArray | None, BoolArray | None]:
    """Returns the experts [L, E] on the engine's disk and pinned in its memory; None if it serves another model."""
    if engine.model != serving.model:
        return None, None
    try:
        disk, ram = (unpack_bits(bits, serving.layers, serving.experts) for bits in (engine.disk, engine.ram))
        return disk, ram
    except ValueError:
        return None, None


def make_question(
    task: PlacementTask, policy: PlacementPolicy = "uniform", horizon_s: float = 0.0
) -> PlacementQuestion:
    """Returns the solver's question. Raises PlacementInfeasible if no box can be a home."""
    engine, there, now = task.engine, task.available, task.now
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
            report=_of_model(task.reports.get(box.node), engine.model),
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
        boxes=boxes,
        horizon_s=horizon_s,
    )


def _of_model(report: BoxReport | None, model: str) -> BoxReport | None:
    return report if report is not None and report.model == model else None


def problem_of(asked: PlacementQuestion, seen: ActivityObservation) -> PlacementProblem:
    """Returns the placement problem: slots, experts in memory and on disk, and activations."""
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
    """Returns the uniform placement over the available boxes. Raises PlacementInfeasible."""
    asked = make_question(task)
    seen = observe([box.report for box in asked.boxes], asked.layers, asked.experts)
    rooms = [box.rooms for box in asked.boxes]
    placement = by_size(problem_of(asked, seen), asked.layer_bytes, rooms, lambda part, _: uniform(part, task.replicas))
    return PlacementTarget(
        tuple(box.node for box in task.available), placement.homes, placement.disk, _heat(seen), policy="uniform"
    )


def read_target(task: PlacementTask, asked: PlacementQuestion, solved: PlacementAnswer) -> PlacementTarget:
    """Returns the target that the solver answered. Raises ValueError if the answer does not fit the question."""
    homes, disk = (
        np.stack([unpack_bits(each, asked.layers, asked.experts) for each in bits])
        for bits in (solved.homes, solved.disk)
    )
    seen = observe([box.report for box in asked.boxes], asked.layers, asked.experts)
    known = task.now is not None and solved.known
    now_s, then_s = (solved.now_s, solved.then_s) if known else (math.nan, math.nan)
    nodes = tuple(box.node for box in task.available)
    return PlacementTarget(nodes, homes, disk, _heat(seen), now_s, then_s, solved.policy)


def _heat(seen: ActivityObservation) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(seen.activations.sum(axis=0), np.float32)
