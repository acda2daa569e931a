"""A lower bound on the rendezvous of any placement, from the layers that any memory could serve whole.

A call reaches at least one peer, so rendezvous are at least the layers not served whole. Slots get a price. For each
layer the best experts at a price are a minimum cut; their gain plus the slots' price is a bound, minimised over prices.
The rule that all experts must be kept is ignored, so the bound is loose for small memories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from edgemoe.policy.placement.route_score import Routes

UNITS = 100  # of a price or a token, for cuts are of integers


def least_rendezvous(routes: Sequence[Routes], experts: int, slots: Sequence[int]) -> float:
    """Returns the least mean rendezvous over all nodes' tokens [T, L, k] and layers."""
    cells = [each.shape[0] * each.shape[1] for each in routes]
    served = [most_whole(each, experts, room) for each, room in zip(routes, slots, strict=True)]
    return 1 - sum(served) / sum(cells)


def most_whole(routes: Routes, experts: int, slots: int) -> float:
    """Returns an upper bound on the layers of tokens, routes [T, L, k], that `slots` experts serve whole."""
    layers = [
        np.unique(np.sort(routes[:, layer], axis=1), axis=0, return_counts=True) for layer in range(routes.shape[1])
    ]
    cells = routes.shape[0] * routes.shape[1]

    def bound(price: float) -> float:
        units = round(price * UNITS)
        earned = sum(_earned(sets, count, experts, units) for sets, count in layers)
        return (earned + units * slots) / UNITS

    highest = float(routes.shape[0] * routes.shape[2])
    found = minimize_scalar(bound, bounds=(0.0, highest), method="bounded", options={"xatol": highest / 1000})
    return min(float(found.fun), cells)


def _earned(sets: Routes, count: npt.NDArray[np.int64], experts: int, price: int) -> int:
    """Returns the gain of the best experts beyond their price: `count` [n] for each contained set [n, k]."""
    number, chosen = sets.shape
    source, sink = number + experts, number + experts + 1
    tails = np.concatenate([np.full(number, source), np.repeat(np.arange(number), chosen), number + np.arange(experts)])
    heads = np.concatenate([np.arange(number), number + sets.ravel(), np.full(experts, sink)])
    without_end = np.full(number * chosen, np.iinfo(np.int32).max // 2)
    room = np.concatenate([count * UNITS, without_end, np.full(experts, price)])
    graph = csr_array((room.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    return int(count.sum()) * UNITS - int(maximum_flow(graph, source, sink).flow_value)
