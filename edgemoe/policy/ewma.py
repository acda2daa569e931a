"""How often each expert is chosen, as an exponential average on its layer's own clock, and the policies built on it.

Source: [Two-Tier, 4.1] (EWMA, fusion without ScoutGate) and [Two-Tier, 4.3]. A layer's average changes when the layer
runs, and only then; visit k (from 1) of layer l (from 1) is at t = (k - 1) L + l, where the source's t = k L + l is off
by one.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.reuse import weight
from edgemoe.types.arrays import FloatArray, IntArray

ALPHA = 0.05
GAMMA_PER_TOKEN = 0.2  # exp(-0.2) of an expert's worth goes with every token


class EWMA:
    """Keeps what is likeliest to be chosen soon: p * W."""

    def __init__(self, layers: int, experts: int, top_k: int, alpha: float = ALPHA, *, published: bool = False) -> None:
        """Starts from top_k / experts. `published` is the source's W."""
        self.p = np.full((layers, experts), top_k / experts, np.float32)  # [L, E]
        self._alpha = np.float32(alpha)
        gamma = GAMMA_PER_TOKEN / layers
        self._weights = np.stack(
            [weight(layer, layers, gamma, published=published) for layer in range(layers)]
        )  # [L, L]

    def touch(self, layer: int, experts: IntArray) -> None:
        row = self.p[layer]
        row *= 1 - self._alpha
        row[experts] += self._alpha

    def rank(self, layer: int) -> FloatArray:
        """p * W, [L, E]."""
        return self.worth(layer, self.p)

    def worth(self, layer: int, p: FloatArray) -> FloatArray:
        """The same of another p [L, E]."""
        utility: FloatArray = p * self._weights[layer][:, None]
        return utility

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The chance in the place of p, as while the layer before runs."""
        utility: FloatArray = chance * self._weights[layer - 1, layer]
        return chance, utility


class PublishedPolicy(EWMA):
    """The source's rules to the letter, for uniform costs and sizes: the lowest p * W goes first."""

    def __init__(self, layers: int, experts: int, top_k: int, alpha: float = ALPHA) -> None:
        super().__init__(layers, experts, top_k, alpha, published=True)
