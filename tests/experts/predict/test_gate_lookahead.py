"""A gate's hint becomes a calibrated probability, and the compiled version computes the same as the plain one."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.experts.predict.gate_lookahead import TINY, GateLookAhead
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool
from edgemoe.policy.cache_ranks import LRU
from edgemoe.policy.forecast_mix import Calibration
from edgemoe.types.experts import ExpertId, Move, Tier

L, E, K = 4, 16, 3


def tiers(layers: int = L, devices: int = 1, slots: int = L * E) -> Residency:
    """Builds empty tiers: RAM, and devices with `slots` each."""
    policy = LRU(layers, E)
    pools = [SlotPool(tier, layers, E, slots, policy) for tier in (Tier.RAM, *[Tier.VRAM] * devices)]
    return Residency(pools[0], pools[1:])


def bring(residency: Residency, target: Tier, experts: list[int], layer: int = 1) -> None:
    for expert in experts:
        move = Move(ExpertId(layer, expert), Tier.NVME if target is Tier.RAM else Tier.RAM, target, np.inf)
        load = residency.reserve(move, PrefetchPriority.FILL)
        assert load is not None
        residency.complete_load(load)
        if load.source >= 0:
            residency.unpin(load.source)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


def plain_likely(probs: np.ndarray) -> list[int]:
    """Returns the union of each token's k most probable experts, in order of probability, then of number."""
    union = {int(expert) for row in probs for expert in np.argsort(-row, kind="stable")[:K]}
    return sorted(union, key=lambda expert: (-probs[:, expert].max(), expert))


def plain_chances(probs: np.ndarray, calibration: Calibration) -> np.ndarray:
    """Computes each expert's probability [E] that some token needs it."""
    least = np.sort(probs, axis=1)[:, -K, None]
    return 1 - np.prod(1 - calibration(np.log((probs + TINY) / (least + TINY))), axis=0, dtype=np.float32)


def drawn(random: np.random.Generator, tokens: int, width: int = E) -> np.ndarray:
    """Draws a hint in which some probabilities are equal and some almost 0."""
    logits = random.normal(0, 2, (tokens, width)).round(1)
    logits[random.random(logits.shape) < 0.05] = -40
    return softmax(logits)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("devices", [0, 1, 2])
def test_a_hint_is_read_as_a_plain_statement_reads_it(tokens: int, devices: int) -> None:
    random = np.random.default_rng(tokens)
    for _ in range(30):
        residency = tiers(devices=devices)
        in_ram = np.flatnonzero(random.random(E) < 0.8).tolist()
        on_top = [expert for expert in in_ram if random.random() < 0.5] if devices else in_ram
        bring(residency, Tier.RAM, in_ram)
        bring(residency, Tier.VRAM, on_top if devices else [])
        ahead, probs = GateLookAhead(residency, K), drawn(random, tokens)
        ahead.calibration.learn(random.uniform(-4, 3, 300), random.random(300) < 0.6)
        ahead.likely_experts(1, probs)
        ahead.learn(1, random.integers(0, E, (tokens, K)))  # passes the calibration on to the compiled side
        likely = plain_likely(probs)
        heard = ahead.likely_experts(1, probs)
        if set(likely) <= set(on_top):
            assert heard is None
            continue
        assert heard is not None
        experts, chance = heard
        assert experts.tolist() == likely
        want = plain_chances(probs, ahead.calibration)[likely] * ahead.trust
        np.testing.assert_allclose(chance, want, rtol=2e-6, atol=1e-7)
        fused = random.choice([0.25, 0.5, 0.75], len(likely)).astype(np.float32)
        utility = random.choice([-np.inf, -1.5, 0.0, np.inf], len(likely)).astype(np.float32)
        missing = [
            (expert, Tier.RAM if expert in in_ram else Tier.NVME, fused[i], utility[i])
            for i, expert in enumerate(likely)
            if expert not in on_top and utility[i] > -np.inf
        ]
        missing.sort(key=lambda each: -each[2])
        assert list(ahead.missing(fused, utility)) == missing


