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


def protect(problem: PlacementProblem, homes: BoolArray, replicas: int) -> None:
    """Has so many nodes hold each expert, in memory or on disk, as far as there is room. `homes` [N, L, E] is changed.

    Further copies go where they cost least, what is asked for most first: into free room, or in place of the expert
    least asked for there that enough others hold and another has in memory.
    """
    nodes = len(homes)
    wanted = min(replicas, nodes)
    value = problem.expected.reshape(nodes, -1)
    kept, disks = homes.reshape(nodes, -1), problem.disks.reshape(nodes, -1)
    holders, copies = (kept | disks).sum(axis=0), kept.sum(axis=0)
    free = problem.room - kept.sum(axis=1)
    order = [each[np.argsort(value[node, each], kind="stable")] for node, each in enumerate(map(np.flatnonzero, kept))]
    place = np.zeros(nodes, np.int64)  # in `order`: what comes before is not given up

    def spare(node: int) -> int:
        """The expert that the node gives up first; -1 where there is none."""
        while place[node] < len(order[node]):
            expert = int(order[node][place[node]])
            if copies[expert] > 1 and (disks[node, expert] or holders[expert] > wanted):
                return expert
            place[node] += 1
        return -1

    short = np.flatnonzero(problem.experts.ravel() & (holders < wanted))
    for expert in short[np.argsort(-value[:, short].sum(axis=0), kind="stable")]:
        for _ in range(wanted - int(holders[expert])):
            prices = {
                node: (0.0 if free[node] > 0 else float(value[node, out])) - float(value[node, expert])
                for node in range(nodes)
                if not (kept[node, expert] or disks[node, expert]) and (free[node] > 0 or (out := spare(node)) >= 0)
            }
            if not prices:
                break
            node = min(prices, key=lambda each: prices[each])
            if free[node] > 0:
                free[node] -= 1
            else:
                out = spare(node)
                kept[node, out] = False
                place[node] += 1  # it is not there to be given up again
                copies[out] -= 1
                holders[out] -= not disks[node, out]
            kept[node, expert] = True
            copies[expert] += 1
            holders[expert] += 1
