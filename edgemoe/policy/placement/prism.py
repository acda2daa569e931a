"""Implements Prism's placement: how many experts of each layer a node keeps, then which [Prism, III-C].

It corrects the source: see docs/design/placement.md. `prism_published` follows the source exactly.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, disk_homes, fill, placed, required
from edgemoe.types.arrays import BoolArray, IntArray


def prism(problem: PlacementProblem) -> Placement:
    """Returns Prism's placement. Raises PlacementInfeasible."""
    disk = disk_homes(problem)
    must = required(problem, disk)
    counts = layer_counts(problem, must)
    homes = np.zeros_like(disk)
    for layer in range(disk.shape[1]):
        homes[:, layer] = assign(problem.expected[:, layer], counts[:, layer], must[layer])
    fill(problem, homes)
    return placed(problem, homes, disk)


def entropy(activations: Values) -> Values:
    """Returns the Shannon entropy v [N, L] of a layer's choices, in bits [Prism, III-C1]; 0 without choices."""
    share = activations / np.maximum(activations.sum(axis=2, keepdims=True), 1e-300)
    bits: Values = -np.where(share > 0, share * np.log2(np.maximum(share, 1e-300)), 0.0).sum(axis=2)
    return bits


def layer_counts(problem: PlacementProblem, must: BoolArray) -> IntArray:
    """Returns how many experts of each layer each node keeps, [N, L] [Prism, Algorithm 1].

    All of a node's room is used, and each layer has at least as many places as experts that must [L, E] be kept.
    """
    room, experts = problem.room, must.shape[1]
    spread = entropy(problem.expected)
    counts = np.stack([_shares(int(room[n]), spread[n], experts) for n in range(len(room))])
    need = must.sum(axis=1)
    biggest = np.argsort(-room, kind="stable")
    for layer in range(len(need)):
        while counts[:, layer].sum() < need[layer]:
            for node in biggest:
                surplus = np.where(counts[node] > 0, counts.sum(axis=0) - need, 0)
                giver = int(np.argmax(surplus))
                if surplus[giver] > 0 and counts[node, layer] < experts:
                    counts[node, giver] -= 1
                    counts[node, layer] += 1
                    if counts[:, layer].sum() == need[layer]:
                        break
    return counts


def _shares(room: int, spread: Values, experts: int) -> IntArray:
    """Divides a node's room in proportion to each layer's entropy [L], at most E each, rounding to the whole room."""
    quota = np.zeros(len(spread))
    while (left := room - quota.sum()) > 1e-6 and (open_ := quota < experts).any():
        weight = np.where(open_, spread, 0.0)
        weight = weight if weight.sum() > 0 else open_.astype(np.float64)
        quota = np.minimum(quota + left * weight / weight.sum(), experts)
    counts = np.floor(quota + 1e-9).astype(np.int64)
    remainder = np.where(counts < experts, quota - counts, -1.0)
    counts[np.argsort(-remainder, kind="stable")[: room - int(counts.sum())]] += 1
    return counts


def assign(activations: Values, counts: IntArray, must: BoolArray) -> BoolArray:
    """Assigns the experts of one layer to nodes, [N, E], given counts [N] [Prism, Algorithm 2].

    Every expert that must [E] be kept is, if the counts allow it.
    """
    homes = np.zeros(activations.shape, np.bool_)
    order = np.argsort(-activations, axis=1, kind="stable")
    for node, count in enumerate(counts):
        homes[node, order[node, :count]] = True
    while (lost := must & ~homes.any(axis=0)).any():
        spare = homes & ((homes.sum(axis=0) > 1) | ~must)
        replaced = False
        for node in np.argsort(spare.sum(axis=1), kind="stable"):
            spare_here = homes[node] & ((homes.sum(axis=0) > 1) | ~must)
            lost = must & ~homes.any(axis=0)
            if spare_here.any() and lost.any():
                homes[node, int(np.argmin(np.where(spare_here, activations[node], np.inf)))] = False
                homes[node, int(np.argmax(np.where(lost, activations[node], -np.inf)))] = True
                replaced = True
        assert replaced, "the counts leave no place for every expert"
    return homes
