"""The fewest peers that together have some experts, compiled. Imports Numba.

Where each expert's homes are a mask of nodes, that is the smallest set of nodes that hits all masks. Single homes are
forced; what they leave is searched, the mask with fewest nodes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.policy.placement.compiled import entry, inner

Masks = npt.NDArray[np.uint64]  # a bit for each node
ONE, NONE = np.uint64(1), np.uint64(0)
MOST_NODES = 64


@inner
def bits(mask: np.uint64) -> int:
    count = 0
    while mask != NONE:
        mask &= mask - ONE
        count += 1
    return count


@inner
def lowest(mask: np.uint64) -> int:
    place = 0
    while mask & ONE == NONE:
        mask >>= ONE
        place += 1
    return place


@inner
def _leave(scratch: Masks, depth: int | np.int64, count: int | np.int64, node: np.uint64) -> np.int64:
    """Writes the masks of scratch[depth] that `node` does not hit to the next row. Returns how many."""
    kept = np.int64(0)
    for i in range(count):
        if scratch[depth, i] & node == NONE:
            scratch[depth + 1, kept] = scratch[depth, i]
            kept += 1
    return kept


@inner
def _coverable(scratch: Masks, depth: int | np.int64, count: int | np.int64, nodes: int) -> bool:
    """Whether so many nodes hit all `count` masks of scratch[depth]."""
    row = scratch[depth]
    if count == 0:
        return True
    if nodes == 0:
        return False
    common, shortest = row[0], row[0]
    for i in range(1, count):
        common &= row[i]
        if bits(row[i]) < bits(shortest):
            shortest = row[i]
    if common != NONE:
        return True
    if nodes == 1:
        return False
    left = shortest
    while left != NONE:
        node = left & (~left + ONE)
        left ^= node
        if _coverable(scratch, depth + 1, _leave(scratch, depth, count, node), nodes - 1):
            return True
    return False


@entry
def fewest(masks: Masks, count: int, scratch: Masks) -> tuple[int, np.uint64]:
    """How few nodes hit all masks, and the nodes that are in some such set."""
    forced = NONE
    for i in range(count):
        if masks[i] & (masks[i] - ONE) == NONE:
            forced |= masks[i]
    kept = 0
    common, union = ~NONE, NONE
    for i in range(count):
        if masks[i] & forced == NONE:
            scratch[0, kept] = masks[i]
            common &= masks[i]
            union |= masks[i]
            kept += 1
    least = bits(forced)
    if kept == 0:
        return least, forced
    if common != NONE:
        return least + 1, forced | common
    if kept == 2:
        return least + 2, forced | union
    nodes = 2
    while True:
        within = NONE
        left = union
        while left != NONE:
            node = left & (~left + ONE)
            left ^= node
            if _coverable(scratch, np.int64(1), _leave(scratch, np.int64(0), kept, node), nodes - 1):
                within |= node
        if within != NONE:
            return least + nodes, forced | within
        nodes += 1
