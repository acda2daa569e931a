"""A node's wait for experts agrees with counting by hand."""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.problem import Placement
from tools.research.placement.call_latency import LayerCosts, latency


def test_a_layer_takes_as_long_as_its_slowest_expert() -> None:
    homes = np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]], [[0, 0, 0, 1]]], bool)  # 3 nodes, 1 layer, 4 experts
    placement = Placement(homes, np.where(homes, 0, -1).astype(np.int8), np.zeros_like(homes))
    far = np.array([[0.0, 10, 20], [10, 0, 20], [20, 20, 0]])
    costs = LayerCosts(far, np.ones((3, 3)), np.array([1.0, 2, 3]), np.zeros(3))
    np.fill_diagonal(costs.call_token_s, 0)
    both = np.array([[[0, 2]], [[1, 2]]], np.int16)  # expert 2 for two tokens, at node 1: 10 + 2 * 1 + 2
    assert latency(placement, 0, [both], costs) == 14
    assert latency(placement, 0, [both, both[:1, :, :1]], costs) == 14 + 1
    assert latency(placement, 1, [np.array([[[1, 3]]], np.int16)], costs) == 20 + 1 + 3
