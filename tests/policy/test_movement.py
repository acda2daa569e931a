"""A record of needs estimates an expert's chance of use by its rank, whether its move was carried out or not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgemoe.policy.movement import TRIAL, NeedRecord, WatchedPlan
from edgemoe.types.arrays import FloatArray, IntArray

WINDOW, EACH = 4, 16
CHANCES = {-2.0: 0.1, 2.0: 0.7}  # by log odds


def live(record: NeedRecord, steps: int, chance: Callable[[FloatArray, bool], FloatArray]) -> None:
    """Plans other experts at every step; each is needed within the window by `chance` of its odds."""
    random, n = np.random.default_rng(1), 2 * EACH
    last: IntArray = np.full(steps * n, -1)
    due: list[tuple[int, int]] = []
    for step in range(steps):
        for at, key in [each for each in due if each[0] < step]:
            last[key] = at
        due = [each for each in due if each[0] >= step]
        record.judge_plans(step, last)
        keys = step * n + np.arange(n)
        odds = random.choice(list(CHANCES), n).astype(np.float32)
        needed = random.random(n) < np.concatenate([chance(odds[:EACH], True), chance(odds[EACH:], False)])
        due += [(step + int(random.integers(1, WINDOW)), key) for key in keys[needed].tolist()]
        record.watch(WatchedPlan(step, keys, odds, np.full(n, step - 1), EACH, odds[:EACH] > 0))


def as_ranked(odds: FloatArray, missing: bool) -> FloatArray:
    return np.where(odds > 0, CHANCES[2.0], CHANCES[-2.0]).astype(np.float32)


def test_a_chance_is_the_observed_rate_of_its_rank() -> None:
    record = NeedRecord(WINDOW)
    live(record, 300, as_ranked)
    both = np.array(list(CHANCES), np.float32)
    np.testing.assert_allclose(record.chance(both), [0.1, 0.7], atol=0.06)
    np.testing.assert_allclose(record.chance_there(both), [0.1, 0.7], atol=0.06)
    assert record.right == pytest.approx(0.7, abs=0.06), "of what was wished for"


def test_missing_experts_are_judged_apart_from_present_ones() -> None:
    record = NeedRecord(WINDOW)
    live(record, 300, lambda odds, missing: np.full(len(odds), 0.05 if missing else 0.6, np.float32))
    both = np.array(list(CHANCES), np.float32)
    assert (record.chance(both) < 0.1).all()
    assert (record.chance_there(both) > 0.5).all()


def test_nothing_is_tried_before_the_windows_of_some_plans_have_passed() -> None:
    record = NeedRecord(WINDOW)
    live(record, TRIAL + WINDOW, as_ranked)
    assert not record.tried
    live_on = NeedRecord(WINDOW)
    live(live_on, TRIAL + WINDOW + 1, as_ranked)
    assert live_on.tried


def test_a_need_before_the_plan_or_after_its_window_is_none() -> None:
    record, keys = NeedRecord(WINDOW), np.arange(2)
    odds, nobody = np.zeros(2, np.float32), np.zeros(1, np.bool_)
    before = record.chance(odds)[0]
    record.watch(WatchedPlan(7, keys, odds, np.array([7, 6]), 1, nobody))  # the first one's layer has run
    record.judge_plans(7 + WINDOW + 1, np.array([7, 7]))
    assert record.chance(odds)[0] < before < record.chance_there(odds)[0]
    judged = record.judged
    record.watch(WatchedPlan(20, keys, odds, np.array([19, 19]), 1, nobody))
    record.judge_plans(20 + WINDOW + 2, np.array([25, 25]))
    assert record.judged == judged, "no plan was made for a while, so that nobody knows when the needs were"