def test_a_layer_with_fewer_experts_is_read_in_its_own_width() -> None:
    random, residency = np.random.default_rng(7), tiers()
    ahead, probs = GateLookAhead(residency, K), drawn(random, 3, E - 5)
    heard = ahead.likely_experts(2, probs)
    assert heard is not None
    np.testing.assert_array_equal(heard[0], plain_likely(probs))
    np.testing.assert_allclose(heard[1], plain_chances(probs, ahead.calibration)[heard[0]], rtol=2e-6)


def test_nan_hints_request_no_expert_outside_of_the_layer() -> None:
    ahead = GateLookAhead(tiers(), K)
    heard = ahead.likely_experts(1, np.full((2, E), np.nan, np.float32))
    assert heard is not None
    assert sorted(set(heard[0].tolist())) == sorted(heard[0].tolist())
    assert ((heard[0] >= 0) & (heard[0] < E)).all()
    assert ((heard[1] >= 0) & (heard[1] <= 1)).all()


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_chances_come_true_as_often_as_they_say(noise: float) -> None:
    random, ahead = np.random.default_rng(1), GateLookAhead(tiers(), K)
    said, came = [], []
    for step in range(1500):
        for layer in range(1, L):
            logits = random.normal(0, 1.5, (1, E))
            heard = ahead.likely_experts(layer, softmax(logits))
            assert heard is not None
            chosen = np.argsort(-(logits + random.normal(0, noise, E)), axis=1)[:, :K]
            if step > 500:
                said.append(heard[1])
                came.append(np.isin(heard[0], chosen[0]))
            ahead.learn(layer, chosen)
    p, true = np.concatenate(said), np.concatenate(came)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        some = (p >= low) & (p < low + 0.2)
        if some.sum() > 200:
            assert abs(p[some].mean() - true[some].mean()) < 0.08
    assert p[true].mean() > p[~true].mean() + (0.1 if noise < 1 else 0.04)


def test_hints_that_turn_bad_are_doubted_within_a_few_steps_and_believed_again() -> None:
    random, ahead = np.random.default_rng(4), GateLookAhead(tiers(), K)

    def live(steps: int, truth: float) -> None:
        for _ in range(steps):
            chosen = [random.permutation(E)[:K] for _ in range(L)]
            for layer in range(L):
                if layer + 1 < L:  # the hint is used before its layer is reported
                    logits = random.normal(0, 0.5, (1, E))
                    logits[0, chosen[layer + 1]] += truth
                    ahead.likely_experts(layer + 1, softmax(logits))
                ahead.learn(layer, chosen[layer][None])

    live(300, 4.0)
    assert ahead.trust > 0.9
    live(30, -4.0)
    assert ahead.trust < 0.2
    live(60, 4.0)
    assert ahead.trust > 0.8


def test_a_layer_without_a_hint_teaches_nothing() -> None:
    ahead = GateLookAhead(tiers(), K)
    before = ahead.calibration.share.copy()
    for layer in range(L):
        ahead.learn(layer, np.array([[0, 1, 2]]))
    assert np.array_equal(ahead.calibration.share, before)
    single = GateLookAhead(tiers(layers=1), K)
    single.learn(0, np.array([[0, 1, 2]]))


def test_a_calibration_begins_as_the_logistic_function_and_ends_at_the_observed_rates() -> None:
    calibration, random = Calibration(-4, 4, 17), np.random.default_rng(3)
    assert calibration(np.zeros(1, np.float32))[0] == pytest.approx(0.5)
    for _ in range(400):
        score = random.uniform(-4, 4, 50).astype(np.float32)
        calibration.learn(score, random.random(50) < 0.25)
    assert np.abs(calibration(np.linspace(-4, 4, 9).astype(np.float32)) - 0.25).max() < 0.12
