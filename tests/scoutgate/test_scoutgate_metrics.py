"""Recall, log-loss, calibration and the baselines, on cases small enough to work out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.synthetic import EXPERTS, dataset

from scoutgate import baselines, calibrate
from scoutgate.data import Recording
from scoutgate.metrics import Score, within_top


def test_recall_counts_the_chosen_among_the_likeliest() -> None:
    score = Score(top_k=1)
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], np.float32)
    score.add(p, np.array([[1, 0, 0], [0, 1, 0]], bool))
    metrics = score.metrics()
    assert (metrics["recall_at_k"], metrics["recall_at_2k"], metrics["precision_at_k"]) == (0.5, 1.0, 0.5)
    assert metrics["log_loss"] == pytest.approx(-np.log([0.7, 0.8, 0.9, 0.9, 0.2, 0.3]).mean(), rel=1e-6)
    assert within_top(p, 2).sum() == 4


def test_scores_add_up() -> None:
    rng = np.random.default_rng(0)
    p, target = rng.random((40, 6)).astype(np.float32), rng.random((40, 6)) < 0.3
    whole, first, second = Score(2), Score(2), Score(2)
    whole.add(p, target)
    first.add(p[:10], target[:10])
    second.add(p[10:], target[10:])
    assert (first + second).metrics() == pytest.approx(whole.metrics())


def test_calibration_finds_the_scale_and_shift_that_spoiled_a_forecast() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=20_000)
    happened = rng.random(20_000) < calibrate.sigmoid(truth)
    weights = calibrate.fit((truth * 2 + 1)[:, None], happened)
    assert weights == pytest.approx([0.5, -0.5], abs=0.06)


def test_fitting_survives_forecasts_that_separate_perfectly() -> None:
    x = np.linspace(-12, 12, 200)[:, None]
    weights = calibrate.fit(x, x[:, 0] > 0)
    assert np.isfinite(weights).all()
    assert calibrate.apply(weights, x)[-1] > 0.9


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_ewma_is_the_recursion_of_the_source(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "CHUNK", chunk)
    recording, rate = Recording(dataset(tmp_path, 4)), 0.2
    at = np.arange(recording.count)
    state = np.concatenate([np.full(e, recording.meta.top_k / e) for e in EXPERTS])
    wanted = []
    for hit in baselines.routes(recording, at):
        wanted.append(state)
        state = (1 - rate) * state + rate * hit
    np.testing.assert_allclose(baselines.ewma(recording, rate)(at, 0), np.array(wanted), rtol=1e-4)
    some = at[3::5]
    np.testing.assert_allclose(baselines.ewma(recording, rate)(some, 0), np.array(wanted)[some], rtol=1e-4)


def test_popularity_and_transition_are_forecasts_of_k_experts(tmp_path: Path) -> None:
    recording = Recording(dataset(tmp_path, 60))
    at = recording.positions("test", decode_only=True)
    for predictor in (baselines.popularity(recording), baselines.transition(recording, 2)):
        for horizon in (0, 1):
            p = predictor(at, horizon)
            assert p.min() >= 0
            assert p.max() <= 1
            np.testing.assert_allclose(p.sum(1), len(EXPERTS) * recording.meta.top_k, rtol=1e-3)


def test_a_sum_of_scores_knows_the_number_of_experts_whichever_part_has_it() -> None:
    score = Score(top_k=1)
    score.add(np.full((2, 6), 0.5, np.float32), np.zeros((2, 6), bool))
    assert (Score(1) + score).experts == (score + Score(1)).experts == 6
