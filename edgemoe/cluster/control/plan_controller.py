"""Decides when the leader changes the placement plan. Pure: events in, instructions out; `leader` performs them.

A plan whose `goal` is not empty is one step of a migration. The next step follows once the boxes have acknowledged this
one, or when nothing more has arrived for STALL_S. The goal is part of the plan, so the next leader continues with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.messages import BoxReport, ChannelDescription
from edgemoe.cluster.control.planning.observation import bytes_per_s, tokens_per_s
from edgemoe.cluster.control.planning.targets import (
    ExpertHome,
    PlacementTarget,
    PlacementTask,
    make_plan,
    replan_reason,
)
from edgemoe.config.settings import ClusterSettings
from edgemoe.policy.migration import Migration, copy_s, pays
from edgemoe.types.arrays import BoolArray, FloatArray
from edgemoe.types.experts import layers_of_sizes
from edgemoe.types.placement import PlacementPlan, pack_bits

log = logging.getLogger(__name__)
SETTLE_S = 1.0  # for which the reason of a new plan must last before one is made
STALL_S = 30.0  # without a new acknowledged copy, after which the next step leaves out the missing copies
PREPARE_S = 60.0  # before a review, the solver's process is started
SOON_S = 30.0  # after an urgent plan, it is reviewed


class LeadershipTaken(NamedTuple):
    """This box leads from now on, in that epoch; 0: it no longer leads. Work in progress is dropped."""

    epoch: int


class PlacementSolved(NamedTuple):
    """The solver answered the task of that number; without a target, `why` is the reason."""

    number: int
    target: PlacementTarget | None
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ClusterObserved:
    """The leader looked at the plan in force, the boxes, and the homes that these have acknowledged."""

    now_s: float
    agreed: PlanRef | None
    plan: PlacementPlan | None  # the agreed one, if this box holds it
    engine: ChannelDescription  # serves the cluster's model
    boxes: tuple[ExpertHome, ...]
    reports: Mapping[str, BoxReport] = field(default_factory=dict)  # by node

    @property
    def version(self) -> int:
        """The version of the next plan."""
        return self.agreed.version + 1 if self.agreed else 1


class PrepareSolver(NamedTuple):
    """Start the solver's process: it will be used within PREPARE_S."""


class SolvePlacement(NamedTuple):
    """Have the solver find a placement, in place of the task before."""

    number: int
    task: PlacementTask


class CommitPlacement(NamedTuple):
    """Have this plan agreed, then follow it."""

    plan: PlacementPlan
    why: str


Event = LeadershipTaken | ClusterObserved | PlacementSolved
Instruction = PrepareSolver | SolvePlacement | CommitPlacement


