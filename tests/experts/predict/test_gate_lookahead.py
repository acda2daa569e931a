"""A gate's hint becomes a chance: what it has meant lately."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.experts.predict.gate_lookahead import GateLookAhead
from edgemoe.policy.fusion import Calibration

L, E, K = 4, 16, 3
EVERYBODY = np.arange(E)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_chances_come_true_as_often_as_they_say(noise: float) -> None:
    random, ahead = np.random.default_rng(1), GateLookAhead(L, K)
    said, came = [], []
    for step in range(1500):
        for layer in range(1, L):
            logits = random.normal(0, 1.5, (1, E))
            ahead.hear(layer, softmax(logits))
            chosen = np.argsort(-(logits + random.normal(0, noise, E)), axis=1)[:, :K]
            if step > 1000:
                said.append(ahead.chances(layer, softmax(logits), EVERYBODY))
                came.append(np.isin(np.arange(E), chosen[0]))
            ahead.learn(layer, chosen)
    p, true = np.concatenate(said), np.concatenate(came)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        some = (p >= low) & (p < low + 0.2)
        if some.sum() > 200:
            assert abs(p[some].mean() - true[some].mean()) < 0.08
    assert p[true].mean() > p[~true].mean() + (0.4 if noise < 1 else 0.2)


def test_tokens_of_a_batch_combine() -> None:
    ahead = GateLookAhead(L, K)
    hint = softmax(np.random.default_rng(2).normal(0, 1.5, (1, E)))
    one, two = (ahead.chances(1, each, EVERYBODY) for each in (hint, np.concatenate([hint, hint])))
    np.testing.assert_allclose(two, 1 - (1 - one) ** 2, atol=1e-6)


def test_hints_that_turn_bad_are_doubted_within_a_few_steps_and_believed_again() -> None:
    random, ahead = np.random.default_rng(4), GateLookAhead(L, K)

    def live(steps: int, truth: float) -> None:
        for _ in range(steps):
            chosen = [random.permutation(E)[:K] for _ in range(L)]
            for layer in range(L):
                if layer + 1 < L:  # a hint is heard before the layer that it comes from is told of
                    logits = random.normal(0, 0.5, (1, E))
                    logits[0, chosen[layer + 1]] += truth
                    ahead.hear(layer + 1, softmax(logits))
                    ahead.chances(layer + 1, softmax(logits), logits[0].argsort()[-K:])
                ahead.learn(layer, chosen[layer][None])

    live(300, 4.0)
    assert ahead.trust > 0.9
    live(30, -4.0)
    assert ahead.trust < 0.2
    live(60, 4.0)
    assert ahead.trust > 0.8


def test_a_layer_without_a_hint_teaches_nothing() -> None:
    ahead = GateLookAhead(L, K)
    before = ahead.calibration.share.copy()
    for layer in range(L):
        ahead.learn(layer, np.array([[0, 1, 2]]))
    assert np.array_equal(ahead.calibration.share, before)
    single = GateLookAhead(1, K)
    single.learn(0, np.array([[0, 1, 2]]))


def test_a_calibration_begins_as_the_logistic_function_and_ends_as_what_came() -> None:
    calibration, random = Calibration(-4, 4, 17), np.random.default_rng(3)
    assert calibration(np.zeros(1, np.float32))[0] == pytest.approx(0.5)
    for _ in range(400):
        score = random.uniform(-4, 4, 50).astype(np.float32)
        calibration.learn(score, random.random(50) < 0.25)
    assert np.abs(calibration(np.linspace(-4, 4, 9).astype(np.float32)) - 0.25).max() < 0.12
