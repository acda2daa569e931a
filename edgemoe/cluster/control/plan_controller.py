"""What the leader decides about the plan. Pure: events in, actions out; `leader` performs them.

    TookOver   this box leads now, in that epoch: what was under way is another leader's
    Look       a moment's view: the plan in force, the boxes and what they have acknowledged
    Solved     the answer to Solve
    ->
    Prepare    has the solver get ready: it will be asked within a minute
    Solve      asks for a placement: at once where the plan cannot go on, else at intervals for a better one
    Commit     makes a plan the plan

A plan whose `goal` is not empty is a step of a migration (`policy.migration`): each next step is committed
once the boxes have acknowledged this one, or nothing more has arrived for a while. The goal lies in the plan, so the
next leader goes on with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from edgemoe.cluster.control.coordination.store import PlanRef
from edgemoe.cluster.control.messages import EngineCard, Report
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
from edgemoe.types.placement import BY_SUCCESSIONS, PlacementPlan, pack_bits

log = logging.getLogger(__name__)
SETTLE_S = 1.0  # for which what asks for a new plan must have stood
STALL_S = 30.0  # without another copy acknowledged; then the next step is made without those that lack
PREPARE_S = 60.0  # before a better plan is looked for, the solver gets ready
SOON_S = 30.0  # after a plan made in haste, a better one is looked for


class LeadershipTaken(NamedTuple):
    epoch: int


class PlacementSolved(NamedTuple):
    """The answer to the task of that number; without a target, why there is none."""

    number: int
    target: PlacementTarget | None
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ClusterObserved:
    """What the leader sees at a moment."""

    now_s: float
    agreed: PlanRef | None
    plan: PlacementPlan | None  # the one agreed, where it is held here
    engine: EngineCard  # of one that serves the cluster's model
    boxes: tuple[ExpertHome, ...]  # that are or could be homes
    reports: Mapping[str, Report] = field(default_factory=dict)  # by node

    @property
    def version(self) -> int:
        """Returns the version of the next plan."""
        return self.agreed.version + 1 if self.agreed else 1


class PrepareSolver(NamedTuple):
    pass


class SolvePlacement(NamedTuple):
    number: int
    task: PlacementTask


class CommitPlacement(NamedTuple):
    plan: PlacementPlan
    why: str


Event = LeadershipTaken | ClusterObserved | PlacementSolved
Action = PrepareSolver | SolvePlacement | CommitPlacement


class PlanController:
    """One owner."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._epoch = self._number = 0
        self._forget()

    @property
    def blocker(self) -> str:
        """Returns why there is no new plan, or what keeps the one in force from being reached."""
        return self._no_plan or self._late

    def handle(self, event: Event) -> list[Action]:
        """Takes note of what has happened. Returns what is to be done."""
        match event:
            case LeadershipTaken(epoch):
                self._epoch = epoch
                self._forget()
                return []
            case ClusterObserved():
                return self._look_at(event)
            case PlacementSolved():
                return self._take(event)

    def _forget(self) -> None:
        self._no_plan = self._late = ""
        self._look: ClusterObserved | None = None
        self._due = ("", 0.0)  # why a new plan is due, and since when
        self._task: PlacementTask | None = None  # being solved
        self._number += 1  # what comes yet is the answer to no task
        self._review_s = float("inf")  # when a better plan is looked for
        self._prepared_s = float("-inf")  # the one of these times for which the solver was told to get ready
        self._steps: dict[str, int] = {}  # of each box, when one was
        self._arrived = (("", 0), 0.0)  # plan and copies acknowledged, and since when

    # --- looking ----------------------------------------------------------------------------------------------

    def _look_at(self, look: ClusterObserved) -> list[Action]:
        first = self._look is None
        self._look = look
        if first:
            self._review_s, self._steps = look.now_s + self._settings.migrate_s, _steps(look)
        why = replan_reason(look.plan, look.engine, look.boxes, self._settings.absent_s)
        if why != self._due[0]:
            self._due = (why, look.now_s)
            self._no_plan = self._no_plan if why else ""  # the plan in force will do again
        if look.plan is None or not look.plan.goal:
            self._late = ""
        if why:
            return self._solve(look, urgent=True) if look.now_s - self._due[1] >= SETTLE_S else []
        if look.plan is None or not _all_there(look.plan, look.boxes):
            return []
        if self._settings.migrate_s and (look.now_s >= self._review_s or self._has_run(look)):
            self._review_s, self._steps = look.now_s + self._settings.migrate_s, _steps(look)
            return self._solve(look, urgent=False)
        actions: list[Action] = []
        if self._settings.migrate_s and self._prepared_s < self._review_s <= look.now_s + PREPARE_S:
            self._prepared_s = self._review_s
            actions.append(PrepareSolver())
        return actions + self._go_on(look, look.plan) if look.plan.goal else actions

    def _has_run(self, look: ClusterObserved) -> bool:
        """Returns whether a box has run so many steps that what follows what is to be looked at again [Gimbal, tau]."""
        if not self._settings.migrate_steps or self._settings.placement not in BY_SUCCESSIONS:
            return False
        for node, now in _steps(look).items():
            before = self._steps.setdefault(node, now)  # of one that had not been heard of
            if now - (before if before <= now else 0) >= self._settings.migrate_steps:  # one begun anew counts from 0
                return True
        return False

    def _solve(self, look: ClusterObserved, *, urgent: bool) -> list[Action]:
        if self._task is not None and (self._task.urgent or not urgent):
            return []
        self._number += 1
        self._task = PlacementTask(look.engine, look.boxes, self._settings.replicas, look.reports, look.plan, urgent)
        return [SolvePlacement(self._number, self._task)]

    # --- moving -----------------------------------------------------------------------------------------------

    def _go_on(self, look: ClusterObserved, plan: PlacementPlan) -> list[Action]:
        """Commits the next step of the migration under way, if it is time."""
        moving = _migration(look, plan, PlacementTarget(plan.nodes, plan.goal_homes, plan.disk_homes, _heat(look)))
        arrived = ((look.agreed.digest if look.agreed else "", int(np.count_nonzero(moving.pinned))), look.now_s)
        if arrived[0] != self._arrived[0]:
            self._arrived = arrived
        if not moving.is_acknowledged and look.now_s - self._arrived[1] < STALL_S:
            return []
        late = ", ".join(node for node, lacks in zip(plan.nodes, moving.late, strict=True) if lacks)
        self._late = f"experts do not move on: {late} have not said that they pinned theirs" if late else ""
        homes = moving.next_homes()
        if (homes != moving.now).any():
            return [self._step(look, plan, homes, moving.goal, "a step of a migration")]
        if moving.is_acknowledged:  # there is no room to go any further
            return [self._step(look, plan, homes, homes, "a migration ends")]
        return []

    def _take(self, solved: PlacementSolved) -> list[Action]:
        """Begins to move to what was found, from whatever is in force now."""
        task, look = self._task, self._look
        if solved.number != self._number or task is None or look is None:
            return []
        self._task = None
        target = solved.target
        if target is None:
            if self._no_plan != solved.why:
                log.warning(
                    "no plan", extra={"because": self._due[0] or "a better one is looked for", "why": solved.why}
                )
            self._no_plan, self._due = solved.why, (self._due[0], look.now_s)
            return []
        there = {box.node for box in look.boxes if box.there}
        if task.now is not look.plan or not there.issuperset(target.nodes) or (task.urgent and not self._due[0]):
            return []  # it was found for a cluster that is another now
        self._no_plan = ""
        moving = _migration(look, look.plan, target)
        plan = make_plan(look.engine, target, self._epoch, look.version)
        if task.urgent:
            soon_s = look.now_s + SOON_S
            if soon_s < self._review_s:
                self._review_s = self._prepared_s = soon_s  # boxes have enough to do until then
            return [self._step(look, plan, moving.next_homes(), target.homes, self._due[0])]
        sizes = np.array(look.engine.bytes_of_layers)
        rates = np.array([bytes_per_s(look.reports.get(node)) for node in target.nodes], np.float32)
        copying_s = copy_s(moving.now, target.homes, sizes, rates)
        if not pays(target.now_s, target.then_s, copying_s, self._settings.migrate_s, self._settings.migrate_gain):
            saved = {"now_s": target.now_s, "then_s": target.then_s, "copying_s": copying_s}
            log.debug("a better plan would not pay", extra=saved)
            return []
        homes = moving.next_homes()
        gain = f"requests wait {target.then_s:.3g} s a second for peers instead of {target.now_s:.3g}"
        if (homes == moving.now).all():
            log.warning("no box has room to begin a better plan; give one more memory.ram_bytes", extra={"why": gain})
            return []
        return [self._step(look, plan, homes, target.homes, gain)]

    def _step(
        self, look: ClusterObserved, plan: PlacementPlan, homes: BoolArray, goal: BoolArray, why: str
    ) -> CommitPlacement:
        """Returns the plan with these homes [N, L, E] on the way to `goal`."""
        step = msgspec.structs.replace(
            plan,
            epoch=self._epoch,
            version=look.version,
            homes=tuple(map(pack_bits, homes)),
            goal=tuple(map(pack_bits, goal)) if (goal != homes).any() else (),
        )
        return CommitPlacement(step, why)


