"""The leader's decisions about the plan, with boxes that pin, report, die and return at random."""

from __future__ import annotations

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.examples import examples
from support.plan_world import ALL, EXPERTS, LAYERS, NODES, NOTHING, ONCE, SETTINGS, Box, World, dealt

from edgemoe.cluster.control.messages import BoxReport
from edgemoe.cluster.control.plan_controller import (
    PREPARE_S,
    SOON_S,
    STALL_S,
    LeadershipTaken,
    PlacementSolved,
    SolvePlacement,
)
from edgemoe.cluster.control.planning.targets import make_target
from edgemoe.config.settings import ClusterSettings
from edgemoe.policy.migration import Migration, copy_s, pays
from edgemoe.types.placement import pack_bits


class AnythingHappens(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def box(self, number: int) -> Box:
        return self.world.boxes[NODES[number]]

    @rule(seconds=st.sampled_from([0.4, 1.1, 6.0, STALL_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule()
    def the_leader_looks(self) -> None:
        self.world.step()

    @rule()
    def another_leads(self) -> None:
        self.world.leads()

    @rule(number=st.integers(0, 3))
    def a_box_hears_of_the_plan(self, number: int) -> None:
        if self.world.agreed is not None and self.box(number).alive:
            self.box(number).obey(self.world.agreed)

    @rule(number=st.integers(0, 3), count=st.integers(1, 12))
    def a_box_pins(self, number: int, count: int) -> None:
        if self.box(number).alive:
            self.box(number).pin(count)

    @rule(number=st.integers(0, 3))
    def a_box_reports(self, number: int) -> None:
        if self.box(number).alive:
            self.box(number).report()

    @rule(number=st.integers(0, 3))
    def a_box_dies_or_is_back(self, number: int) -> None:
        box = self.box(number)
        if box.alive:
            box.alive, box.gone_s, box.pins = False, self.world.now_s, NOTHING.copy()
        else:
            box.alive, box.plan, box.leaving = True, None, False
            box.report()

    @rule(number=st.integers(0, 3))
    def a_box_is_cut_off_and_keeps_what_it_has(self, number: int) -> None:
        box = self.box(number)
        if box.alive:
            box.alive, box.gone_s = False, self.world.now_s

    @rule(number=st.integers(0, 3), room=st.sampled_from([6, 8, 12]))
    def an_engine_restarts_with_other_memory(self, number: int, room: int) -> None:
        box = self.box(number)
        if box.alive:
            box.room, box.plan, box.pins = room, None, NOTHING.copy()
            box.report()

    @rule(slow=st.booleans())
    def the_solver_takes_its_time_or_not(self, slow: bool) -> None:
        self.world.slow = slow

    @rule()
    def the_solver_answers(self) -> None:
        self.world.answers()

    @rule(number=st.integers(0, 3))
    def a_box_leaves(self, number: int) -> None:
        self.box(number).leaving = self.box(number).alive

    @rule(shift=st.integers(0, 3), copies=st.integers(1, 2))
    def something_better_is_known(self, shift: int, copies: int) -> None:
        there = "".join(node for node, box in self.world.boxes.items() if box.alive and not box.leaving)
        if there and len(there) * 6 >= LAYERS * EXPERTS * copies:
            self.world.wants(dealt(there, shift, copies))
        else:
            self.world.wanted = None

    @invariant()
    def versions_follow_each_other(self) -> None:
        versions = [commit.plan.version for commit in self.world.committed]
        assert versions == list(range(1, len(versions) + 1))

    def teardown(self) -> None:
        """Ends the faults: then every expert is pinned and acknowledged, and no migration is left."""
        world = self.world
        world.wanted, world.slow = None, False
        world.answers()
        for box in world.boxes.values():
            if not box.alive:
                box.alive, box.plan = True, None
            box.leaving, box.room = False, 8
        world.passes(4 * STALL_S, 3.0)
        plan = world.agreed
        assert plan is not None
        assert plan.nodes == tuple(NODES)
        assert not plan.goal
        pinned = [box.pins for box in world.boxes.values()]
        assert np.logical_or.reduce(pinned).all()
        for box in world.boxes.values():
            assert (box.pins == plan.homes_of(box.node)).all()


def test_in_any_order_of_events_no_plan_drops_a_last_pinned_copy() -> None:
    many = hypothesis.settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
    hypothesis.stateful.run_state_machine_as_test(AnythingHappens, settings=many)


def test_a_better_plan_is_gone_to_by_way_of_the_union_and_former_homes_are_dropped_last() -> None:
    world = World("abc", ONCE)
    world.passes(5.0)
    before = world.agreed
    assert before is not None
    assert len(world.committed) == 1
    goal = dealt("abc", 1)
    world.wants(goal)
    world.passes(SETTINGS.migrate_s + 15.0)
    assert world.agreed is not None
    assert not world.agreed.goal
    assert all((world.agreed.homes_of(node) == homes).all() for node, homes in goal.items())
    union, last = [commit.plan for commit in world.committed[1:]]
    assert union.goal
    assert not last.goal
    for node in "abc":
        assert (union.homes_of(node) == before.homes_of(node) | goal[node]).all()


def test_a_next_leader_goes_on_to_the_goal_that_lies_in_the_plan() -> None:
    world = World("abc", ONCE)
    world.passes(5.0)
    goal = dealt("abc", 1)
    world.wants(goal)
    while world.agreed is None or not world.agreed.goal:
        world.passes(0.5)
    world.leads()
    world.wanted = None
    world.passes(10.0)
    assert not world.agreed.goal
    assert all((world.agreed.homes_of(node) == homes).all() for node, homes in goal.items())


def test_a_later_plan_takes_the_place_of_a_migration_that_is_stuck() -> None:
    world = World("abc", ONCE)
    world.passes(5.0)
    world.boxes["a"].pin = lambda count: None  # type: ignore[method-assign]
    world.wants(dealt("abc", 1))
    while world.agreed is None or not world.agreed.goal:
        world.passes(0.5)
    stuck, goal = world.agreed, dealt("abc", 2)
    world.wants(goal)
    world.passes(SETTINGS.migrate_s + 2.0)
    assert world.agreed.goal not in ((), stuck.goal)
    assert (world.agreed.goal_homes == np.stack(list(goal.values()))).all()
    del world.boxes["a"].pin  # type: ignore[attr-defined]
    world.passes(10.0)
    assert all((world.agreed.homes_of(node) == homes).all() for node, homes in goal.items())


def test_a_gain_that_is_no_more_than_the_margin_moves_nothing() -> None:
    world = World("abc")
    world.passes(5.0)
    world.wants(dealt("abc", 1, 2), now_s=1.0, then_s=0.96)
    world.passes(3 * SETTINGS.migrate_s)
    assert len(world.committed) == 1
    world.wants(dealt("abc", 1, 2), now_s=float("nan"), then_s=float("nan"))
    world.passes(3 * SETTINGS.migrate_s)
    assert len(world.committed) == 1


def test_the_solver_gets_ready_once_a_minute_before_it_is_asked() -> None:
    every_s = 3 * PREPARE_S
    world = World("abc", msgspec.structs.replace(ONCE, migrate_s=every_s))
    world.passes(SOON_S + every_s - PREPARE_S)
    assert not world.prepared_s, "what follows a plan made in haste is left to the question"
    world.passes(2 * every_s)
    first_s, then_s = world.prepared_s
    assert then_s - first_s == every_s
    world.leads()
    world.passes(every_s - PREPARE_S - 1.0)
    assert len(world.prepared_s) == 2, "another leader's review is far off"
    world.passes(2.0)
    assert len(world.prepared_s) == 3
    never = World("abc", msgspec.structs.replace(ONCE, migrate_s=0.0))
    never.passes(2 * every_s)
    assert not never.prepared_s


def test_boxes_steps_trigger_a_search_if_placement_uses_successions() -> None:
    """Counts a box's steps since the last review; a restarted engine counts from 0."""
    for placement, looks in (("gimbal", True), ("prism", False)):
        world = World("abc", msgspec.structs.replace(ONCE, placement=placement, migrate_s=1e6, migrate_steps=300))
        world.reports = {"a": BoxReport("m", 1.0, b"", steps=290), "b": BoxReport("m", 1.0, b"", steps=9000)}
        world.passes(5.0)
        for shift, (a, b, due) in enumerate([(589, 9299, 0), (590, 9299, 1), (600, 299, 0), (600, 300, 1)]):
            before = len(world.committed)
            world.wants(dealt("abc", 1 + shift))
            world.reports = {"a": BoxReport("m", 1.0, b"", steps=a), "b": BoxReport("m", 1.0, b"", steps=b)}
            world.passes(10.0)
            assert len(world.committed) - before == (2 * due if looks else 0), (placement, a, b)
        before = len(world.committed)
        world.wants(dealt("abc", 1), now_s=1.0, then_s=0.96)
        world.reports = {"a": BoxReport("m", 1.0, b"", steps=9000)}
        world.passes(10.0)
        assert len(world.committed) == before, "nothing is gained"


def test_a_box_that_does_not_acknowledge_keeps_the_others_former_homes_alive_and_is_named() -> None:
    world = World("ab", ONCE)
    for box in world.boxes.values():
        box.room = 12
    world.passes(5.0)
    assert world.agreed is not None
    before = world.agreed.homes_of("b")
    world.wants({"a": ALL, "b": NOTHING})
    world.boxes["a"].pin = lambda count: None  # type: ignore[method-assign]
    world.passes(SETTINGS.migrate_s + 3 * STALL_S)
    assert (world.agreed.homes_of("b") == before).all()
    assert world.controller.blocker == "experts do not move on: a have not said that they pinned theirs"
    del world.boxes["a"].pin  # type: ignore[attr-defined]
    world.passes(5.0)
    assert not world.agreed.homes_of("b").any()
    assert not world.controller.blocker


def test_a_failure_to_plan_is_cleared_once_the_plan_in_force_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Box.report

    def without_disks(box: Box) -> None:
        real(box)
        assert box.card is not None
        box.card = msgspec.structs.replace(box.card, disk=pack_bits(NOTHING))

    monkeypatch.setattr(Box, "report", without_disks)
    world = World("abc", msgspec.structs.replace(ONCE, migrate_s=0.0))
    for node, homes in dealt("abc", 0).items():
        world.boxes[node].room, world.boxes[node].pins = 4, homes.copy()
        world.boxes[node].report()
    world.passes(10.0)
    assert world.agreed is not None
    gone = world.boxes["c"]
    gone.alive, gone.gone_s = False, world.now_s
    world.passes(10.0)
    assert "2 boxes hold 8 of 12 experts in memory" in world.controller.blocker
    gone.alive = True
    world.passes(5.0)
    assert not world.controller.blocker


def test_an_answer_for_another_plan_or_another_leader_is_dropped() -> None:
    world = World("abc")
    look = world.observe()
    assert look is not None
    world.controller.handle(look)
    world.now_s += 2.0
    look = world.observe()
    assert look is not None
    (asked,) = world.controller.handle(look)
    assert isinstance(asked, SolvePlacement)
    found = make_target(asked.task)
    world.controller.handle(LeadershipTaken(2))
    assert world.controller.handle(PlacementSolved(asked.number, found)) == []


def test_a_plan_that_is_found_while_a_box_dies_does_not_count_on_the_copies_that_died() -> None:
    """All experts are pinned twice; the plan that is found gives each to one box, some to one that has died."""
    world = World("abc")
    world.passes(5.0)
    world.slow = True
    world.wants(dealt("abc", 0))
    world.passes(SETTINGS.migrate_s + 1.0)
    assert world.asked is not None
    box = world.boxes["b"]
    box.alive, box.gone_s, box.pins = False, world.now_s, NOTHING.copy()
    committed = len(world.committed)
    world.answers()
    assert len(world.committed) == committed


def test_steps_of_a_box_that_had_not_been_heard_of_are_none_since_the_last_look() -> None:
    settings = ClusterSettings(node="a", replicas=1, absent_s=5.0, migrate_s=1e6, migrate_steps=100, placement="gimbal")
    world = World("abc", settings)
    world.passes(SOON_S)
    world.leads()
    world.passes(2.0)
    world.slow = True
    world.reports = {"b": BoxReport("m", 1.0, b"", steps=10**6)}
    world.passes(2.0)
    assert world.asked is None
    world.reports = {"b": BoxReport("m", 1.0, b"", steps=10**6 + 100)}
    world.passes(2.0)
    assert world.asked is not None


def test_with_full_memory_additional_copies_make_room() -> None:
    """Two of three boxes have the same experts; one gives them up for experts that only the third has."""
    first, second = np.array([[True, False]]), np.array([[False, True]])
    homes = np.stack([first, first, second])
    goal = np.stack([second, second, first])
    steps = [homes]
    while (homes != goal).any():
        homes = Migration(homes, homes, goal, np.array([[1], [1], [1]]), np.zeros((1, 2), np.float32)).next_homes()
        assert homes.any(axis=0).all()
        steps.append(homes)
    assert len(steps) == 4


def test_without_room_for_another_copy_nothing_is_moved() -> None:
    now, goal = np.array([[[True, False]], [[False, True]]]), np.array([[[False, True]], [[True, False]]])
    moving = Migration(now, now, goal, np.array([[1], [1]]), np.zeros((1, 2), np.float32))
    assert (moving.next_homes() == now).all()


def test_the_hottest_expert_is_moved_first_and_missing_ones_before_it() -> None:
    now, goal = np.zeros((2, 1, 4), np.bool_), np.zeros((2, 1, 4), np.bool_)
    now[1, 0, :3] = True
    goal[0] = True
    heat = np.array([[1.0, 5.0, 2.0, 0.0]], np.float32)
    moving = Migration(now, now, goal, np.array([[2], [4]]), heat)
    assert moving.next_homes()[0].tolist() == [[False, True, False, True]]


def test_saved_waiting_is_compared_with_waiting_during_the_copy() -> None:
    now, goal = np.zeros((2, 1, 4), np.bool_), np.ones((2, 1, 4), np.bool_)
    moving_s = copy_s(now, goal, np.array([100]), np.array([10.0, 20.0], np.float32))
    assert moving_s == 60.0
    assert pays(1.0, 0.7, moving_s, 300.0, 0.05)
    assert not pays(1.0, 0.9, moving_s, 300.0, 0.05)  # 30 s saved
    assert not pays(1.0, 0.96, 0.0, 300.0, 0.05)
    for load in (0.01, 100.0):  # how many requests wait at a time
        assert pays(load, 0.7 * load, moving_s, 300.0, 0.05)
        assert not pays(load, 0.9 * load, moving_s, 300.0, 0.05)


def test_homes_on_a_disk_release_their_memory() -> None:
    now, goal = np.zeros((2, 1, 1, 3), np.bool_)
    now[0, 0, 0], goal[0, 0, 1] = True, True
    heat, on_disk = np.zeros((1, 3), np.float32), np.array([[True, False, True]])
    assert Migration(now, now, goal, np.array([[2]]), heat, on_disk).next_homes().tolist() == goal.tolist()
    assert Migration(now, now, goal, np.array([[2]]), heat).next_homes().tolist() == (now | goal).tolist()
