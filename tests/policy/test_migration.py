"""Homes that a box gives up during a migration, as arrays. tests/cluster/control checks that last copies stay."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.policy.migration import Migration, copy_s
from edgemoe.types.arrays import BoolArray

HEAT = np.array([[4.0, 1.0, 3.0, 2.0]])


def homes(*rows: str) -> BoolArray:
    """Builds one layer's homes from a row of marks for each node."""
    return np.array([[[mark == "x" for mark in row]] for row in rows])


@pytest.mark.parametrize(
    ("pinned", "left"),
    [
        ("xxxx", "x.x."),  # the coldest go
        ("xx.x", "x..x"),  # absent experts go before present ones
    ],
)
def test_a_box_with_less_room_than_before_drops_the_cheapest_experts(pinned: str, left: str) -> None:
    now = homes("xxxx", "xxxx")
    migration = Migration(now, homes(pinned, "xxxx"), goal=now, room=np.array([[2], [4]]), heat=HEAT)
    assert np.array_equal(migration.next_homes(), homes(left, "xxxx"))


def test_each_size_of_experts_moves_in_the_room_that_there_is_for_it() -> None:
    now = np.array([[[1, 1, 0, 0], [1, 1, 0, 0]], [[0, 0, 1, 1], [0, 0, 1, 1]]], np.bool_)
    room, sizes = np.array([[4, 2], [3, 2]]), [np.array([0]), np.array([1])]
    heat = np.array([[1.0, 2.0, 4.0, 3.0]] * 2)
    homes = Migration(now, now, ~now, room, heat, sizes=sizes).next_homes()
    assert np.array_equal(homes[:, 0], [[1, 1, 1, 1], [0, 1, 1, 1]])  # layer 0: room for two more, and for one
    assert np.array_equal(homes[:, 1], now[:, 1])  # layer 1: full on both boxes, and no expert has another copy


def test_a_full_box_makes_room_by_homes_that_others_keep_or_the_goal_has_nowhere() -> None:
    now, pinned, goal = (np.zeros((3, 2, 4), np.bool_) for _ in range(3))
    now[0, 0, 0] = now[0, 0, 1] = now[0, 1, 0] = now[1, 0, 0] = pinned[1, 0, 0] = True
    goal[0, 0, 2] = goal[0, 1, 3] = goal[1:, 0, 0] = goal[2, 0, 1] = True
    room, heat = np.array([[3], [4], [4]]), np.ones((2, 4))
    homes = Migration(now, pinned, goal, room, heat).next_homes()
    assert np.argwhere(homes[0]).tolist() == [[0, 1], [0, 2], [1, 3]], "the only copy of an expert that moves stays"
    assert np.array_equal(homes[1:], goal[1:])


def test_the_time_of_copying_is_that_of_the_added_homes_at_each_boxs_rate() -> None:
    now, goal = (np.zeros((2, 2, 3), np.bool_) for _ in range(2))
    now[0, 0] = goal[0, 0, 0] = True  # homes that are given up cost nothing
    goal[0, 1, :2] = goal[1, 0, 0] = True
    assert copy_s(now, goal, np.array([3, 5]), np.array([2.0, 4.0])) == 2 * 5 / 2 + 3 / 4
