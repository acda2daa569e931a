"""How often each expert is chosen, as an exponential average, and the reuse distance of its layer.

Source: [Two-Tier, 4.1], EWMA and W; the ranks are p * W of [Two-Tier, 4.3]. A layer's average changes only when that
layer runs: visit k (from 1) of layer l (from 1) is at t = (k - 1) L + l. The source's t = k L + l is off by one.
"""

from __future__ import annotations

import numpy as np

from edgemoe.types.arrays import FloatArray, IntArray

ALPHA = 0.05  # of the average
GAMMA_PER_TOKEN = 0.2  # exp(-0.2) of an expert's worth goes with every token


class EWMA:
    """Ranks experts by the probability that they are chosen soon, p * W."""

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

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the probability [n] that each expert is needed, and p * W [n] of it in the layer before."""
        utility: FloatArray = chance * self._weights[layer - 1, layer]
        return chance, utility
