"""Ranks experts for the cache: by last use (LRU), or by the average probability of being chosen (EWMA).

Source of EWMA: [Two-Tier, 4.1], EWMA and W; its ranks are p * W of [Two-Tier, 4.3]. A layer's average changes only when
that layer runs: visit k (from 1) of layer l (from 1) is at t = (k - 1) L + l. The source's t = k L + l is off by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray, IntArray

LIKELY = 0.5  # probability from which a prefetch counts as needed, where ranks are not probabilities
NEVER_USED = -(1 << 40)  # the clock of an expert that was never used


class LRU:
    """Ranks experts by their last use."""

    margin = 0.0

    def __init__(self, layers: int, experts: int) -> None:
        self.clock = 0  # layer-steps so far
        self.last: npt.NDArray[np.int64] = np.full((layers, experts), NEVER_USED, dtype=np.int64)  # [L, E]

    def touch(self, layer: int, experts: IntArray) -> None:
        """Marks a layer's experts [n] as used now."""
        self.clock += 1
        self.last[layer, experts] = self.clock

    def age(self) -> IntArray:
        """Returns the layer-steps since each expert's last use, [L, E]; huge where it was never used."""
        return self.clock - self.last

    def rank(self, layer: int) -> FloatArray:
        """Returns the worth of each expert, [L, E]."""
        return (-self.age()).astype(np.float32)

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the probability [n] that each expert is needed, and its worth [n] for a prefetch.

        Ages cannot be compared with probabilities: a likely expert is worth any resident one, an unlikely one none.
        """
        return chance, np.where(chance >= LIKELY, np.inf, -np.inf).astype(np.float32)


ALPHA = 0.05  # of the average
GAMMA_PER_TOKEN = 0.2  # exp(-0.2) of an expert's worth goes with every token


class EWMA:
    """Ranks experts by the probability that they are chosen soon, p * W."""

    margin = 0.0

    def __init__(self, layers: int, experts: int, top_k: int, alpha: float = ALPHA) -> None:
        """Starts from p = top_k / experts."""
        self.p = np.full((layers, experts), top_k / experts, np.float32)  # [L, E]
        self._alpha = np.float32(alpha)
        gamma = GAMMA_PER_TOKEN / layers
        self._weights = np.stack([self.reuse_weights(layer, layers, gamma) for layer in range(layers)])  # [L, L]

    @staticmethod
    def reuse_weights(layer: int, layers: int, gamma: float) -> FloatArray:
        """Returns W = exp(-gamma D) of each layer, [L], while `layer` runs.

        D is the number of layer-steps until a layer runs; it is 0 for the running layer.
        """
        distance = (np.arange(layers) - layer) % layers  # D, [L]
        weights: FloatArray = np.exp(-gamma * distance).astype(np.float32)
        return weights

    def touch(self, layer: int, experts: IntArray) -> None:
        """Updates the layer's averages after it chose these experts [n]."""
        row = self.p[layer]
        row *= 1 - self._alpha
        row[experts] += self._alpha

    def rank(self, layer: int) -> FloatArray:
        """Returns p * W while `layer` runs, [L, E]."""
        return self.worth(layer, self.p)

    def worth(self, layer: int, p: FloatArray) -> FloatArray:
        """Returns p * W of other probabilities p [L, E]."""
        utility: FloatArray = p * self._weights[layer][:, None]
        return utility

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the probability [n] that each expert is needed, and p * W [n] of it in the layer before."""
        utility: FloatArray = chance * self._weights[layer - 1, layer]
        return chance, utility