def _steps(look: ClusterObserved) -> dict[str, int]:
    return {node: report.steps for node, report in look.reports.items()}


def _all_there(plan: PlacementPlan, boxes: tuple[ExpertHome, ...]) -> bool:
    there = {box.node for box in boxes if box.there}
    return there.issuperset(plan.nodes)


def _migration(look: ClusterObserved, plan: PlacementPlan | None, target: PlacementTarget) -> Migration:
    """States a migration of the homes in force to the target's.

    A box that the plan does not name goes on with the homes that it has.
    """
    boxes = {box.node: box for box in look.boxes}
    nodes, goal = target.nodes, target.homes
    none = np.zeros(goal.shape[1:], np.bool_)
    now, pinned = np.zeros_like(goal), np.zeros_like(goal)
    for n, node in enumerate(nodes):
        box = boxes[node]
        ram = none if box.ram is None else box.ram
        named = plan is not None and node in plan.nodes and plan.model == look.engine.model
        now[n] = plan.homes_of(node) if plan is not None and named else ram
        if named and box.there and look.agreed is not None and box.plan == look.agreed.digest:
            pinned[n] = ram & now[n]
    sizes = layers_of_sizes(look.engine.bytes_of_layers)
    room = np.array([boxes[node].rooms or (0,) * len(sizes) for node in nodes], np.int64)
    return Migration(now, pinned, goal, room, target.heat, np.asarray(target.disk.any(axis=0)), sizes)


def _heat(look: ClusterObserved) -> FloatArray:
    """Returns how often each expert [L, E] is chosen, by all reports of this model."""
    shape = look.engine.layers, look.engine.experts
    heat = np.zeros(shape, np.float32)
    for report in look.reports.values():
        if report.model == look.engine.model and len(report.chosen) == 2 * heat.size:
            heat += tokens_per_s(report) * np.frombuffer(report.chosen, "<u2").reshape(shape)
    return heat
