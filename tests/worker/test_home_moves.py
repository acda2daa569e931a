"""What a migration moves comes no faster than it may; what has no other home comes at once."""

from __future__ import annotations

import numpy as np

from edgemoe.types.experts import ExpertId
from edgemoe.types.placement import PlacementPlan, pack_bits
from edgemoe.worker.home_moves import HomeMoves

ALL = [ExpertId(0, expert) for expert in range(8)]


def plan(others: int) -> PlacementPlan:
    """Box a has all of eight experts, b the first few of them."""
    which = np.arange(8)[None] < others
    return PlacementPlan(1, 1, "m", 1, 8, ("a", "b"), (pack_bits(np.ones((1, 8), np.bool_)), pack_bits(which)))


def test_the_first_plan_is_fetched_at_once() -> None:
    moves = HomeMoves(20.0, 10, 0.0)
    assert moves.turn(ALL, 0.0) == ALL
    moves.follow(plan(8), "a", first=True)
    assert moves.turn(ALL, 0.0) == ALL


def test_later_ones_come_by_bytes_a_second_but_for_what_nobody_else_has() -> None:
    moves = HomeMoves(20.0, 10, 0.0)
    moves.follow(plan(6), "a", first=False)
    assert moves.turn(ALL, 1.0) == [*ALL[6:], *ALL[:2]]
    left = ALL[2:6]
    assert moves.turn(left, 1.5) == left[:1]
    assert moves.turn(left, 2.0) == left[:2]
    assert moves.turn(left, 100.0) == left[:2]  # what was not used is not saved up
    assert moves.turn([], 101.0) == []


def test_an_expert_of_more_than_a_seconds_bytes_comes_in_its_time() -> None:
    moves = HomeMoves(20.0, 50, 0.0)
    moves.follow(plan(8), "a", first=False)
    assert moves.turn(ALL, 1.0) == []
    assert moves.turn(ALL, 2.5) == ALL[:1]
    assert moves.turn(ALL[1:], 3.0) == []


def test_without_a_limit_all_is_fetched() -> None:
    moves = HomeMoves(0.0, 10, 0.0)
    moves.follow(plan(8), "a", first=False)
    assert moves.turn(ALL, 1.0) == ALL
