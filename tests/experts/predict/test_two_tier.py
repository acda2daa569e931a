"""All rules of the source: fusion, admission, eviction, and the experts kept by the floor."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from edgemoe.experts.predict.forecast_blend import ExpertForecast
from edgemoe.experts.predict.two_tier import TwoTierPolicy
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool
from edgemoe.policy.cache_ranks import EWMA
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.step import StepMeta, StepRouting

L, E, K = 3, 12, 2
SIZES = ExpertGeometry(L, E, K, hidden=16, width=16, dtype="float32")
ALWAYS = np.array([[0, 1], [2, 3], [4, 5]])  # [L, K] experts that each step needs


class Loader:
    """Keeps the last plan."""

    moves: tuple[Move, ...] = ()

    def prefetch(self, moves: Iterable[Move], priority: PrefetchPriority = PrefetchPriority.FAR) -> None:
        self.moves = tuple(moves)

    def miss_costs(self, tier: Tier) -> list[tuple[float, float]]:
        return [(0.0, 0.0)]  # not measured yet


class Knowing:
    """Forecasts `ALWAYS` at both horizons."""

    trust = 1.0

    def __init__(self) -> None:
        probs = np.full((2, L, E), 0.01, np.float32)
        for layer in range(L):
            probs[:, layer, ALWAYS[layer]] = 0.99
        self.probs, self.forecast = probs, ExpertForecast(0, probs)


def meta(decode: bool = True) -> StepMeta:
    return StepMeta(("a",), np.ones(1, np.int64), np.array([decode]), np.zeros(1, np.int64), np.zeros(1, np.int64))


def step(rules: TwoTierPolicy, needs: IntArray = ALWAYS, knowing: Knowing | None = None) -> None:
    rules.on_step_begun(meta())
    if knowing is not None:
        knowing.forecast = ExpertForecast(knowing.forecast.step + 1, knowing.probs)
    for layer in range(L):
        rules.touch(layer, needs[layer])
    rules.observe(routing())


def routing(decode: bool = True) -> StepRouting:
    return StepRouting(meta(decode), np.zeros((L, 1, K), np.int16), np.zeros((L, 1, K), np.float32), {}, 0.01, 0.0)


def residency_of(vram_slots: int) -> Residency:
    """Builds a residency with all experts in RAM and none in VRAM."""
    policy = EWMA(L, E, K)
    residency = Residency(SlotPool(Tier.RAM, L, E, L * E, policy), [SlotPool(Tier.VRAM, L, E, vram_slots, policy)])
    for expert in (ExpertId(*divmod(key, E)) for key in range(L * E)):
        bring(residency, expert, Tier.NVME, Tier.RAM)
    return residency


def bring(residency: Residency, expert: ExpertId, source: Tier, target: Tier) -> None:
    load = residency.reserve(Move(expert, source, target, 1.0), PrefetchPriority.FILL)
    assert load is not None
    residency.complete_load(load)
    if load.source >= 0:
        residency.unpin(load.source)


def test_without_scoutgate_ranks_follow_averages_and_distances() -> None:
    rules, plain = TwoTierPolicy(SIZES), EWMA(L, E, K)
    for _ in range(3):
        step(rules)
        for layer in range(L):
            plain.touch(layer, ALWAYS[layer])
    np.testing.assert_array_equal(rules.rank(1), plain.rank(1))


def test_a_scoutgate_that_knows_is_believed_more_with_every_step() -> None:
    knowing = Knowing()
    rules, alone = TwoTierPolicy(SIZES, forecaster=knowing), TwoTierPolicy(SIZES)
    other = (ALWAYS + 6) % E
    for _ in range(5):
        step(rules, knowing=knowing)
        step(alone)
    assert rules.metrics()[named(names.LEARNED_ETA, horizon="0")] > 0.5
    assert rules.metrics()[named(names.LEARNED_ETA, horizon="1")] > 0.5

    def gap(of: TwoTierPolicy) -> float:
        ranks: FloatArray = of.rank(0)
        return float(ranks[1, ALWAYS[1]].min() - ranks[1, other[1]].max())

    assert gap(rules) > 2 * gap(alone)


def test_experts_worth_their_price_are_requested_and_replace_others() -> None:
    rules, loader = TwoTierPolicy(SIZES, hysteresis=0.2), Loader()
    residency = residency_of(vram_slots=9)
    rules.attach(residency, loader, SIZES)
    for _ in range(60):
        step(rules)
    wanted = {ExpertId(layer, expert) for layer in range(L) for expert in ALWAYS[layer].tolist()}
    assert {move.expert for move in loader.moves} == wanted
    worth = rules.rank(L - 1)
    (line,) = {move.score for move in loader.moves}
    admitted = line * 1.2 / 0.8  # admitted from (1 + h) times the price, evicted below (1 - h) times
    assert 0 < admitted <= min(worth[expert] for expert in wanted)
    assert admitted > max(worth[layer, e] for layer in range(L) for e in range(E) if (layer, e) not in wanted)
    for expert in wanted:
        bring(residency, expert, Tier.RAM, Tier.VRAM)
    step(rules)
    assert not loader.moves
    assert rules.planned > 0


def test_a_prompt_cancels_the_plan() -> None:
    rules, loader = TwoTierPolicy(SIZES), Loader()
    rules.attach(residency_of(vram_slots=9), loader, SIZES)
    for _ in range(60):
        step(rules)
    assert loader.moves
    rules.on_step_begun(meta(decode=False))
    rules.observe(routing(decode=False))
    assert not loader.moves


def test_in_a_tier_too_small_for_a_token_s_experts_the_densest_stay(caplog: pytest.LogCaptureFixture) -> None:
    rules = TwoTierPolicy(SIZES)
    rules.attach(residency_of(vram_slots=4), Loader(), SIZES)  # a token needs six
    often = np.array([[0, 1], [0, 1], [0, 1]])
    for number in range(40):
        seldom = np.stack([2 + (np.arange(K) + number + 3 * layer) % (E - 2) for layer in range(L)])
        step(rules, seldom if number % 4 == 0 else often)
    pinned = np.argwhere(np.isinf(rules.rank(0)))
    assert len(pinned) == 3  # one slot is left for streamed experts
    assert set(pinned[:, 1].tolist()) <= {0, 1}
    assert sum("one token's experts" in record.getMessage() for record in caplog.records) == 1
