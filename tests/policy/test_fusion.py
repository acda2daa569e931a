"""Fusion finds the weight that forecasts have earned, horizon by horizon."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.policy.forecast_mix import Calibration, ForecastMix


def outcomes(seed: int, n: int = 300) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns (forecast that knows only the mean, forecast that knows the truth, outcome) of each draw."""
    random = np.random.default_rng(seed)
    truth = [random.beta(0.4, 2, 50).astype(np.float32) for _ in range(n)]
    return [(np.full(50, 1 / 6, np.float32), p, random.random(50) < p) for p in truth]


def test_the_better_forecast_gets_the_weight() -> None:
    mix = ForecastMix(2)
    for poor, good, came in outcomes(1):
        mix.learn(poor, good, came, 0)
        mix.learn(good, poor, came, 1)
    assert mix.eta(0) >= 0.9
    assert mix.eta(1) <= 0.1
    assert mix.eta(0, trust=0.5) == pytest.approx(mix.eta(0) / 2)


def test_without_a_second_forecast_the_first_stands() -> None:
    p = np.array([0.1, 0.5], np.float32)
    assert ForecastMix(1).fuse(p, None, 0) is p
    assert np.array_equal(ForecastMix(1).fuse(p, 1 - p, 0), p)


def test_a_forecast_that_goes_bad_loses_its_weight() -> None:
    mix = ForecastMix(1)
    for poor, good, came in outcomes(2, 600):
        mix.learn(poor, good, came, 0)
    for poor, good, came in outcomes(3, 600):
        mix.learn(poor, 1 - good, came, 0)
    assert mix.eta(0) <= 0.1


def test_the_reliability_curve_of_a_true_forecast_is_the_diagonal() -> None:
    mix = ForecastMix(1)
    for poor, good, came in outcomes(4, 600):
        mix.learn(poor, good, came, 0)
    said, came_true = mix.reliability(0).T
    assert np.abs(said - came_true).max() < 0.12


def test_old_records_of_forecasts_are_forgotten() -> None:
    mix = ForecastMix(1)
    for poor, good, came in outcomes(2, 1500):
        mix.learn(poor, good, came, 0)
    for poor, good, came in outcomes(3, 300):  # a fifth of it, and the other way round
        mix.learn(good, poor, came, 0)
    assert mix.eta(0) <= 0.2


def test_a_score_s_meaning_follows_its_own_outcomes() -> None:
    learned = Calibration(-2.0, 2.0, 5)
    before = learned.share.copy()
    for _ in range(300):
        learned.learn(np.array([-2.6, 0.9, 2.1], np.float32), np.array([True, True, False]))
    assert learned(np.array([-2.0, 1.0, 2.0], np.float32)).tolist() == pytest.approx([1.0, 1.0, 0.0], abs=0.02)
    np.testing.assert_allclose(learned.share[[1, 2]], before[[1, 2]], atol=1e-2)
