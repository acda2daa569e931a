"""A demand waits for one piece of a prefetch at most, and the prefetch keeps its pieces so far."""

from __future__ import annotations

import math

import pytest

from edgemoe.experts.transfer.links import PIECE_BYTES, PieceSchedule, pieces_of


class Load:
    """A named transfer."""

    def __init__(self, name: str, *, demand: bool, near: bool = False) -> None:
        self.name, self.demand, self.near = name, demand, near

    @property
    def urgency(self) -> int:
        return 2 if self.demand else int(self.near)

    def __repr__(self) -> str:
        return self.name


@pytest.fixture
def schedule() -> PieceSchedule[Load]:
    """The schedule of experts of ten pieces, one second each."""
    return PieceSchedule(10, 1.0)


def ends(schedule: PieceSchedule[Load], by_s: float = 1000.0) -> list[tuple[str, float]]:
    """Returns the transfers that end by `by_s`, and their times."""
    told = []
    while schedule.end_s <= by_s:
        end_s = schedule.end_s
        told += [(load.name, end_s) for load in schedule.pop_ended(end_s)]
    return told


@pytest.mark.parametrize("size_bytes", [9.44e6, 2.36e6, 600_000, 1 << 20, PIECE_BYTES])
def test_pieces_of_an_expert_have_256_to_512_kib(size_bytes: float) -> None:
    assert PIECE_BYTES <= size_bytes / pieces_of(size_bytes) < 2 * PIECE_BYTES


def test_an_expert_that_is_smaller_is_one_piece() -> None:
    assert pieces_of(4096) == 1


def test_a_demand_waits_for_the_piece_under_way_and_the_prefetch_goes_on_where_it_was(
    schedule: PieceSchedule[Load],
) -> None:
    schedule.add(Load("prefetch", demand=False), 0.0)
    schedule.add(Load("demand", demand=True), 3.4)
    assert ends(schedule) == [("demand", 14.0), ("prefetch", 20.0)]


def test_a_demand_that_comes_between_two_pieces_waits_for_none(schedule: PieceSchedule[Load]) -> None:
    schedule.add(Load("prefetch", demand=False), 0.0)
    schedule.add(Load("demand", demand=True), 3.0)
    assert ends(schedule) == [("demand", 13.0), ("prefetch", 20.0)]


def test_a_prefetch_whose_last_piece_is_under_way_ends_first(schedule: PieceSchedule[Load]) -> None:
    schedule.add(Load("prefetch", demand=False), 0.0)
    schedule.add(Load("demand", demand=True), 9.5)
    assert ends(schedule) == [("prefetch", 10.0), ("demand", 20.0)]


def test_a_prefetch_that_is_overtaken_again_and_again_has_lost_nothing(schedule: PieceSchedule[Load]) -> None:
    schedule.add(Load("prefetch", demand=False), 0.0)
    told = []
    for i in range(3):
        told += ends(schedule, 12.0 * i + 1.5)
        schedule.add(Load(f"demand {i}", demand=True), 12.0 * i + 1.5)
    assert told + ends(schedule) == [("demand 0", 12.0), ("demand 1", 24.0), ("demand 2", 36.0), ("prefetch", 40.0)]


def test_demands_end_in_the_order_of_coming(schedule: PieceSchedule[Load]) -> None:
    for i in range(3):
        schedule.add(Load(f"{i}", demand=True), 0.25 * i)
    assert ends(schedule) == [("0", 10.0), ("1", 20.0), ("2", 30.0)]


def test_a_prefetch_under_way_that_is_demanded_is_overtaken_no_more(schedule: PieceSchedule[Load]) -> None:
    prefetch = Load("prefetch", demand=False)
    schedule.add(prefetch, 0.0)
    prefetch.demand = True
    schedule.add(Load("demand", demand=True), 3.4)
    assert ends(schedule) == [("prefetch", 10.0), ("demand", 20.0)]


def test_an_overtaken_prefetch_that_is_demanded_goes_on_before_demands_that_came_later(
    schedule: PieceSchedule[Load],
) -> None:
    prefetch = Load("prefetch", demand=False)
    schedule.add(prefetch, 0.0)
    for i in range(2):
        schedule.add(Load(f"{i}", demand=True), 2.0)
    prefetch.demand = True
    assert ends(schedule) == [("0", 12.0), ("prefetch", 20.0), ("1", 30.0)]


def test_a_prefetch_for_the_next_layers_overtakes_one_for_later_and_neither_loses_anything(
    schedule: PieceSchedule[Load],
) -> None:
    schedule.add(Load("far", demand=False), 0.0)
    schedule.add(Load("near", demand=False, near=True), 2.5)
    schedule.add(Load("also far", demand=False), 2.6)
    schedule.add(Load("demand", demand=True), 5.5)
    assert ends(schedule) == [("demand", 16.0), ("near", 23.0), ("far", 30.0), ("also far", 40.0)]


def test_a_link_that_nobody_looked_at_was_not_idle(schedule: PieceSchedule[Load]) -> None:
    for name in ("a", "b"):
        schedule.add(Load(name, demand=True), 0.0)
    schedule.add(Load("c", demand=True), 35.0)
    assert [load.name for load in schedule.pop_ended(44.0)] == ["a", "b"]
    assert ends(schedule) == [("c", 45.0)]


def test_a_dropped_transfer_makes_way_after_its_piece(schedule: PieceSchedule[Load]) -> None:
    prefetch, other = Load("prefetch", demand=False), Load("other", demand=False)
    schedule.add(prefetch, 0.0)
    schedule.add(other, 1.0)
    schedule.drop(prefetch, 2.5)
    assert schedule.loads == [other]
    assert ends(schedule) == [("other", 13.0)]
    schedule.add(prefetch, 20.0)
    schedule.drop(prefetch, 20.5)
    assert schedule.end_s == math.inf
    schedule.add(other, 20.6)
    assert schedule.end_s == 31.0
