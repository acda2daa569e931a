"""Forecasts are blended into worths by the formulas of the module's header, as far as they were right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from edgemoe.experts.predict.fusion import HORIZONS, NEXT_LAYER, NEXT_STEP, Blend, Said
from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.predict.scoutgate.forecaster import ScoutGateForecast
from edgemoe.policy.fusion import Calibration
from edgemoe.types.arrays import FloatArray

L, E, K = 4, 10, 2
ROW = np.arange(K)


@pytest.fixture(scope="module")
def predictor() -> NextUsePredictor:
    """In the middle of a step: two of four layers have run."""
    it, random = NextUsePredictor(L, E, K), np.random.default_rng(1)
    for _ in range(5):
        it.begin(("a",))
        for layer in range(L):
            row = random.permutation(E)[:K]
            it.see(layer, row[None], row)
        it.end()
    it.begin(("a",))
    for layer in range(2):
        it.see(layer, ROW[None], ROW)
    return it


def forecast(seed: int) -> ScoutGateForecast:
    return ScoutGateForecast(1, np.random.default_rng(seed).random((2, L, E)).astype(np.float32))


def expected(
    odds: FloatArray, chance: FloatArray, calibration: Calibration, eta: float
) -> tuple[FloatArray, FloatArray]:
    """The header's formulas; chance and worth as log odds."""
    p, utility = calibration(odds), 1 / (1 + np.exp(-odds))
    beyond = np.clip((utility - p) / (1 - p), 0, 1)
    p = (1 - eta) * p + eta * chance
    utility = p + (1 - p) * beyond
    return p, np.log(utility / (1 - utility))


def learn(blend: Blend, horizon: int, right: bool, rounds: int = 80) -> None:
    """Forecasts of one horizon that are right, or wrong, about experts of which the predictor knows nothing."""
    random = np.random.default_rng(2)
    for _ in range(rounds):
        needed = random.random((L, E)) < 0.3
        keys: npt.NDArray[np.int64] = random.permutation(L * E)[:20]
        chance = np.where(needed.ravel()[keys] == right, 0.9, 0.1).astype(np.float32)
        if horizon == NEXT_STEP:
            blend._before.append(Said(horizon, keys, np.zeros(20, np.float32), chance))
        else:
            blend.hear(Said(horizon, keys, np.zeros(20, np.float32), chance))
        blend.learn(needed)


def test_without_a_forecast_or_a_record_ranks_are_the_predictors(predictor: NextUsePredictor) -> None:
    blend, ranks = Blend(predictor), np.empty((L, E), np.float32)
    for told in (None, forecast(3)):
        blend.ranks(ranks, told, 1.0, 0, L)
        np.testing.assert_array_equal(ranks, predictor.scores)


def test_this_step_and_the_next_are_blended_by_what_each_has_earned(predictor: NextUsePredictor) -> None:
    blend, ranks, told = Blend(predictor), np.empty((L, E), np.float32), forecast(4)
    now = blend._horizon
    learn(blend, now, right=True)
    learn(blend, NEXT_STEP, right=True, rounds=40)
    assert min(blend.mix.eta(now), blend.mix.eta(NEXT_STEP)) > 0.5
    blend.ranks(ranks, told, 0.8, 0, L)
    odds = predictor.scores - predictor.phase[:, None]
    for layer, horizon in enumerate((NEXT_STEP, NEXT_STEP, now, now)):
        row = told.probs[1 if layer < 2 else 0, layer]
        eta = blend.mix.eta(horizon, 0.8)
        _, want = expected(odds[layer], row, blend.calibrations[horizon], eta)
        np.testing.assert_allclose(ranks[layer], want + predictor.phase[layer], atol=2e-3)


def test_a_forecaster_that_is_wrong_is_not_listened_to(predictor: NextUsePredictor) -> None:
    blend, ranks = Blend(predictor), np.empty((L, E), np.float32)
    for horizon in range(HORIZONS):
        learn(blend, horizon, right=False)
        assert blend.mix.eta(horizon) == 0
    blend.ranks(ranks, forecast(5), 1.0, 0, L)
    np.testing.assert_allclose(ranks, predictor.scores, atol=2e-3)


def test_a_gates_chance_is_fused_in_the_same_way(predictor: NextUsePredictor) -> None:
    blend, random = Blend(predictor), np.random.default_rng(6)
    learn(blend, NEXT_LAYER, right=True)
    odds, chance = random.normal(-1, 2, 8).astype(np.float32), random.random(8).astype(np.float32)
    p, utility = blend.foresee(odds, chance)
    want_p, want = expected(odds, chance, blend.calibrations[NEXT_LAYER], blend.mix.eta(NEXT_LAYER))
    np.testing.assert_allclose(p, want_p, atol=1e-3)
    np.testing.assert_allclose(utility, want, atol=5e-3)


def test_an_export_that_knows_this_step_alone_is_left_out(predictor: NextUsePredictor) -> None:
    blend, ranks = Blend(predictor), np.empty((L, E), np.float32)
    one = ScoutGateForecast(1, forecast(7).probs[:1])
    blend.listen(one)
    blend.ranks(ranks, one, 1.0, 0, L)
    np.testing.assert_array_equal(ranks, predictor.scores)
