"""Chooses the way to compute each needed expert of a layer, so that the layer finishes soonest.

    finish = max( max_c opening_c [c is used] + load of the chosen ways on c,  max_i time of way i alone )      (1)

A channel c works by itself: a GPU, the PCIe link, the CPU, the disk, each peer. See docs/design/resolving.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CostMatrix = npt.NDArray[np.float64]
EVENNESS = 1e-3  # weight of the channels' quadratic mean: tells partial assignments apart that are equally late
BEAM = 16  # partial assignments kept; in the tests' random cases already 8 find the optimum
PEERS_EACH = 3  # that are considered for an expert


@dataclass(frozen=True, slots=True)
class WayCosts:
    """The costs of each way, of n experts, w ways and c channels, in seconds.

    `load` [n, w, c]: time for which expert i, done way j, keeps channel c busy; inf where that way is impossible.
    `alone` [n, w]: how long it takes from now if nothing else is done.
    `opening` [c]: paid once by a layer that uses the channel at all: a launch, a round trip.
    `busy` [c]: time for which each channel is busy anyway.
    """

    load: CostMatrix
    alone: CostMatrix
    opening: CostMatrix
    busy: CostMatrix | None = None


@dataclass(frozen=True, slots=True)
class WayAssignment:
    """`way` [n] chosen for each expert, and when the layer will be finished."""

    way: npt.NDArray[np.int64]
    finish_s: float


def finish_s(ways: WayCosts, way: npt.NDArray[np.int64]) -> float:
    """Returns (1), the finish if expert i is done way `way[i]`; inf where a way is impossible."""
    rows = np.arange(len(way))
    busy = ways.load[rows, way].sum(axis=0)  # [c]
    if ways.busy is not None:
        busy = busy + ways.busy
    times = busy + np.where(busy > 0, ways.opening, 0.0)
    return float(max(times.max(initial=0.0), ways.alone[rows, way].max(initial=0.0)))


def resolve(ways: WayCosts) -> WayAssignment:
    """Returns the best assignment found. Raises ValueError with the row of an expert that has no way at all."""
    possible = np.isfinite(ways.alone) & np.isfinite(ways.load).all(axis=2)
    if not possible.any(axis=1).all():
        raise ValueError(f"no way to compute the expert in row {int(np.argmin(possible.any(axis=1)))}")
    n, _, channels = ways.load.shape
    soonest = np.where(possible, ways.alone, np.inf)
    first: npt.NDArray[np.int64] = soonest.argmin(axis=1)
    late_s = finish_s(ways, first)
    possible = soonest < late_s
    possible[np.arange(n), first] = True
    if np.count_nonzero(possible) == n:
        return WayAssignment(first, late_s)
    busy = np.zeros((1, channels)) if ways.busy is None else ways.busy[None].astype(np.float64)  # [b, c]
    waits = np.zeros(1)  # [b] the longest way alone, so far
    order = np.argsort(-soonest[np.arange(n), first], kind="stable")
    loaded: npt.NDArray[np.bool_] = np.where(possible[:, :, None], ways.load, 0.0).max(axis=1) > 0  # [n, c]
    trail: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []  # per expert: [b] came from, [b] way
    finish = waits
    for i in order.tolist():
        options = np.flatnonzero(possible[i])
        own = np.flatnonzero(loaded[i])  # [u] channels that its ways load
        more = busy[:, None, own] + ways.load[i, options][:, own]  # [b, w, u]
        times = more + ways.opening[own] * (more > 0)
        others = busy + ways.opening * (busy > 0)  # [b, c]
        others[:, own] = 0.0
        late = np.maximum(waits[:, None], ways.alone[i, options])  # [b, w]
        finish = np.maximum(np.maximum(times.max(axis=2, initial=0.0), others.max(axis=1)[:, None]), late).ravel()
        squares = np.einsum("bwu,bwu->bw", times, times) + np.einsum("bc,bc->b", others, others)[:, None]
        cost = finish + EVENNESS * np.sqrt(squares).ravel()
        _, kept = np.unique(cost, return_index=True)  # equals are each other's mirror images
        kept = kept[:BEAM]
        source, option = np.divmod(kept, len(options))
        busy, waits, finish = busy[source], late[source, option], finish[kept]
        busy[:, own] = more[source, option]
        trail.append((source, options[option]))
    best = int(np.argmin(finish))
    if finish[best] >= late_s:
        return WayAssignment(first, late_s)
    return WayAssignment(_follow(trail, order, best), float(finish[best]))


def candidates(its_s: CostMatrix, open_s: CostMatrix) -> npt.NDArray[np.int64]:
    """Returns the peers [k, n] with the soonest finish for each expert, k at most PEERS_EACH.

    `its_s` [p, n] is a peer's time for an expert, inf where it cannot. `open_s` [p] is `opening` of `WayCosts`. Each
    expert counts as load of its soonest peer, so that not all experts get the same few peers.
    """
    peers, n = its_s.shape
    most = min(peers, PEERS_EACH)
    if peers == most:
        return np.repeat(np.arange(peers)[:, None], n, axis=1)
    chosen, free_s = np.empty((most, n), np.int64), open_s.astype(np.float64)
    for i in np.argsort(-its_s.min(axis=0), kind="stable").tolist():
        done_s = free_s + its_s[:, i]
        chosen[:, i] = some = np.argpartition(done_s, most - 1)[:most]
        soonest = some[np.argmin(done_s[some])]
        if np.isfinite(done_s[soonest]):
            free_s[soonest] = done_s[soonest]
    return chosen


def _follow(
    trail: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]], order: npt.NDArray[np.int64], last: int
) -> npt.NDArray[np.int64]:
    way = np.empty(len(order), np.int64)
    for i, (source, option) in zip(order[::-1].tolist(), reversed(trail), strict=True):
        way[i], last = option[last], int(source[last])
    return way
