"""Boxes that pin their homes, report, die and return, the agreed plan, and a leader that updates it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.messages import Announce, BoxReport, ChannelDescription
from edgemoe.cluster.control.plan_controller import (
    ClusterObserved,
    CommitPlacement,
    Instruction,
    LeadershipTaken,
    PlacementSolved,
    PlanController,
    PrepareSolver,
    SolvePlacement,
)
from edgemoe.cluster.control.planning.targets import HomeInventory, PlacementTarget, make_target
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PlacementInfeasible
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import PlacementPlan, pack_bits
from support.planes import card

LAYERS, EXPERTS = 2, 6
ALL = np.ones((LAYERS, EXPERTS), np.bool_)
NOTHING = np.zeros((LAYERS, EXPERTS), np.bool_)
NODES = "abcd"
SETTINGS = ClusterSettings(node="a", replicas=2, absent_s=5.0, migrate_s=20.0)
ONCE = ClusterSettings(node="a", replicas=1, absent_s=5.0, migrate_s=20.0)


@dataclass
class Box:
    """A box with an engine that pins its homes, one expert after the other."""

    node: str
    room: int = 8
    alive: bool = True
    gone_s: float = 0.0
    leaving: bool = False
    plan: PlacementPlan | None = None
    pins: BoolArray = field(default_factory=NOTHING.copy)
    card: ChannelDescription | None = None  # as it was last reported

    def obey(self, plan: PlacementPlan) -> None:
        self.plan = plan
        if self.node in plan.nodes:
            self.pins &= plan.homes_of(self.node)

    def pin(self, count: int) -> None:
        if self.plan is not None and self.node in self.plan.nodes:
            missing = np.flatnonzero(self.plan.homes_of(self.node) & ~self.pins)
            self.pins.ravel()[missing[:count]] = True

    def report(self) -> None:
        digest = self.plan.digest() if self.plan is not None else ""
        made = card(f"engine-{self.node}", self.room, disk=pack_bits(ALL), ram=pack_bits(self.pins))
        self.card = msgspec.structs.replace(made, plan=digest)


class World:
    """The boxes, the agreed plan, and a leader."""

    def __init__(self, nodes: str = NODES, settings: ClusterSettings = SETTINGS) -> None:
        self.boxes = {node: Box(node) for node in nodes}
        self.settings, self.now_s, self.epoch = settings, 100.0, 0
        self.agreed: PlacementPlan | None = None
        self.committed: list[CommitPlacement] = []
        self.prepared_s: list[float] = []  # when the solver was told to get ready
        self.slow = False  # the solver answers when `answers` is called
        self.asked: SolvePlacement | None = None
        self.wanted: PlacementTarget | None = None  # the solver's answer to a review
        self.reports: dict[str, BoxReport] = {}
        for box in self.boxes.values():
            box.report()
        self.leads()

    def leads(self) -> None:
        """Replaces the leader by a box that knows only the agreed plan and the reports."""
        self.epoch += 1
        self.controller, self.view = PlanController(self.settings), HomeInventory()
        self.controller.handle(LeadershipTaken(self.epoch))

    def observe(self) -> ClusterObserved | None:
        cards = {
            node: Announce("1", "box", "", engine=box.card, leaving=box.leaving) for node, box in self.boxes.items()
        }
        serving = next((box.card for box in self.boxes.values() if box.alive and box.card is not None), None)
        if serving is None:
            return None
        away = {node: 0.0 if box.alive else self.now_s - box.gone_s + 0.001 for node, box in self.boxes.items()}
        boxes = self.view.update(cards, away.__getitem__, serving, self.now_s)
        ref = PlanRef(self.agreed.version, self.agreed.digest()) if self.agreed else None
        return ClusterObserved(self.now_s, ref, self.agreed, serving, boxes, self.reports)

    def step(self) -> None:
        """Has the leader observe the cluster and perform its instructions."""
        if (look := self.observe()) is None:
            return
        actions = self.controller.handle(look)
        while actions:
            actions = [more for action in actions for more in self.perform(action)]

    def perform(self, action: Instruction) -> list[Instruction]:
        if isinstance(action, PrepareSolver):
            self.prepared_s.append(self.now_s)
            return []
        if isinstance(action, CommitPlacement):
            self.commit(action)
            return []
        if isinstance(action, SolvePlacement) and self.slow:
            self.asked = action
            return []
        return self.answer(action)

    def answer(self, action: SolvePlacement) -> list[Instruction]:
        try:
            found = make_target(action.task) if action.task.urgent or self.wanted is None else self.wanted
        except PlacementInfeasible as error:
            return self.controller.handle(PlacementSolved(action.number, None, str(error)))
        return self.controller.handle(PlacementSolved(action.number, found))

    def answers(self) -> None:
        """Answers the last task; the leader observes the cluster before it gets the answer."""
        asked, self.asked = self.asked, None
        if asked is None or (look := self.observe()) is None:
            return
        actions = self.controller.handle(look) + self.answer(asked)
        while actions:
            actions = [more for action in actions for more in self.perform(action)]

    def commit(self, action: CommitPlacement) -> None:
        plan = action.plan
        assert plan.version == (self.agreed.version + 1 if self.agreed else 1)
        assert plan.epoch == self.epoch
        for node in plan.nodes:
            assert plan.homes_of(node).sum() <= self.boxes[node].room, "more than there is room for"
        self.judge(plan)
        self.agreed = plan
        self.committed.append(action)

    def judge(self, plan: PlacementPlan) -> None:
        """Checks: no command drops the last pinned copy on live boxes."""
        stays = NOTHING.copy()
        for box in self.boxes.values():
            if box.alive:
                stays |= box.pins & plan.homes_of(box.node) if box.node in plan.nodes else box.pins
        for box in self.boxes.values():
            if box.alive and box.node in plan.nodes:
                dropped = box.pins & ~plan.homes_of(box.node)
                assert not (dropped & ~stays).any(), (box.node, plan)

    def passes(self, seconds: float, every_s: float = 0.5) -> None:
        """Lets all boxes follow the plan, pin and report; the leader observes them at intervals."""
        ends = self.now_s + seconds
        while self.now_s < ends:
            self.now_s += every_s
            for box in self.boxes.values():
                if box.alive and self.agreed is not None and box.plan is not self.agreed:
                    box.obey(self.agreed)
                box.pin(3)
                box.report()
            self.step()

    def wants(self, homes: dict[str, BoolArray], now_s: float = 2.0, then_s: float = 1.0) -> None:
        found = np.stack([homes[node] for node in sorted(homes)])
        self.wanted = PlacementTarget(
            tuple(sorted(homes)), found, np.zeros_like(found), np.zeros_like(found[0], np.float32), now_s, then_s
        )


def dealt(nodes: str, shift: int, copies: int = 1) -> dict[str, BoolArray]:
    """Returns homes with each expert at this number of boxes, in turn."""
    each = (np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) + shift) % len(nodes)
    return {node: np.isin((each - n) % len(nodes), range(copies)) for n, node in enumerate(nodes)}
