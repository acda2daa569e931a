"""Spreads every expert once, evenly over layers and boxes in proportion to their memory, then again [Prism, IV-A].

Experts stay where a box has them, on disk or in memory, so that no expert is copied without need. An expert that is on
no disk stays with a box that has it in memory. Activations matter only to the order of further copies.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.problem import Placement, PlacementProblem, disk_homes, placed, required
from edgemoe.types.arrays import BoolArray, IntArray


def uniform(problem: PlacementProblem, replicas: int = 1) -> Placement:
    """Places every expert at least once, and up to `replicas` times on different nodes as far as memory goes.

    Raises PlacementInfeasible if memory is too small for one copy of each, or an expert is nowhere.
    """
    disk = disk_homes(problem)
    homes = np.zeros_like(disk)
    left = problem.room
    for copy in range(max(1, min(replicas, len(left)))):
        _deal(problem, homes, left, copy, required(problem, disk) if copy == 0 else problem.experts)
    return placed(problem, homes, disk)


def _deal(problem: PlacementProblem, homes: BoolArray, left: IntArray, copy: int, which: BoolArray) -> None:
    """Deals one more copy of each expert of `which` [L, E], as far as there is room; further copies hottest first.

    A copy goes to the emptiest box that is not yet its home, preferably one that has it. Emptiness counts within the
    layer first, so that each layer is spread as memory is. The first copy of an expert that is on no disk stays in its
    place if there is room. Changes `homes` [N, L, E] and `left` [N].
    """
    nodes, layers, _ = homes.shape
    has = problem.held
    bound = has & ~problem.disks.any(axis=0)
    share = problem.room / max(1, problem.room.sum())
    given = np.zeros((layers, nodes), np.int64)
    for layer, expert in _turns(problem, copy):
        if not which[layer, expert]:
            continue
        can = (left > 0) & ~homes[:, layer, expert]
        if not copy and (can & bound[:, layer, expert]).any():
            can &= bound[:, layer, expert]
        if not can.any():
            if copy:
                continue
            raise AssertionError("room was counted wrong")
        due = (given[layer] + 1) / np.maximum(share, 1e-12)  # lowest: furthest behind its share of this layer
        cost = np.where(can, due + np.where(has[:, layer, expert], 0.0, 0.5 * nodes), np.inf)
        node = int(np.lexsort((-left, cost))[0])
        homes[node, layer, expert] = True
        given[layer, node] += 1
        left[node] -= 1


def _turns(problem: PlacementProblem, copy: int) -> list[tuple[int, int]]:
    """Returns in which order experts get one more copy: the first layer by layer, further ones hottest first."""
    _, layers, experts = problem.activations.shape
    steps = [(step + copy * (experts // 2 + 1)) % experts if copy else step for step in range(experts)]
    turns = [(layer, expert) for layer in range(layers) for expert in steps]
    if not copy:
        return turns
    asked = problem.activations.sum(axis=0)
    return sorted(turns, key=lambda turn: -float(asked[turn]))
