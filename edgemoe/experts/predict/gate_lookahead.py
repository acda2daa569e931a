"""Free look-ahead: a later layer's own gate, applied to this layer's hidden state, as chances.

Not in [Two-Tier]. A gate's softmax is no chance of being among the chosen k; what tells is how far it lies above or
below the k-th. What that has meant lately is learned from what the layer then chose, one layer a step.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.fusion import Calibration, any_of
from edgemoe.types.arrays import FloatArray, IntArray

LOW, HIGH, BINS = -4.0, 3.0, 29  # of the margin, in nats
TINY = np.float32(1e-9)


class GateLookAhead:
    """Calibrates one layer's hints to the next. Compute thread only."""

    def __init__(self, layers: int, top_k: int) -> None:
        self.calibration = Calibration(LOW, HIGH, BINS, slope=2.0)
        self._layers, self._top_k = layers, top_k
        self._probe = 1 % layers  # the layer that is learned from in this step
        self._margin: FloatArray | None = None  # [T, E] said of it

    def hear(self, layer: int, probs: FloatArray) -> None:
        """A hint for a layer, [T, E]."""
        if layer == self._probe:
            self._margin = self._margins(probs)

    def learn(self, layer: int, ids: IntArray) -> None:
        """What the layer chose, [T, k]."""
        if layer != self._probe:
            return
        margin, self._margin = self._margin, None
        self._probe = self._probe % (self._layers - 1) + 1 if self._layers > 1 else 0
        if margin is not None and len(margin) == len(ids):
            came = np.zeros(margin.shape, np.bool_)
            came[np.arange(len(ids))[:, None], ids] = True
            self.calibration.learn(margin, came)

    def chances(self, probs: FloatArray) -> FloatArray:
        """P(some token needs each expert), [E], of a hint [T, E]."""
        each = self.calibration(self._margins(probs))
        return each[0] if len(each) == 1 else any_of(each)

    def _margins(self, probs: FloatArray) -> FloatArray:
        """Log of how many times the k-th largest each expert has, [T, E]."""
        least = np.partition(probs, -self._top_k, axis=1)[:, -self._top_k, None]
        margin: FloatArray = np.log((probs + TINY) / (least + TINY))
        return margin
