"""A box keeps its memory for its own requests where the plan's home experts made them slower than alone."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy import lending
from edgemoe.policy.lending import AGAIN_S, KEPT_SHARE, LEAST_S, MOST_AGAIN_S, SETTLE_S, LeastRecentCache, LendingChoice

STEPS = st.lists(st.sets(st.integers(0, 11), max_size=5), max_size=40)


@given(slots=st.integers(1, 12), steps=STEPS)
def test_the_simulated_cache_misses_as_often_as_a_naive_one(slots: int, steps: list[set[int]]) -> None:
    """Of experts that the same step used last, either may go: cases in which that matters are left out."""
    cache, naive = LeastRecentCache((3, 4), slots), OrderedDict[int, int]()
    for number, needed in enumerate(steps):
        misses = len(needed - naive.keys())
        assert cache.count_misses(np.array(sorted(needed), np.int64)) == misses
        for expert in sorted(needed):
            naive[expert] = number
            naive.move_to_end(expert)
        while misses and len(naive) > max(slots, len(needed)):
            oldest = next(iter(naive.values()))
            if sum(used == oldest for used in naive.values()) > len(naive) - max(slots, len(needed)):
                return
            naive.popitem(last=False)


class Box:
    """A box whose steps take `lending` or `keeping` times as long as alone."""

    def __init__(self, lending: float, keeping: float, given: int = 4) -> None:
        """Others compute four experts for it in each step, and it computes `given` for them."""
        self.now_s, self.taken_s, self.given = 0.0, {True: lending, False: keeping}, given
        self.choice = LendingChoice(lambda: self.now_s)
        self.changes: list[float] = []  # times

    def run(self, seconds: float) -> None:
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            taken_s = 0.1 * self.taken_s[self.choice.lends]
            self.now_s += taken_s
            if self.choice.observe(taken_s, 0.1, self.given, 4):
                self.changes.append(self.now_s)


@pytest.mark.parametrize(("lending", "given"), [(1.5, 4), (1.5, 0), (0.98, 0)])
def test_a_box_that_is_faster_so_keeps_its_memory_soon_and_tries_lending_ever_more_seldom(
    lending: float, given: int
) -> None:
    box = Box(lending=lending, keeping=0.9, given=given)
    box.run(LEAST_S + 1)
    assert not box.choice.lends
    assert box.choice.share == KEPT_SHARE
    box.run(10 * MOST_AGAIN_S)
    away = np.diff(box.changes)  # kept, lent, kept, ...
    assert away[0] == pytest.approx(AGAIN_S, abs=1)
    assert away[2] == pytest.approx(2 * AGAIN_S, abs=1)
    assert away[0::2].max() <= MOST_AGAIN_S + 1
    assert away[1::2].max() <= SETTLE_S + LEAST_S + 1
    lost_s = away[1::2].sum() * (1 - 1 / lending)
    assert lost_s < 0.01 * away.sum()


def test_a_box_that_is_helped_and_helps_lends_its_memory_for_good() -> None:
    for ratio in (0.4, 1.0, lending.WORSE - 0.01):
        box = Box(lending=ratio, keeping=0.1)
        box.run(MOST_AGAIN_S)
        assert box.choice.lends
        assert not box.changes
        assert box.choice.ratio == pytest.approx(ratio)


def test_a_box_that_needs_nobody_lends_its_memory_for_good() -> None:
    choice = LendingChoice(lambda: 1e9)
    assert not any(choice.observe(0.1, 0.1) for _ in range(10_000))


@pytest.mark.parametrize(("ratio", "given"), [(1.5, 4), (0.8, 0)])
def test_memory_that_is_kept_without_a_clear_gain_is_lent_again_for_an_hour_and_then_for_longer(
    ratio: float, given: int
) -> None:
    box = Box(lending=ratio, keeping=0.97 * ratio, given=given)
    box.run(3 * MOST_AGAIN_S)
    away = np.diff(box.changes)
    assert away[0::2].max() <= SETTLE_S + LEAST_S + 1
    assert away[1] == pytest.approx(AGAIN_S, abs=1)
    assert away[3] == pytest.approx(2 * AGAIN_S, abs=1)


def test_steps_right_after_a_change_count_for_nothing() -> None:
    box = Box(lending=1.5, keeping=9.0)
    box.run(LEAST_S + 1)
    box.run(SETTLE_S - 2)
    assert box.choice.ratio == 1.0
    assert not box.choice.lends