class PlanController:
    """Keeps the state of the plan's upkeep while this box leads. Owned by `leader.Leader`."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._epoch = self._number = 0
        self._reset()

    @property
    def blocker(self) -> str:
        """Why there is no new plan, or which boxes keep the migration waiting; "" if nothing is wrong."""
        return self._no_plan or self._late

    def handle(self, event: Event) -> list[Instruction]:
        """Updates the state. Returns instructions."""
        match event:
            case LeadershipTaken(epoch):
                self._epoch = epoch
                self._reset()
                return []
            case ClusterObserved():
                return self._on_observed(event)
            case PlacementSolved():
                return self._on_solved(event)

    def _reset(self) -> None:
        self._no_plan = self._late = ""
        self._seen: ClusterObserved | None = None  # the last one
        self._due = ("", 0.0)  # why a new plan is due, and since when
        self._task: PlacementTask | None = None  # being solved
        self._number += 1  # answers to earlier tasks are ignored
        self._review_s = float("inf")  # time of the next review, which looks for a better plan
        self._prepared_s = float("-inf")  # the review for which the solver was last prepared
        self._steps: dict[str, int] = {}  # of each box at the last review
        self._arrived = (("", 0), 0.0)  # the plan's digest and the number of acknowledged copies, and since when

    # --- decisions --------------------------------------------------------------------------------------------

    def _on_observed(self, seen: ClusterObserved) -> list[Instruction]:
        first = self._seen is None
        self._seen = seen
        if first:
            self._review_s, self._steps = seen.now_s + self._settings.migrate_s, _steps(seen)
        why = replan_reason(seen.plan, seen.engine, seen.boxes, self._settings.absent_s)
        if why != self._due[0]:
            self._due = (why, seen.now_s)
            self._no_plan = self._no_plan if why else ""  # the plan in force is valid again
        if seen.plan is None or not seen.plan.goal:
            self._late = ""
        if why:
            return self._solve(seen, urgent=True) if seen.now_s - self._due[1] >= SETTLE_S else []
        if seen.plan is None or not _all_available(seen.plan, seen.boxes):
            return []
        if self._settings.migrate_s and (seen.now_s >= self._review_s or self._have_steps_passed(seen)):
            self._review_s, self._steps = seen.now_s + self._settings.migrate_s, _steps(seen)
            return self._solve(seen, urgent=False)
        instructions: list[Instruction] = []
        if self._settings.migrate_s and self._prepared_s < self._review_s <= seen.now_s + PREPARE_S:
            self._prepared_s = self._review_s
            instructions.append(PrepareSolver())
        return instructions + self._continue_migration(seen, seen.plan) if seen.plan.goal else instructions

    def _have_steps_passed(self, seen: ClusterObserved) -> bool:
        """Whether a box has run `migrate_steps` since the last review [Gimbal, tau]."""
        if not self._settings.migrate_steps or self._settings.placement != "gimbal":
            return False
        for node, now in _steps(seen).items():
            before = self._steps.setdefault(node, now)  # a first report counts from now
            if (
                now - (before if before <= now else 0) >= self._settings.migrate_steps
            ):  # a restarted engine counts from 0
                return True
        return False

    def _solve(self, seen: ClusterObserved, *, urgent: bool) -> list[Instruction]:
        if self._task is not None and (self._task.urgent or not urgent):
            return []
        self._number += 1
        self._task = PlacementTask(seen.engine, seen.boxes, self._settings.replicas, seen.reports, seen.plan, urgent)
        return [SolvePlacement(self._number, self._task)]

    # --- moving -----------------------------------------------------------------------------------------------

    def _continue_migration(self, seen: ClusterObserved, plan: PlacementPlan) -> list[Instruction]:
        """Commits the next step of the migration in progress, if it is due."""
        moving = _migration(seen, plan, PlacementTarget(plan.nodes, plan.goal_homes, plan.disk_homes, _heat(seen)))
        arrived = ((seen.agreed.digest if seen.agreed else "", int(np.count_nonzero(moving.pinned))), seen.now_s)
        if arrived[0] != self._arrived[0]:
            self._arrived = arrived
        if not moving.is_acknowledged and seen.now_s - self._arrived[1] < STALL_S:
            return []
        late = ", ".join(node for node, lacks in zip(plan.nodes, moving.late, strict=True) if lacks)
        self._late = f"experts do not move on: {late} have not said that they pinned theirs" if late else ""
        homes = moving.next_homes()
        if (homes != moving.now).any():
            return [self._step(seen, plan, homes, moving.goal, "a step of a migration")]
        if moving.is_acknowledged:  # no box has room for another step
            return [self._step(seen, plan, homes, homes, "a migration ends")]
        return []

    def _on_solved(self, solved: PlacementSolved) -> list[Instruction]:
        """Starts a migration from the homes in force to the solver's target, if that still fits and pays."""
        task, seen = self._task, self._seen
        if solved.number != self._number or task is None or seen is None:
            return []
        self._task = None
        target = solved.target
        if target is None:
            if self._no_plan != solved.why:
                log.warning(
                    "no plan", extra={"because": self._due[0] or "a better one is looked for", "why": solved.why}
                )
            self._no_plan, self._due = solved.why, (self._due[0], seen.now_s)
            return []
        available = {box.node for box in seen.boxes if box.is_available}
        if task.now is not seen.plan or not available.issuperset(target.nodes) or (task.urgent and not self._due[0]):
            return []  # the cluster has changed since the question
        self._no_plan = ""
        moving = _migration(seen, seen.plan, target)
        plan = make_plan(seen.engine, target, self._epoch, seen.version)
        if task.urgent:
            soon_s = seen.now_s + SOON_S
            if soon_s < self._review_s:
                self._review_s = self._prepared_s = soon_s  # until then boxes are busy with this one
            return [self._step(seen, plan, moving.next_homes(), target.homes, self._due[0])]
        sizes = np.array(seen.engine.bytes_of_layers)
        rates = np.array([bytes_per_s(seen.reports.get(node)) for node in target.nodes], np.float32)
        copying_s = copy_s(moving.now, target.homes, sizes, rates)
        if not pays(target.now_s, target.then_s, copying_s, self._settings.migrate_s):
            saved = {"now_s": target.now_s, "then_s": target.then_s, "copying_s": copying_s}
            log.debug("a better plan would not pay", extra=saved)
            return []
        homes = moving.next_homes()
        gain = f"requests wait {target.then_s:.3g} s a second for peers instead of {target.now_s:.3g}"
        if (homes == moving.now).all():
            log.warning("no box has room to begin a better plan; give one more memory.ram_bytes", extra={"why": gain})
            return []
        return [self._step(seen, plan, homes, target.homes, gain)]

    def _step(
        self, seen: ClusterObserved, plan: PlacementPlan, homes: BoolArray, goal: BoolArray, why: str
    ) -> CommitPlacement:
        """Returns the plan with these homes [N, L, E], as a step towards `goal`."""
        step = msgspec.structs.replace(
            plan,
            epoch=self._epoch,
            version=seen.version,
            homes=tuple(map(pack_bits, homes)),
            goal=tuple(map(pack_bits, goal)) if (goal != homes).any() else (),
        )
        return CommitPlacement(step, why)


