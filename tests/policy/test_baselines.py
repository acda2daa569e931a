"""The classical policies rank as their names say."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.policy.baselines import FIFO, LFRU, LFU, LRU, Random
from edgemoe.policy.ewma import EWMA, PublishedPolicy
from edgemoe.policy.reuse import distance, weight


def touch(policy: LRU | LFU | LFRU, *steps: tuple[int, list[int]]) -> None:
    for layer, experts in steps:
        policy.touch(layer, np.array(experts))


def test_lru_ranks_by_last_use() -> None:
    policy = LRU(2, 3)
    touch(policy, (0, [0, 1]), (1, [2]), (0, [1]))
    rank = policy.rank(0)
    assert rank[0, 1] > rank[1, 2] > rank[0, 0] > rank[0, 2]


def test_lfu_ranks_by_count_and_then_by_last_use() -> None:
    policy = LFU(1, 4)
    touch(policy, (0, [0, 1]), (0, [0]), (0, [2]))
    rank = policy.rank(0)[0]
    assert rank[0] > rank[2] > rank[1] > rank[3]


def test_lfru_ranks_by_frequency_over_age() -> None:
    policy = LFRU(1, 3)
    touch(policy, *[(0, [0])] * 4, (0, [1]), (0, [2]))
    assert policy.rank(0)[0].tolist() == pytest.approx([4 / 3, 1 / 2, 1.0])


def test_fifo_ranks_by_load_whatever_is_used_since() -> None:
    policy = FIFO(1, 3)
    for expert in (2, 0, 1):
        policy.touch(0, np.array([expert]))
        policy.loaded(0, np.array([expert]))
    policy.touch(0, np.array([2]))
    assert policy.rank(0)[0].argsort().tolist() == [2, 0, 1]


def test_random_is_the_same_for_the_same_seed() -> None:
    assert np.array_equal(Random(2, 8, 1).rank(0), Random(2, 8, 1).rank(0))


def test_a_layer_that_has_run_is_the_farthest() -> None:
    assert distance(1, 4).tolist() == [3, 4, 1, 2]
    assert distance(1, 4, published=True).tolist() == [3, 0, 1, 2]
    assert weight(1, 4, 0.5).tolist() == pytest.approx(np.exp([-1.5, -2, -0.5, -1]).tolist())


def test_an_ewma_moves_on_its_layers_own_clock() -> None:
    policy = EWMA(2, 4, 1, alpha=0.5)
    policy.touch(0, np.array([1]))
    assert policy.p[0].tolist() == pytest.approx([0.125, 0.625, 0.125, 0.125])
    assert policy.p[1].tolist() == [0.25] * 4
    policy.touch(0, np.array([2]))
    assert policy.p[0, 1] == pytest.approx(0.3125)


def test_the_paper_prefers_the_running_layer_and_the_correction_the_next_one() -> None:
    assert PublishedPolicy(3, 2, 1).rank(1).argmax() // 2 == 1
    assert EWMA(3, 2, 1).rank(1).argmax() // 2 == 2
