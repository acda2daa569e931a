"""A migration fetches homes within its limit of bytes; experts without another home are fetched at once."""

from __future__ import annotations

import numpy as np

from edgemoe.types.experts import ExpertId
from edgemoe.types.placement import PlacementPlan, pack_bits
from edgemoe.worker.cluster_member import HomeFetchPacer

FAST = 1e9
ALL = [ExpertId(0, expert) for expert in range(8)]


def plan(others: int) -> PlacementPlan:
    """Builds a plan in which box a has all of eight experts, and b the first `others`."""
    which = np.arange(8)[None] < others
    return PlacementPlan(1, 1, "m", 1, 8, ("a", "b"), (pack_bits(np.ones((1, 8), np.bool_)), pack_bits(which)))


def test_the_first_plan_is_fetched_at_once() -> None:
    moves = HomeFetchPacer(20.0, 10, 0.0)
    assert moves.next_fetches(ALL, 0.0, FAST) == ALL
    moves.on_plan_adopted(plan(8), "a", first=True)
    assert moves.next_fetches(ALL, 0.0, FAST) == ALL


def test_later_fetches_are_limited_except_for_experts_without_a_home() -> None:
    moves = HomeFetchPacer(20.0, 10, 0.0)
    moves.on_plan_adopted(plan(6), "a", first=False)
    assert moves.next_fetches(ALL, 1.0, FAST) == [*ALL[6:], ALL[0]]
    left = ALL[1:6]
    assert moves.next_fetches(left, 1.2, FAST) == []
    assert moves.next_fetches(left, 1.5, FAST) == left[:1]
    assert moves.next_fetches(left, 100.0, FAST) == left[:1]  # unused time is not saved up
    assert moves.next_fetches([], 101.0, FAST) == []


def test_many_small_ones_come_evenly() -> None:
    moves = HomeFetchPacer(300.0, 10, 0.0)
    moves.on_plan_adopted(plan(8), "a", first=False)
    left = list(ALL)
    for turn in range(1, 3):
        granted = moves.next_fetches(left, turn * 0.1, FAST)
        assert granted == left[:3]
        left = left[3:]


def test_an_expert_of_more_than_a_seconds_bytes_comes_in_its_time() -> None:
    moves = HomeFetchPacer(20.0, 50, 0.0)
    moves.on_plan_adopted(plan(8), "a", first=False)
    assert moves.next_fetches(ALL, 1.0, FAST) == []
    assert moves.next_fetches(ALL, 2.5, FAST) == ALL[:1]
    assert moves.next_fetches(ALL[1:], 3.0, FAST) == []


def test_moves_take_an_eighth_of_the_links_but_do_not_stand_still() -> None:
    moves = HomeFetchPacer(20.0, 10, 0.0)
    moves.on_plan_adopted(plan(8), "a", first=False)
    assert moves.next_fetches(ALL, 1.9, 40.0) == []  # 5 bytes a second
    assert moves.next_fetches(ALL, 2.0, 40.0) == ALL[:1]
    assert moves.next_fetches(ALL[1:], 11.9, 0.0) == []  # 10 s an expert, at the slowest
    assert moves.next_fetches(ALL[1:], 12.1, 0.0) == ALL[1:2]


def test_limited_fetches_are_known_and_immediate_ones_do_not_count() -> None:
    moves = HomeFetchPacer(20.0, 10, 0.0)
    moves.on_plan_adopted(plan(6), "a", first=False)
    moves.next_fetches(ALL, 1.0, FAST)
    assert [moves.is_under_way(one) for one in (ALL[0], ALL[1], ALL[6])] == [True, False, False]


def test_without_a_limit_all_is_fetched() -> None:
    moves = HomeFetchPacer(0.0, 10, 0.0)
    moves.on_plan_adopted(plan(8), "a", first=False)
    assert moves.next_fetches(ALL, 1.0, FAST) == ALL
