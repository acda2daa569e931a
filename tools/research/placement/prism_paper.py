"""Prism's Algorithms 1 and 2 to the letter, for comparison [Prism, III-C].

Both may loop for ever. Algorithm 1 does if rounding has left fewer slots than experts, or a layer borrows from itself.
Algorithm 2 does if nodes replace the same duplicate in one round. A repeated state shows it; `prism` continues there.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.prism import assign, entropy, layer_counts
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, disk_homes, placed, required
from edgemoe.types.arrays import BoolArray, IntArray


def published(problem: PlacementProblem) -> Placement:
    """Returns the source's placement, or `prism`'s continuation of it if the source does not terminate."""
    disk = disk_homes(problem)
    must = required(problem, disk)
    counts, endless = published_counts(problem)
    if endless or (np.minimum(counts, must.shape[1]).sum(axis=0) < must.sum(axis=1)).any():
        counts = layer_counts(problem, must)
    homes = np.zeros_like(disk)
    for layer in range(disk.shape[1]):
        kept, endless = published_assign(problem.activations[:, layer], counts[:, layer], must[layer])
        homes[:, layer] = assign(problem.expected[:, layer], counts[:, layer], must[layer]) if endless else kept
    return placed(problem, homes, disk)


def published_counts(problem: PlacementProblem) -> tuple[IntArray, bool]:
    """Returns Algorithm 1's counts [N, L], and whether it would not have terminated."""
    memory = np.array([sum(devices) for devices in problem.slots])
    spread = entropy(problem.activations)
    whole = np.maximum(spread.sum(axis=1, keepdims=True), 1e-300)
    counts = np.floor(memory[:, None] * spread / whole).astype(np.int64)
    total, experts = counts.sum(axis=0), problem.activations.shape[2]
    for layer in range(len(total)):
        seen = set[bytes]()
        while total[layer] < experts:
            if (state := counts.tobytes()) in seen:
                return counts, True
            seen.add(state)
            for node in np.argsort(-memory, kind="stable"):
                giver = int(np.argmax(total))
                if counts[node, giver] > 0:
                    counts[node, giver] -= 1
                    counts[node, layer] += 1
                    total[giver] -= 1
                    total[layer] += 1
                    if total[layer] == experts:
                        break
    return counts, False


def published_assign(activations: Values, counts: IntArray, must: BoolArray) -> tuple[BoolArray, bool]:
    """Returns Algorithm 2's homes [N, E] of one layer, and whether it would not have terminated."""
    homes = np.zeros(activations.shape, np.bool_)
    order = np.argsort(-activations, axis=1, kind="stable")
    for node, count in enumerate(counts):
        homes[node, order[node, :count]] = True
    seen = set[bytes]()
    while (lost := must & ~homes.any(axis=0)).any():
        if (state := homes.tobytes()) in seen:
            return homes, True
        seen.add(state)
        twice = homes.sum(axis=0) > 1
        for node in np.argsort((homes & twice).sum(axis=1), kind="stable"):
            expert = int(np.argmax(np.where(lost, activations[node], -np.inf)))
            duplicates = homes[node] & twice
            if not homes[node, expert] and duplicates.any():
                homes[node, int(np.argmin(np.where(duplicates, activations[node], np.inf)))] = False
                homes[node, expert] = True
    return homes, False