def _steps(seen: ClusterObserved) -> dict[str, int]:
    return {node: report.steps for node, report in seen.reports.items()}


def _all_available(plan: PlacementPlan, boxes: tuple[ExpertHome, ...]) -> bool:
    available = {box.node for box in boxes if box.is_available}
    return available.issuperset(plan.nodes)


def _migration(seen: ClusterObserved, plan: PlacementPlan | None, target: PlacementTarget) -> Migration:
    """Returns the migration from the homes in force to the target's.

    A box that the plan does not name starts from the experts that it has pinned.
    """
    boxes = {box.node: box for box in seen.boxes}
    nodes, goal = target.nodes, target.homes
    none = np.zeros(goal.shape[1:], np.bool_)
    now, pinned = np.zeros_like(goal), np.zeros_like(goal)
    for n, node in enumerate(nodes):
        box = boxes[node]
        ram = none if box.ram is None else box.ram
        named = plan is not None and node in plan.nodes and plan.model == seen.engine.model
        now[n] = plan.homes_of(node) if plan is not None and named else ram
        if named and box.is_available and seen.agreed is not None and box.plan == seen.agreed.digest:
            pinned[n] = ram & now[n]
    sizes = layers_of_sizes(seen.engine.bytes_of_layers)
    room = np.array([boxes[node].rooms or (0,) * len(sizes) for node in nodes], np.int64)
    return Migration(now, pinned, goal, room, target.heat, np.asarray(target.disk.any(axis=0)), sizes)


def _heat(seen: ClusterObserved) -> FloatArray:
    """Returns how often each expert [L, E] is chosen a second, by all reports of this model."""
    shape = seen.engine.layers, seen.engine.experts
    heat = np.zeros(shape, np.float32)
    for report in seen.reports.values():
        if report.model == seen.engine.model and len(report.chosen) == 2 * heat.size:
            heat += tokens_per_s(report) * np.frombuffer(report.chosen, "<u2").reshape(shape)
    return heat
