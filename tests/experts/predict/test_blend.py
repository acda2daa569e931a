"""Forecasts are blended into utilities by the formulas of the module's header, weighted by their record."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from support.kept import KERNELS

from edgemoe.experts.predict.forecast_blend import (
    HORIZONS,
    NEXT_LAYER,
    NEXT_STEP,
    AwaitedForecast,
    ForecastBlend,
    GateFusion,
)
from edgemoe.experts.predict.next_use import NextUsePredictor, link_predictor
from edgemoe.policy.forecast_mix import Calibration
from edgemoe.types.arrays import FloatArray

L, E, K = 4, 10, 2


@pytest.fixture
def predictor() -> NextUsePredictor:
    """In the middle of a step: two of four layers have run."""
    link_predictor(KERNELS)
    it, random = NextUsePredictor(L, E, K), np.random.default_rng(1)
    for number in range(6):
        choices = np.full((L, 1, K), -1, np.int16)
        it.begin(("a",), choices, np.zeros(1, np.int64))
        for layer in range(L if number < 5 else 2):
            choices[layer] = random.permutation(E)[:K]
            it.update_ranks()
            it.work()
        if number < 5:
            it.end()
            it.work()
    return it


def forecast(seed: int) -> FloatArray:
    return np.random.default_rng(seed).random((2, L, E)).astype(np.float32)


def ranks_with_forecast(
    predictor: NextUsePredictor, blend: ForecastBlend, probs: FloatArray, trust: float = 1.0
) -> FloatArray:
    """Returns the ranks after a forecast."""
    predictor.set_fusion(blend.shares, blend.etas)
    predictor.add_forecast(probs, trust)
    predictor.work()
    return predictor.ranks


def expected(
    odds: FloatArray, chance: FloatArray, calibration: Calibration, eta: float
) -> tuple[FloatArray, FloatArray]:
    """Computes the header's formulas; chance and utility are log odds."""
    p, utility = calibration(odds), 1 / (1 + np.exp(-odds))
    beyond = np.clip((utility - p) / (1 - p), 0, 1)
    p = (1 - eta) * p + eta * chance
    utility = p + (1 - p) * beyond
    return p, np.log(utility / (1 - utility))


def learn(blend: ForecastBlend, horizon: int, right: bool, rounds: int = 80) -> None:
    """Teaches the blend forecasts of one horizon, right or wrong, about experts unknown to the predictor."""
    random = np.random.default_rng(2)
    for number in range(rounds + (horizon == NEXT_STEP)):
        needed = random.random(L * E) < 0.3
        keys: npt.NDArray[np.int64] = random.permutation(L * E)[:20]
        if horizon == NEXT_STEP and number:
            needed[:] = False
            needed[awaited.keys[(awaited.chance > 0.5) == right]] = True  # noqa: F821
        chance = np.where(needed[keys] == right, 0.9, 0.1).astype(np.float32)
        awaited = AwaitedForecast(horizon, keys, np.zeros(20, np.float32), chance)
        if horizon == NEXT_STEP:
            awaited = awaited._replace(chance=np.where(random.random(20) < 0.3, 0.9, 0.1).astype(np.float32))
        blend.add_forecast(awaited)
        blend.learn(needed)


def test_without_a_forecast_or_a_record_ranks_are_the_predictors(predictor: NextUsePredictor) -> None:
    np.testing.assert_array_equal(predictor.ranks, predictor.scores)
    np.testing.assert_array_equal(ranks_with_forecast(predictor, ForecastBlend(), forecast(3)), predictor.scores)


def test_this_step_and_the_next_are_blended_by_their_records(predictor: NextUsePredictor) -> None:
    blend, probs, now = ForecastBlend(), forecast(4), 2  # half of the layers have run
    learn(blend, now, right=True)
    learn(blend, NEXT_STEP, right=True, rounds=40)
    assert min(blend.mix.eta(now), blend.mix.eta(NEXT_STEP)) > 0.5
    ranks = ranks_with_forecast(predictor, blend, probs, 0.8)
    odds = predictor.scores - predictor.phase[:, None]
    for layer, horizon in enumerate((NEXT_STEP, NEXT_STEP, now, now)):
        row = probs[1 if layer < 2 else 0, layer]
        eta = blend.mix.eta(horizon, 0.8)
        _, want = expected(odds[layer], row, blend.calibrations[horizon], eta)
        np.testing.assert_allclose(ranks[layer], want + predictor.phase[layer], atol=2e-3)


def test_a_forecaster_that_is_wrong_is_not_listened_to(predictor: NextUsePredictor) -> None:
    blend = ForecastBlend()
    for horizon in range(HORIZONS):
        learn(blend, horizon, right=False)
        assert blend.mix.eta(horizon) == 0
    np.testing.assert_allclose(ranks_with_forecast(predictor, blend, forecast(5)), predictor.scores, atol=2e-3)


def test_a_gates_chance_is_fused_in_the_same_way() -> None:
    blend, random = ForecastBlend(), np.random.default_rng(6)
    learn(blend, NEXT_LAYER, right=True)
    odds, chance = random.normal(-1, 2, 8).astype(np.float32), random.random(8).astype(np.float32)
    ranks, experts = np.zeros((L, E), np.float32), random.permutation(E)[:8]
    ranks[2, experts] = odds - 3
    said, p, utility = GateFusion(ranks, blend, 0.5)(2, experts, chance, -3.0)
    want_p, want = expected(odds, chance, blend.calibrations[NEXT_LAYER], blend.mix.eta(NEXT_LAYER))
    np.testing.assert_allclose(said, odds, atol=1e-5)
    np.testing.assert_allclose(p, want_p, atol=1e-3)
    np.testing.assert_allclose(utility, want - 3.5, atol=5e-3)


def test_forecasts_are_recorded_with_the_predictor_s_scores(predictor: NextUsePredictor) -> None:
    probs = forecast(8)
    ranks_with_forecast(predictor, ForecastBlend(), probs)
    awaited = predictor.pop_awaited()
    assert {each.horizon for each in awaited} == {2, NEXT_STEP}
    odds = (predictor.scores - predictor.phase[:, None]).ravel()
    for each in awaited:
        np.testing.assert_array_equal(each.chance, probs[int(each.horizon == NEXT_STEP)].ravel()[each.keys])
        np.testing.assert_allclose(each.odds, odds[each.keys], atol=1e-5)
        assert ((each.keys // E < 2) == (each.horizon == NEXT_STEP)).all()
    assert predictor.pop_awaited() == []


def test_fusion_s_learned_state_is_restored_and_damage_is_not() -> None:
    blend, other = ForecastBlend(), ForecastBlend()
    for horizon in (2, NEXT_LAYER):
        learn(blend, horizon, right=True)
    kept = {name: array.copy() for name, array in blend.learned().items()}
    other.restore(kept | {"mix_loss": np.full_like(kept["mix_loss"], np.nan)})
    assert not other.etas.any()
    other.restore(kept)
    np.testing.assert_array_equal(other.etas, blend.etas)
    np.testing.assert_allclose(other.shares, blend.shares, atol=1e-3)
    learn(blend, 2, right=False, rounds=5)
    learn(other, 2, right=False, rounds=5)
    np.testing.assert_allclose(other.shares, blend.shares, atol=1e-3)
