"""Signatures, clusters of given sizes, the locality band and drift."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from edgemoe.policy.placement.problem import shares
from edgemoe.policy.routing.eldr import drifted, in_band
from edgemoe.policy.routing.eldr_fitting import (
    RecordedTraffic,
    balanced,
    best_layers,
    choose_weights,
    fit_clusters,
    matched,
    pairs_of,
    quality,
    spearman,
)
from edgemoe.policy.routing.signatures import ExpertClusters, rarity, signatures

LAYERS, EXPERTS, DOMAINS = 4, 16, 4
RATES = np.random.default_rng(1).gamma(0.3, 1.0, (DOMAINS, LAYERS, EXPERTS))


def traffic(domains: list[int], seed: int = 0, noise: int = 0) -> RecordedTraffic:
    """Draws requests of domains that each choose their own experts; the last `noise` layers of prefill are random."""
    rng = np.random.default_rng(seed)
    rates = RATES[domains] / RATES[domains].sum(axis=2, keepdims=True)
    prefill, decode = rng.poisson(rates * 120), rng.poisson(rates * 60)
    if noise:
        prefill[:, -noise:] = rng.poisson(rng.gamma(0.3, 30.0, prefill[:, -noise:].shape))
    return RecordedTraffic(prefill, decode, np.full(len(domains), 30))


def fitted(domains: list[int], capacity: list[int], before: np.ndarray | None = None, seed: int = 0) -> ExpertClusters:
    return fit_clusters(traffic(domains, seed), np.array(capacity), np.random.default_rng(2), before)[0]


def test_a_signature_is_one_long_and_knows_no_length_of_prompt() -> None:
    counts = np.array([[[3, 0], [1, 2]], [[6, 0], [2, 4]], [[0, 0], [0, 0]]], np.uint8)
    found = signatures(counts, np.ones((2, 2), np.float32))
    assert np.allclose(np.linalg.norm(found, axis=1), [1, 1, 0])
    assert np.allclose(found[0], found[1])


def test_an_expert_that_every_request_chooses_says_nothing() -> None:
    counts = np.array([[[5, 1, 0]], [[2, 0, 0]], [[1, 0, 0]]])
    weights = rarity(counts)[0]
    assert weights[0] == 0.0
    assert 0 < weights[1] < weights[2] == pytest.approx(np.log(4))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=40))
def test_rho_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(each, np.float64) for each in zip(*pairs, strict=True))
    if np.ptp(a) and np.ptp(b):
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    else:
        assert spearman(a, b) == 0.0


def test_layers_that_say_nothing_of_decoding_are_left_out() -> None:
    seen = traffic([n % DOMAINS for n in range(60)], noise=2)
    plain = np.ones((LAYERS, EXPERTS), np.float32)
    pairs = pairs_of(60, np.random.default_rng(0))
    kept = best_layers(seen.prefill, seen.decode, plain, pairs)
    assert kept
    assert max(kept) < LAYERS - 2
    choice = choose_weights(seen.prefill, seen.decode, np.random.default_rng(0))
    assert choice.rho[choice.name] == max(choice.rho.values())
    assert quality(seen.prefill, seen.decode, choice.weights, pairs) > quality(seen.prefill, seen.decode, plain, pairs)


def test_one_half_of_the_requests_makes_the_weights_and_the_other_half_compares_them() -> None:
    seen = traffic([n % DOMAINS for n in range(20)])
    seen.prefill[:, :, 0] = np.random.default_rng(3).integers(1, 800, (20, LAYERS))  # says nothing, so rarity is best
    fitted = choose_weights(seen.prefill, seen.decode, np.random.default_rng(0))
    order = np.random.default_rng(0).permutation(20)
    kept, half = fitted.weights.any(axis=1), order[1::2]
    assert fitted.name.startswith("rarity")
    assert np.array_equal(fitted.weights[kept], rarity(seen.prefill[order[::2]])[kept])
    pairs = pairs_of(10, np.random.default_rng(0))
    assert fitted.rho[fitted.name] == quality(seen.prefill[half], seen.decode[half], fitted.weights, pairs)


def test_the_cluster_of_a_single_worker_has_the_middle_of_all_requests() -> None:
    points = signatures(traffic([n % DOMAINS for n in range(20)]).prefill, np.ones((LAYERS, EXPERTS), np.float32))
    middle = points.sum(axis=0) / np.linalg.norm(points.sum(axis=0))
    assert np.allclose(balanced(points, np.array([3]), np.random.default_rng(0)).centroids[0], middle, atol=1e-5)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(6, 40))
def test_every_request_is_in_a_cluster_and_sizes_are_in_proportion(seed: int, capacity: list[int], count: int) -> None:
    rng = np.random.default_rng(seed)
    points = signatures(rng.random((count, 2, 3)), np.ones((2, 3), np.float32))
    room = np.array(capacity)
    clusters = balanced(points, room, rng)
    sizes = np.bincount(clusters.member, minlength=len(room))
    assert sizes.tolist() == shares(count, room).tolist()
    assert (np.abs(sizes - count * room / room.sum()) < 1).all()
    assert np.allclose(np.linalg.norm(clusters.centroids[sizes > 0], axis=1), 1, atol=1e-5)


def test_clusters_are_the_domains_where_these_are_as_large_as_workers() -> None:
    domains = [n % DOMAINS for n in range(80)]
    points = signatures(traffic(domains).prefill, np.ones((LAYERS, EXPERTS), np.float32))
    member = balanced(points, np.full(DOMAINS, 5), np.random.default_rng(0)).member
    assert len(set(zip(domains, member.tolist(), strict=True))) == DOMAINS


@given(st.integers(0, 2**32), st.lists(st.sampled_from([4, 8]), min_size=2, max_size=5))
def test_new_clusters_go_where_most_of_their_requests_were(seed: int, capacity: list[int]) -> None:
    rng, workers = np.random.default_rng(seed), len(capacity)
    before, after = rng.integers(-1, workers, 30), rng.integers(0, workers, 30)
    found = matched(before, after, np.array(capacity))
    assert sorted(found.tolist()) == list(range(workers))
    assert [capacity[worker] for worker in found] == capacity

    def stay(worker: tuple[int, ...]) -> int:
        return sum(worker[cluster] == old for old, cluster in zip(before.tolist(), after.tolist(), strict=True))

    orders = [each for each in permutations(range(workers)) if [capacity[w] for w in each] == capacity]
    assert stay(tuple(found.tolist())) == max(map(stay, orders))


def test_a_new_fit_moves_few_requests() -> None:
    domains = [n % DOMAINS for n in range(80)]
    first = fitted(domains, [8] * DOMAINS)
    before = np.array([int(first.similarity(each).argmax()) for each in traffic(domains, seed=5).prefill])
    again = fitted(domains, [8] * DOMAINS, before, seed=5)
    after = np.array([int(again.similarity(each).argmax()) for each in traffic(domains, seed=6).prefill])
    assert (before == after).mean() > 0.9


def test_a_clusters_decode_mean_is_that_of_its_requests() -> None:
    domains = [n % 2 for n in range(40)]
    clusters = fitted(domains, [4, 4])
    seen = traffic(domains)
    for domain in (0, 1):
        worker = int(clusters.similarity(seen.prefill[domain]).argmax())
        mean = seen.decode[domain::2].sum(axis=0) / seen.decoded[domain::2].sum()
        assert np.allclose(clusters.decode[worker], mean, atol=1e-5)


def test_the_band_goes_from_the_nearest_to_the_least_loaded() -> None:
    near, load = np.array([0.9, 0.85, 0.2], np.float32), np.array([0.8, 0.5, 0.0])
    room = np.ones(3, np.bool_)
    assert in_band(near, load, room, 0.0) == 0
    assert in_band(near, load, room, 0.1) == 1
    assert in_band(near, load, room, 1.0) == 2
    assert in_band(near, load, np.array([False, False, True]), 0.1) == 2
    assert in_band(near, load, np.zeros(3, np.bool_)) == -1
    assert in_band(near, np.zeros(3), room, 0.1) == 0  # the nearer of equals


@pytest.mark.parametrize(
    ("domains", "moved"),
    [
        ([n % 3 for n in range(90)], False),
        ([3 if n % 2 else n % 3 for n in range(90)], True),  # half of a new kind
        ([0 if n % 10 else n % 3 for n in range(90)], True),  # the same kinds in other shares
    ],
)
def test_drift_is_other_requests_or_other_shares_of_them(domains: list[int], moved: bool) -> None:
    clusters = fitted([n % 3 for n in range(90)], [4, 4, 4])
    assert drifted(clusters, traffic(domains, seed=9).prefill) is moved
