"""What policies share: bringing in the experts that nobody keeps, and giving away the room that is left."""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.problem import PlacementProblem
from edgemoe.types.arrays import BoolArray


def cover(problem: PlacementProblem, homes: BoolArray, must: BoolArray) -> None:
    """Gives a home to each expert that must [L, E] have one, where it costs least. `homes` [N, L, E] is changed.

    It takes free room, or the place of the expert least asked for there that others keep, too, or that need not be
    kept.
    """
    nodes = len(homes)
    value = problem.expected.reshape(nodes, -1)
    kept, needed = homes.reshape(nodes, -1), must.ravel()
    free = problem.room - kept.sum(axis=1)
    lost = np.flatnonzero(needed & ~kept.any(axis=0))
    for expert in lost[np.argsort(-value[:, lost].sum(axis=0), kind="stable")]:
        spare = np.where(kept & ((kept.sum(axis=0) > 1) | ~needed), value, np.inf)  # [N, M]
        price = np.where(free > 0, 0.0, spare.min(axis=1)) - value[:, expert]
        node = int(np.argmin(price))
        if free[node] > 0:
            free[node] -= 1
        else:
            kept[node, int(np.argmin(spare[node]))] = False
        kept[node, expert] = True
    homes[:] = kept.reshape(homes.shape)


def fill(problem: PlacementProblem, homes: BoolArray) -> None:
    """Gives each node's free room to what its requests ask for most. `homes` [N, L, E] is changed."""
    value = problem.expected
    for node, room in enumerate(problem.room):
        free = int(room) - int(homes[node].sum())
        if free > 0:
            wanted = np.where(homes[node], -np.inf, value[node])
            best = np.argsort(-wanted, axis=None, kind="stable")[:free]
            homes[node].ravel()[best] = True
