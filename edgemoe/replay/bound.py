"""Belady's optimum, and its bound by bytes for experts of several sizes. Imports numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from edgemoe.replay.trace import ReplayCounts
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry


class Belady:
    """Ranks experts by their next use: the optimum for equal sizes without bypass [Belady]. Knows the future."""

    def __init__(self, layers: int, experts: int, next_use: IntArray, offsets: IntArray) -> None:
        """Takes the step of each demand's next use [N], in trace order, and the first demand of each step [steps + 1].

        The step of an expert that is not used again lies beyond the end.
        """
        self._next_use, self._offsets = next_use, offsets
        self._step = 0
        self._next = np.full((layers, experts), np.iinfo(np.int64).max >> 1, dtype=np.int64)  # [L, E]

    def touch(self, layer: int, experts: IntArray) -> None:
        start, end = self._offsets[self._step], self._offsets[self._step + 1]
        self._next[layer, experts] = self._next_use[start:end]
        self._step += 1

    def rank(self, layer: int) -> FloatArray:
        return (self._step - self._next).astype(np.float32)


class ByteBelady:
    """Misses the fewest bytes: keeps each byte of an expert or not, and evicts the bytes that are needed last.

    Bytes are of one size, so Belady's rule is optimal for them [Belady]. A cache of whole experts misses no fewer
    bytes. It is the linear relaxation of the problem [FOO] where a miss costs its bytes; for equal sizes it is Belady's
    optimum.
    """

    def __init__(self, geometry: ExpertGeometry, capacity_bytes: int, link_bytes_per_s: float = np.inf) -> None:
        """Takes the experts' geometry, the capacity, and the rate of the link from RAM, which holds all experts."""
        self._link_bytes_per_s, self._mean_bytes = link_bytes_per_s, geometry.all_bytes / geometry.count
        self.capacity_bytes = capacity_bytes
        self._misses = self._missed_bytes = 0  # experts of which something was missing; their bytes
        self._experts = geometry.experts
        self._sizes: IntArray = np.repeat(geometry.strides_bytes, geometry.experts)  # [L * E]
        self._held = np.zeros_like(self._sizes)  # bytes
        self._pinned: IntArray = np.full(len(self._sizes), -1, np.int64)
        self._clock, self._used = 0, 0

    def run(self, layer: int, experts: IntArray, rank: npt.NDArray[np.float32]) -> None:
        """Serves one layer-step's demand for distinct experts [n], given the ranks [L, E]."""
        keys = layer * self._experts + experts
        self._misses += int(np.count_nonzero(self._held[keys] < self._sizes[keys]))
        self._clock += 1
        missed_bytes, self._used = _demand(
            self._held, self._sizes, self._pinned, self._clock, keys, rank.ravel(), self.capacity_bytes, self._used
        )
        self._missed_bytes += missed_bytes

    @property
    def resident(self) -> BoolArray:
        """Returns which experts are kept, or a part of them, [L, E]."""
        return (self._held > 0).reshape(-1, self._experts)

    @property
    def counts(self) -> ReplayCounts:
        size_bytes = self._missed_bytes
        return ReplayCounts(
            misses=self._misses,
            missed_bytes=size_bytes,
            stall_s=size_bytes / self._link_bytes_per_s,
            to_vram_bytes=size_bytes,
            moves=size_bytes / self._mean_bytes,
        )


@njit(nogil=True)
def _demand(
    held: IntArray,
    sizes: IntArray,
    pinned: IntArray,
    clock: int,
    demanded: IntArray,
    rank: npt.NDArray[np.float32],
    capacity: int,
    used: int,
) -> tuple[int, int]:
    """Makes all bytes of `demanded` resident in place of the lowest ranked; bytes without room pass through.

    Returns the missed bytes and the used capacity.
    """
    missed = 0
    for i in range(len(demanded)):
        pinned[demanded[i]] = clock
    for i in range(len(demanded)):
        key = demanded[i]
        lacking = sizes[key] - held[key]
        missed += lacking
        while used + lacking > capacity:
            victim, lowest = -1, np.inf
            for x in range(len(held)):
                if held[x] > 0 and pinned[x] != clock and rank[x] < lowest:
                    victim, lowest = x, rank[x]
            if victim < 0:
                break
            gone = min(held[victim], used + lacking - capacity)
            held[victim] -= gone
            used -= gone
        came = min(lacking, capacity - used)
        held[key] += came
        used += came
    return missed, used
