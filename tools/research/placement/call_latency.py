"""Estimates how long a node's tokens wait for experts [Prism, Eq. 1]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.policy.placement.problem import Placement, Values
from edgemoe.policy.placement.route_score import Routes


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """Costs of calls and of computing: seconds per call or batch, and seconds per token in it."""

    call_s: Values  # [N, N] from node to node; 0 to itself
    call_token_s: Values  # [N, N]
    compute_s: Values  # [N] one expert
    compute_token_s: Values  # [N]


def latency(placement: Placement, node: int, batches: Sequence[Routes], costs: LayerCosts) -> float:
    """Returns the seconds that a node's batches, routes [T, L, k] each, spend on experts [Prism, Eq. 1].

    A layer takes as long as its slowest expert: the call and the computing, where that is soonest.
    """
    has = placement.homes | placement.disk
    total = 0.0
    for routes in batches:
        for layer in range(routes.shape[1]):
            experts, tokens = np.unique(routes[:, layer], return_counts=True)
            fixed = costs.call_s[node] + costs.compute_s  # [N]
            token = costs.call_token_s[node] + costs.compute_token_s
            each = np.where(has[:, layer, experts], fixed[:, None] + token[:, None] * tokens, np.inf)  # [N, n]
            total += float(each.min(axis=0).max())
    return total
