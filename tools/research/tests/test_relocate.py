"""Experts on devices by traffic between layers: compared with the optimum and the literal form, and invariants."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from tools.research.placement.relocate import anchored, published, relocate
from tools.research.placement.relocation_oracle import optimum
from tools.research.placement.traffic import ExpertTraffic, RelocationPrices, TrafficCounts, cost, cut, loads, uneven


def counted(seed: int, layers: int = 3, experts: int = 4, tokens: int = 60) -> ExpertTraffic:
    """Counts random tokens that choose two experts a layer, near the ones of the layer before."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, experts, (tokens, 1))
    drift = np.cumsum(rng.integers(0, 2, (tokens, layers)), axis=1)
    one = (first + drift) % experts
    routes = np.stack([one, (one + 1 + rng.integers(0, experts - 1, one.shape)) % experts], axis=2)
    counts = TrafficCounts(layers, experts)
    counts.observe(routes)
    return counts.traffic()


def test_counts_are_of_experts_chosen_and_of_pairs_in_layers_that_follow() -> None:
    counts = TrafficCounts(layers=3, experts=4, decay=0.5)
    counts.observe(np.array([[[0, 1], [2, 3], [0, 3]]]))
    counts.observe(np.array([[[0, 2], [1, 3], [0, 3]]]))
    traffic = counts.traffic()
    assert traffic.chosen.tolist() == [[1.5, 0.5, 1, 0], [0, 1, 0.5, 1.5], [1.5, 0, 0, 1.5]]
    assert traffic.passed[0, 0].tolist() == [0, 1, 0.5, 1.5]
    assert traffic.passed.sum() == pytest.approx(2 * (4 * 1.5))
    assert traffic.columns[3].tolist() == [1.5, 0, 0, 1.5]


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 1000), devices=st.integers(2, 3), price=st.floats(0.0, 2.0))
def test_every_exchange_pays_for_itself_and_leaves_each_device_its_number_of_experts(
    seed: int, devices: int, price: float
) -> None:
    traffic, weights = counted(seed, layers=5, experts=9), RelocationPrices(uneven=2.0)
    start = anchored(traffic, devices, anchor=1, share=0.5)
    after = relocate(start, traffic, devices, weights, price)
    moved = int((start != after).sum())
    assert cost(start, traffic, devices, weights) - cost(after, traffic, devices, weights) >= price * moved - 1e-6
    sizes = [np.bincount(row, minlength=devices).tolist() for row in start]
    assert [np.bincount(row, minlength=devices).tolist() for row in after] == sizes
    assert (relocate(after, traffic, devices, weights, price) == after).all()


def test_the_oracle_is_the_best_of_all_placements_and_exchanges_come_near_it() -> None:
    weights, gaps = RelocationPrices(), []
    halves = [np.array(each) for each in sorted(set(permutations((0, 0, 1, 1))))]
    for seed in range(2):
        traffic = counted(seed)
        every = [np.stack([a, b, c]) for a in halves for b in halves for c in halves]
        best = min(cost(home, traffic, 2, weights) for home in every)
        found = optimum(traffic, 2, weights)
        assert found is not None
        assert found.proved
        assert cost(found.home, traffic, 2, weights) == pytest.approx(best)
        ours = relocate(anchored(traffic, 2, 0, 0.5), traffic, 2, weights)
        gaps.append(cost(ours, traffic, 2, weights) / best - 1)
        columns = optimum(traffic, 2, weights, per_layer=False)
        assert columns is not None
        assert cost(columns.home, traffic, 2, weights) == pytest.approx(
            min(cost(np.tile(half, (3, 1)), traffic, 2, weights) for half in halves)
        )
    assert max(gaps) < 0.1


def test_the_published_form_puts_the_strongest_pair_on_the_anchor_and_the_rest_by_load() -> None:
    chosen = np.array([[9.0, 1, 5, 4, 3, 2]] * 2)
    passed = np.zeros((1, 6, 6))
    passed[0, 1, 5] = 7.0
    passed[0, 1, 0] = 3.0
    passed[0, 3, 4] = 2.0
    home = published(ExpertTraffic(chosen, passed), devices=2, anchor=1, pairs=1)
    assert home.tolist() == [[0, 1, 1, 0, 0, 1]] * 2, "2 joins the anchor, which has less; then that is full"
    both = published(ExpertTraffic(chosen, passed), devices=2, anchor=1, pairs=2)
    assert both.tolist() == [[1, 1, 0, 0, 0, 1]] * 2
    assert (published(ExpertTraffic(chosen, passed), 2, 1, pairs=3) == both).all(), "the third finds no room for two"


def test_costs_equal_their_formulas() -> None:
    traffic = ExpertTraffic(np.array([[4.0, 2], [3, 3]]), np.array([[[1.0, 2], [3, 4]]]))
    home = np.array([[0, 1], [1, 0]])
    assert loads(home, traffic.chosen, 2).tolist() == [[4, 2], [3, 3]]
    assert uneven(home, traffic, 2) == 1.0
    assert cut(home, traffic) == 5.0
    assert cost(home, traffic, 2, RelocationPrices(uneven=2.0, cut=0.5)) == 4.5
