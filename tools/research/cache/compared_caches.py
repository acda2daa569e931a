"""Cache policies for comparison with the served ones, and literal variants of the sources' rules."""

from __future__ import annotations

import numpy as np

from edgemoe.policy.cache_ranks import EWMA
from edgemoe.policy.movement import Watermark
from edgemoe.types.arrays import FloatArray, IntArray


class RandomPolicy:
    """Ranks experts at random: the lower bound of all policies."""

    def __init__(self, layers: int, experts: int, seed: int = 0) -> None:
        self._shape = (layers, experts)
        self._random = np.random.default_rng(seed)

    def touch(self, layer: int, experts: IntArray) -> None:
        pass

    def rank(self, layer: int) -> FloatArray:
        return self._random.random(self._shape, dtype=np.float32)


class CyclicEWMA(EWMA):
    """Ranks a layer that has just run as the farthest; the source's W has it as the nearest."""

    @staticmethod
    def reuse_weights(layer: int, layers: int, gamma: float) -> FloatArray:
        distance = (np.arange(layers) - layer) % layers  # [L]
        distance[layer] = layers
        weights: FloatArray = np.exp(-gamma * distance).astype(np.float32)
        return weights


class ResidentWatermark(Watermark):
    """Moves the price by resident bytes, as [Two-Tier, 4.3] writes it; they never exceed capacity, so it only falls."""

    def __init__(self, capacity_bytes: int, *, hysteresis: float = 0.1, rate: float = 0.1) -> None:
        """Makes steps of `rate`, relative to the mean density."""
        super().__init__(capacity_bytes, hysteresis=hysteresis)
        self._rate = rate

    def update_resident(self, b: FloatArray, resident_bytes: int) -> None:
        """Makes one step of the price, by densities [L, E] and the resident bytes."""
        excess = (resident_bytes - self.capacity_bytes) / self.capacity_bytes
        self.price = max(0.0, self.price + self._rate * float(b.mean()) * excess)
