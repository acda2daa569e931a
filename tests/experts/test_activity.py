"""Counts of the requests' experts, compared with a plain count of the same choices."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from edgemoe.cluster.control.messages import BoxReport, LinkReport
from edgemoe.experts import activity
from edgemoe.experts.activity import ActivityCounter
from edgemoe.types.bounds import MAX_NODES
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.placement import ACTIVITY_HALF_LIFE_S, ACTIVITY_UNIT
from edgemoe.types.step import StepMeta, StepRouting
from edgemoe.worker.cluster_member import MOST_PAIRS

GEOMETRY = ExpertGeometry(3, 8, 3, 16, 16, "float32")


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def step(rng: np.random.Generator, tokens: int) -> StepRouting:
    shape = (GEOMETRY.layers, tokens)
    skewed = rng.random((*shape, GEOMETRY.experts)) * np.arange(1, GEOMETRY.experts + 1)
    ids = np.argsort(-skewed, axis=-1)[..., : GEOMETRY.top_k].astype(np.int16)
    nothing = np.zeros(tokens, np.int64)
    meta = StepMeta(("r",), np.array([tokens]), np.array([False]), nothing, nothing)
    return StepRouting(meta, ids, np.zeros(ids.shape, np.float32), {}, 0.0, 0.0)


def plain(steps: list[tuple[float, StepRouting]]) -> tuple[float, np.ndarray, np.ndarray]:
    """Counts tokens, choices [L, E] and pairs [L, E, E] with the lower number first, each step by its weight."""
    chosen = np.zeros((GEOMETRY.layers, GEOMETRY.experts))
    pairs, tokens = np.zeros((*chosen.shape, GEOMETRY.experts)), 0.0
    for weight, each in steps:
        tokens += weight * each.ids.shape[1]
        for layer, of_layer in enumerate(each.ids):
            for ids in of_layer:
                for expert in ids:
                    chosen[layer, expert] += weight
                for a, b in itertools.combinations(sorted(ids), 2):
                    pairs[layer, a, b] += weight
    return tokens, chosen, pairs


def computed_in(each: StepRouting) -> np.ndarray:
    """Returns the experts [L, E] that a step computes, for any number of tokens, as 1.0."""
    computed = np.zeros((GEOMETRY.layers, GEOMETRY.experts))
    for layer, of_layer in enumerate(each.ids):
        computed[layer, np.unique(of_layer)] = 1.0
    return computed


@pytest.mark.parametrize("most_weight", [2.0**20, 3.0])
def test_shares_equal_a_plain_count_with_decay(most_weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "MOST_WEIGHT", most_weight)
    rng, clock, steps = np.random.default_rng(0), Clock(), []
    counted = ActivityCounter(GEOMETRY, clock)
    for tokens in (1, 7, 2, 30, 1):
        steps.append((clock.now_s, step(rng, tokens)))
        counted.add(steps[-1][1])
        clock.now_s += ACTIVITY_HALF_LIFE_S
    weighed = [(2.0 ** ((at_s - clock.now_s) / ACTIVITY_HALF_LIFE_S), each) for at_s, each in steps]
    tokens, chosen, pairs = plain(weighed)
    found = counted.shares(10_000)
    assert found.tokens == pytest.approx(tokens, rel=1e-5)
    assert np.abs(found.chosen - chosen / tokens * ACTIVITY_UNIT).max() <= 1
    whole = sum(weight for weight, _ in weighed)
    computed = sum(weight * computed_in(each) for weight, each in weighed) / whole
    assert found.steps_per_token == pytest.approx(whole / tokens, rel=1e-5)
    assert np.abs(found.computed - computed * ACTIVITY_UNIT).max() <= 1
    told = np.zeros_like(pairs)
    told[tuple(found.pairs[:, :3].T)] = found.pairs[:, 3]
    assert np.abs(told - pairs / tokens * ACTIVITY_UNIT).max() <= 1


def test_tokens_a_second_are_as_many_however_short_a_time_is_counted() -> None:
    rng, clock = np.random.default_rng(7), Clock()
    counted = ActivityCounter(GEOMETRY, clock)
    for second in range(1, 1500):
        counted.add(step(rng, 3))
        clock.now_s += 1.0
        if second in (20, 300, 1499):
            assert counted.shares(10).tokens_per_s == pytest.approx(3, rel=1e-2)
    counted.clear()
    clock.now_s += 1.0
    counted.add(step(rng, 3))
    assert counted.shares(10).tokens_per_s == pytest.approx(3 / activity.LEAST_S, rel=1e-2)


def test_after_weeks_without_a_request_only_new_counts_matter() -> None:
    rng, clock = np.random.default_rng(8), Clock()
    counted = ActivityCounter(GEOMETRY, clock)
    counted.add(step(rng, 50))
    for half_lives in (200, 1100, 5000):
        clock.now_s += half_lives * ACTIVITY_HALF_LIFE_S
        assert counted.shares(10).tokens < 1e-20
        counted.add(each := step(rng, 4))
        _, chosen, _ = plain([(1.0, each)])
        found = counted.shares(10)
        assert found.tokens == pytest.approx(4)
        assert np.abs(found.chosen - chosen / 4 * ACTIVITY_UNIT).max() <= 1


def test_successions_are_counted_token_by_token() -> None:
    rng, clock = np.random.default_rng(5), Clock()
    counted, passed = ActivityCounter(GEOMETRY, clock, successions=True), np.zeros((2, 8, 8))
    for tokens in (3, 20, 1):
        each = step(rng, tokens)
        each.ids[2, -1] = -1  # a layer that the step did not reach
        counted.add(each)
        clock.now_s += ACTIVITY_HALF_LIFE_S
        passed /= 2
        for layer, token in itertools.product(range(2), range(tokens)):
            for a, b in itertools.product(each.ids[layer, token], each.ids[layer + 1, token]):
                passed[layer, a, b] += b >= 0
    found, told = counted.shares(10_000), np.zeros_like(passed)
    assert (counted.steps, len(found.pairs)) == (3, 0)
    told[tuple(found.passed[:, :3].T)] = found.passed[:, 3]
    assert np.abs(told - passed / (3 / 4 + 20 / 2 + 1) * ACTIVITY_UNIT).max() <= 1
    heaviest = counted.shares(8).passed
    assert heaviest[:, 0].tolist() == [0] * 4 + [1] * 4
    assert heaviest[:4, 3].tolist() == sorted(told[0].ravel(), reverse=True)[:4]
    counted.clear()
    assert not len(counted.shares(10_000).passed)


def test_a_large_model_s_counts_fit_into_a_report() -> None:
    """Of 58 layers of 256 experts, all chosen, with every bit of every table in use."""
    counted = ActivityCounter(ExpertGeometry(58, 256, 8, 16, 16, "float32"), successions=True)
    rng, nothing = np.random.default_rng(6), np.zeros(400, np.int64)
    ids = np.argsort(rng.random((58, 400, 256)), axis=2)[..., :8].astype(np.int16)
    meta = StepMeta(("r",), np.array([400]), np.array([False]), nothing, nothing)
    counted.add(StepRouting(meta, ids, np.zeros(ids.shape, np.float32), {}, 0.0, 0.0))
    told = counted.shares(MOST_PAIRS)
    links = tuple(LinkReport("n" * 60, 1e-3, 1e9, 1e-3) for _ in range(MAX_NODES))
    tables = told.chosen.tobytes(), told.pairs.tobytes(), bytes(58 * 32), links, told.passed.tobytes()
    said = BoxReport("m" * 64, told.tokens, *tables, 1 << 40, computed=told.computed.tobytes())
    assert len(told.passed) > MOST_PAIRS - 58
    assert len(encoded := msgspec.msgpack.encode(said)) < 256 << 10
    assert msgspec.msgpack.decode(encoded, type=BoxReport) == said


def test_of_the_pairs_the_heaviest_of_each_layer_are_told() -> None:
    counted, rng = ActivityCounter(GEOMETRY), np.random.default_rng(1)
    counted.add(each := step(rng, 200))
    _, _, pairs = plain([(1.0, each)])
    found = counted.shares(15)
    assert found.pairs[:, 0].tolist() == sorted(found.pairs[:, 0].tolist())
    for layer in range(GEOMETRY.layers):
        best = np.sort(pairs[layer].ravel())[::-1][:5] / 200 * ACTIVITY_UNIT
        np.testing.assert_allclose(found.pairs[found.pairs[:, 0] == layer, 3], best, atol=1)


def test_a_layer_that_did_not_run_counts_nothing() -> None:
    counted, each = ActivityCounter(GEOMETRY), step(np.random.default_rng(2), 4)
    each.ids[1] = -1
    counted.add(each)
    found = counted.shares(1000)
    assert (found.chosen.sum(axis=1) > 0).tolist() == [True, False, True]
    assert (found.computed.sum(axis=1) > 0).tolist() == [True, False, True]
    assert 1 not in found.pairs[:, 0]


def test_nothing_counted_is_nothing_told() -> None:
    found = ActivityCounter(GEOMETRY).shares(1000)
    assert found.tokens == 0
    assert not found.chosen.any()
    assert not found.computed.any()
    assert found.steps_per_token == 0
    assert not len(found.pairs)


def test_a_model_of_too_many_pairs_is_counted_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "PAIRS_BYTES", 100)
    counted = ActivityCounter(GEOMETRY)
    counted.add(step(np.random.default_rng(3), 4))
    found = counted.shares(1000)
    assert found.chosen.any()
    assert not len(found.pairs)
