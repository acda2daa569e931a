"""Computes the placement with the fewest remote calls exactly. Imports Numba: not for the front process.

[Prism, Eq. 2] with experts of one size is a transportation problem with an integral optimum. Each node first keeps its
most chosen experts. Then the cheapest chain of moves between nodes brings in each expert without a home, and ends by
dropping a replica (successive shortest paths).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.policy.placement.compiled import entry, inner
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, disk_homes, placed, required
from edgemoe.types.arrays import BoolArray, IntArray

ROUNDING = 1e-13  # of weights up to 1
TIE = 1e-9  # weight of all nodes' demand for an expert in one node's choice


class PlacementChains(NamedTuple):
    """The state of `_cover`, for the M experts of all layers."""

    weight: Values  # [M, N]
    must: BoolArray  # [M] experts that need a home
    homes: BoolArray  # [M, N]
    kept: npt.NDArray[np.int32]  # [N, slots] each node's experts, -1 in an empty slot
    place: npt.NDArray[np.int32]  # [M, N] the expert's slot in `kept`
    copies: IntArray  # [M]
    edge: Values  # [N, N] the least cost of moving an expert
    edge_expert: IntArray
    end: Values  # [N] the least cost of dropping one
    end_expert: IntArray


@inner
def _best_edge(chains: PlacementChains, n: int, m: int) -> None:
    least, found = np.inf, -1
    for expert in chains.kept[n]:
        if expert >= 0 and not chains.homes[expert, m]:
            cost = chains.weight[expert, n] - chains.weight[expert, m]
            if cost < least:
                least, found = cost, expert
    chains.edge[n, m], chains.edge_expert[n, m] = least, found


@inner
def _best_end(chains: PlacementChains, n: int) -> None:
    least, found = np.inf, -1
    for expert in chains.kept[n]:
        if expert >= 0 and (chains.copies[expert] > 1 or not chains.must[expert]) and chains.weight[expert, n] < least:
            least, found = chains.weight[expert, n], expert
    chains.end[n], chains.end_expert[n] = least, found


@inner
def _replace(chains: PlacementChains, n: int, out: int, into: int) -> None:
    """Gives node n one expert for another, and keeps the edges to n true."""
    slot = chains.place[out, n]
    chains.homes[out, n], chains.homes[into, n] = False, True
    chains.kept[n, slot], chains.place[into, n] = into, slot
    chains.copies[out] -= 1
    chains.copies[into] += 1
    for other in range(len(chains.end)):
        if other != n:
            if chains.edge_expert[other, n] == into:
                _best_edge(chains, other, n)
            if chains.homes[out, other]:
                cost = chains.weight[out, other] - chains.weight[out, n]
                if cost < chains.edge[other, n]:
                    chains.edge[other, n], chains.edge_expert[other, n] = cost, out


@inner
def _cover(chains: PlacementChains, expert: int, dist: Values, before: IntArray) -> None:
    """Brings one expert in along the cheapest chain."""
    nodes = len(dist)
    for n in range(nodes):
        dist[n], before[n] = -chains.weight[expert, n], -1
    for _ in range(nodes):
        changed = False
        for n in range(nodes):
            for m in range(nodes):
                cost = dist[n] + chains.edge[n, m]
                if n != m and cost < dist[m] - ROUNDING:
                    dist[m], before[m], changed = cost, n, True
        if not changed:
            break
    node = 0
    for n in range(nodes):
        if dist[n] + chains.end[n] < dist[node] + chains.end[node]:
            node = n
    out = chains.end_expert[node]
    touched = np.zeros(nodes, np.bool_)
    dropped = out
    while True:
        touched[node] = True
        giver = before[node]
        into = expert if giver < 0 else chains.edge_expert[giver, node]
        _replace(chains, node, out, into)
        if giver < 0:
            break
        node, out = giver, into
    for n in range(nodes):
        if touched[n]:
            for m in range(nodes):
                if m != n:
                    _best_edge(chains, n, m)
        if touched[n] or chains.homes[dropped, n]:
            _best_end(chains, n)


@entry
def solve(chains: PlacementChains) -> None:
    """Changes `homes`, each node's best, until every expert that must be kept is."""
    nodes = len(chains.end)
    for n in range(nodes):
        for m in range(nodes):
            if m != n:
                _best_edge(chains, n, m)
        _best_end(chains, n)
    dist, before = np.empty(nodes), np.empty(nodes, np.int64)
    for expert in range(len(chains.must)):
        if chains.must[expert] and chains.copies[expert] == 0:
            _cover(chains, expert, dist, before)


def exact(problem: PlacementProblem) -> Placement:
    """Returns the placement with the fewest remote calls. Raises PlacementInfeasible."""
    disk = disk_homes(problem)
    activations = problem.activations.reshape(len(disk), -1).T  # [M, N]
    by_all = activations.sum(axis=1, keepdims=True)
    weight = activations / max(activations.max(), 1e-300) + TIE * by_all / max(by_all.max(), 1e-300)
    homes = np.zeros(weight.shape, np.bool_)
    kept, place = np.full((len(disk), int(problem.room.max())), -1, np.int32), np.zeros(weight.shape, np.int32)
    for node, room in enumerate(problem.room):
        best = np.argsort(-weight[:, node], kind="stable")[:room]
        homes[best, node] = True
        kept[node, :room] = best
        place[best, node] = np.arange(room)
    nodes = len(disk)
    solve(
        PlacementChains(
            weight,
            required(problem, disk).ravel(),
            homes,
            kept,
            place,
            homes.sum(axis=1),
            np.full((nodes, nodes), np.inf),
            np.full((nodes, nodes), -1, np.int64),
            np.full(nodes, np.inf),
            np.full(nodes, -1, np.int64),
        )
    )
    return placed(problem, homes.T.reshape(disk.shape).copy(), disk)
