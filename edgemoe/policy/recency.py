"""Least recently used first: the cache policy that needs no statistics.

A policy ranks every (layer, expert) by how much it is worth keeping. Ages count layer-steps: each `touch` is one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray, IntArray

LIKELY = 0.5  # probability from which a prefetch counts as needed, where ranks are not probabilities
NEVER_USED = -(1 << 40)  # the clock of an expert that was never used


class LRU:
    """Ranks experts by their last use."""

    def __init__(self, layers: int, experts: int) -> None:
        self.clock = 0  # layer-steps so far
        self.last: npt.NDArray[np.int64] = np.full((layers, experts), NEVER_USED, dtype=np.int64)  # [L, E]

    def touch(self, layer: int, experts: IntArray) -> None:
        """Records that a layer used these experts [n]."""
        self.clock += 1
        self.last[layer, experts] = self.clock

    def age(self) -> IntArray:
        """Returns the layer-steps since each expert's last use, [L, E]; huge where it was never used."""
        return self.clock - self.last

    def rank(self, layer: int) -> FloatArray:
        """Returns the worth of each expert, [L, E]."""
        return (-self.age()).astype(np.float32)

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the probability [n] that each expert is needed, and its worth [n] for a prefetch.

        Ages cannot be compared with probabilities: a likely expert is worth any resident one, an unlikely one none.
        """
        return chance, np.where(chance >= LIKELY, np.inf, -np.inf).astype(np.float32)
