"""LRU ranks by last use; averages move on their layers' own clocks."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.policy.cache_ranks import EWMA, LRU


def test_lru_ranks_by_last_use() -> None:
    policy = LRU(2, 3)
    for layer, experts in ((0, [0, 1]), (1, [2]), (0, [1])):
        policy.touch(layer, np.array(experts))
    rank = policy.rank(0)
    assert rank[0, 1] > rank[1, 2] > rank[0, 0] > rank[0, 2]


def test_the_running_layer_is_the_nearest_and_the_one_before_it_the_farthest() -> None:
    assert EWMA.reuse_weights(1, 4, 0.5).tolist() == pytest.approx(np.exp([-1.5, 0, -0.5, -1]).tolist())
    assert EWMA(3, 2, 1).rank(1).argmax() // 2 == 1


def test_an_ewma_moves_on_its_layers_own_clock() -> None:
    policy = EWMA(2, 4, 1, alpha=0.5)
    policy.touch(0, np.array([1]))
    assert policy.p[0].tolist() == pytest.approx([0.125, 0.625, 0.125, 0.125])
    assert policy.p[1].tolist() == [0.25] * 4
    policy.touch(0, np.array([2]))
    assert policy.p[0, 1] == pytest.approx(0.3125)
