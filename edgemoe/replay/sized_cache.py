"""One tier whose experts have different sizes: the engine's own residency and rebalancing, and Belady's bound by bytes.

Imports numba.
"""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from numba import njit

from edgemoe.errors import ConfigError
from edgemoe.experts.compute.rebalancing import Rebalancing
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import SlotPool
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, Tier
from edgemoe.types.size_classes import SlabLayout


def geometry_of(layer_bytes: tuple[int, ...], experts: int) -> ExpertGeometry:
    """Returns a model whose layers' experts are of these sizes [L]; all that a cache has to know of it."""
    return ExpertGeometry(len(layer_bytes), experts, 1, 1, 1, "float32", layer_bytes=layer_bytes)


class TraceRanks:
    """Ranks as the replayed policy gave them last."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.ranks: FloatArray = np.zeros(shape, np.float32)

    def touch(self, layer: int, experts: IntArray) -> None:
        pass  # the replay tells the policy itself

    def rank(self, layer: int) -> FloatArray:
        return self.ranks

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        raise AssertionError("a trace has no gates that are asked early")


class SizedCache:
    """Loads on demand, as `Cache` does, by the objects that serve."""

    def __init__(self, geometry: ExpertGeometry, capacity_bytes: int) -> None:
        """Raises ConfigError for a capacity that does not hold one expert of each size."""
        layout = SlabLayout.within(capacity_bytes, geometry)
        if layout is None:
            raise ConfigError(f"{capacity_bytes} bytes do not hold one expert of each size; replay a larger --capacity")
        self._geometry, self._ranks = geometry, TraceRanks((geometry.layers, geometry.experts))
        self.pool = SlotPool(Tier.RAM, geometry.layers, geometry.experts, layout, self._ranks)
        self.residency = Residency(self.pool)
        self._rebalancing = Rebalancing(self.residency)
        self.misses = self.missed_bytes = 0

    def missing(self, layer: int, experts: IntArray) -> IntArray:
        """Returns those of the experts [n] that are not resident."""
        return experts[self.residency.missing_from_ram(layer, experts)]

    def run(self, layer: int, experts: IntArray, rank: FloatArray) -> int:
        """Returns how many of the distinct experts [n] that a layer-step demands were missing. `rank` [L, E]."""
        self._ranks.ranks = rank
        missed = len(self.missing(layer, experts))
        self.misses += missed
        self.missed_bytes += missed * self._geometry.stride_bytes(layer)
        self.residency.begin(layer, experts)
        left = experts
        while len(left):  # what finds no room waits for its turn
            claim = self.residency.acquire(0, layer, left, SimpleQueue())
            for load in claim.loads:
                self.residency.arrive(load)
            there = claim.slots >= 0
            self.residency.done(layer, left[there])
            self.residency.release(0, claim.slots[there])
            left = left[~there]
        return missed

    def step_ended(self) -> None:
        """Moves memory between sizes, as a step's end does."""
        self._rebalancing.step_ended()


class ByteBelady:
    """Misses the fewest bytes: each byte of an expert is kept or not by itself, those that are needed last go first.

    An expert is so many bytes that are always asked for together, and bytes are of one size: so Belady's rule is
    optimal for them [Belady], and whoever keeps whole experts, and leaves those that it was asked for in its memory,
    misses no fewer. It is the linear relaxation of the problem [FOO] where a miss costs its bytes; for equal sizes it
    is Belady's optimum.
    """

    def __init__(self, geometry: ExpertGeometry, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.misses = self.missed_bytes = 0  # experts of which something was missing; their bytes
        self._experts = geometry.experts
        self._sizes: IntArray = np.repeat(geometry.strides_bytes, geometry.experts)  # [L * E]
        self._held = np.zeros_like(self._sizes)  # bytes
        self._pinned: IntArray = np.full(len(self._sizes), -1, np.int64)
        self._clock, self._used = 0, 0

    def missing(self, layer: int, experts: IntArray) -> IntArray:
        """Returns those of the experts [n] that are not resident as a whole."""
        keys = layer * self._experts + experts
        return experts[self._held[keys] < self._sizes[keys]]

    def run(self, layer: int, experts: IntArray, rank: FloatArray) -> int:
        """Returns how many of the distinct experts [n] that a layer-step demands were missing. `rank` [L, E]."""
        missed = len(self.missing(layer, experts))
        self._clock += 1
        keys = layer * self._experts + experts
        missed_bytes, self._used = _demand(
            self._held, self._sizes, self._pinned, self._clock, keys, rank.ravel(), self.capacity_bytes, self._used
        )
        self.misses += missed
        self.missed_bytes += missed_bytes
        return missed


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
    """Makes all bytes of `demanded` resident in place of what ranks lowest; what finds no room passes through."""
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
