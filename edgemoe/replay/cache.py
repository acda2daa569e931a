"""One tier under demand fetching, event-atomic: an expert that a layer-step needs is not evicted within it.

Imports numba, so it is imported when a replay runs, not before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray


class Cache:
    """Which of the L * E experts are resident, and what it cost. All are of one size; see `sized_cache` for others."""

    def __init__(self, layers: int, experts: int, capacity: int) -> None:
        self.experts, self.capacity = experts, capacity
        self.resident: BoolArray = np.zeros(layers * experts, np.bool_)
        self.misses = 0
        self._pinned: IntArray = np.full(layers * experts, -1, np.int64)
        self._clock, self._used = 0, 0

    def missing(self, layer: int, experts: IntArray) -> IntArray:
        """Those of the experts [n] that are not resident."""
        return experts[~self.resident[layer * self.experts + experts]]

    def run(self, layer: int, experts: IntArray, rank: FloatArray) -> int:
        """One layer-step that demands distinct experts [n]; how many were missing. `rank` [L, E]."""
        self._clock += 1
        missed, self._used = _demand(
            self.resident,
            self._pinned,
            self._clock,
            layer * self.experts + experts,
            rank.ravel(),
            self.capacity,
            self._used,
        )
        self.misses += missed
        return int(missed)


@njit(nogil=True)
def _demand(
    resident: BoolArray,
    pinned: IntArray,
    clock: int,
    demanded: IntArray,
    rank: npt.NDArray[np.float32],
    capacity: int,
    used: int,
) -> tuple[int, int]:
    """Makes `demanded` resident in place of what ranks lowest; what finds no room passes through."""
    missed = 0
    for i in range(len(demanded)):
        pinned[demanded[i]] = clock
    for i in range(len(demanded)):
        if resident[demanded[i]]:
            continue
        missed += 1
        if used < capacity:
            used += 1
        else:
            victim, lowest = -1, np.inf
            for x in range(len(resident)):
                if resident[x] and pinned[x] != clock and rank[x] < lowest:
                    victim, lowest = x, rank[x]
            if victim < 0:
                continue
            resident[victim] = False
        resident[demanded[i]] = True
    return missed, used
