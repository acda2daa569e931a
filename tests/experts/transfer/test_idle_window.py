"""A prefetch begins if its expected saving exceeds its expected cost, the delay of one piece."""

from __future__ import annotations

import math

import pytest

from edgemoe.experts.transfer.link_prefetch import AWAY, IdleWindow, ReadGap


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gap(clock: Clock) -> IdleWindow:
    """The windows of two layers that compute for 4 and 8 ms, after waiting for 20 ms each; layer 0 has just begun."""
    it = IdleWindow(2, clock)
    for layer in [0, 1] * 30:
        it.demand(layer)
        clock.now += 0.020
        it.begin(layer)
        clock.now += 0.004 * (layer + 1)
    it.demand(0)
    it.begin(0)
    return it


def test_it_lasts_as_long_as_it_did_for_that_layer_and_runs_out(gap: IdleWindow, clock: Clock) -> None:
    assert gap.left_s() == pytest.approx(0.004)
    clock.now += 0.003
    assert gap.left_s() == pytest.approx(0.001)
    clock.now += 0.003
    assert gap.left_s() == 0
    gap.demand(1)
    gap.begin(1)
    assert gap.left_s() == pytest.approx(0.008, rel=0.1)


def test_there_is_none_while_a_demand_is_served_and_no_end_of_it_while_nothing_runs(
    gap: IdleWindow, clock: Clock
) -> None:
    assert IdleWindow(2, clock).left_s() == math.inf
    gap.demand(1)
    clock.now += 100
    assert gap.left_s() == 0
    gap.begin(1)
    clock.now += 2 * AWAY * 0.008
    assert gap.left_s() == math.inf


def test_a_prefetch_pays_where_the_time_left_outweighs_the_piece_that_it_may_delay_a_demand_by(
    gap: IdleWindow, clock: Clock
) -> None:
    assert gap.pays(0.51, 0.004)
    assert not gap.pays(0.49, 0.004)
    assert gap.pays(0.12, 0.0005)
    assert not gap.pays(0.10, 0.0005)
    assert gap.pays(0.0, 0.0), "a transfer never measured"
    clock.now += 0.003
    assert not gap.pays(0.3, 0.0005)
    assert gap.pays(0.4, 0.0005)


def test_during_a_demand_only_certain_prefetches_pay_and_in_idle_time_all(gap: IdleWindow, clock: Clock) -> None:
    gap.demand(1)
    assert gap.pays(1.0, 10.0)
    assert not gap.pays(0.99, 0.0001)
    assert IdleWindow(2, clock).pays(0.0, 10.0)


def test_a_pause_between_steps_does_not_count_for_long(gap: IdleWindow, clock: Clock) -> None:
    clock.now += 60
    gap.demand(1)
    gap.begin(1)
    gap.demand(0)
    gap.begin(0)
    assert gap.left_s() < 0.006


@pytest.fixture
def reads(clock: Clock) -> ReadGap:
    """The windows of a disk that is read for 20 ms every 30 ms, and has just been read."""
    it = ReadGap(clock)
    for _ in range(30):
        it.demand()
        clock.now += 0.020
        it.begin()
        clock.now += 0.010
    it.demand()
    it.begin()
    return it


def test_a_read_ahead_delays_others_the_more_the_longer_it_takes(reads: ReadGap, clock: Clock) -> None:
    assert ReadGap(clock).delay_s(0.002) == 0, "before anything is known"
    assert reads.delay_s(0.002) == pytest.approx(0.002 * 0.1, rel=0.1), "it is rare that one comes meanwhile"
    assert reads.delay_s(0.2) == pytest.approx(0.19, rel=0.01), "one always comes, and waits for nearly all of it"


def test_time_in_which_reads_are_demanded_is_not_idle(reads: ReadGap, clock: Clock) -> None:
    before = reads.delay_s(0.002)
    clock.now += 0.010
    for _ in range(2):
        reads.demand()
        clock.now += 60
    assert reads.delay_s(0.002) == pytest.approx(before)
