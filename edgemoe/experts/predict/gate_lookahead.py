"""Free look-ahead: a later layer's own gate, applied to this layer's hidden state, as chances.

Not in [Two-Tier]. A gate's softmax is no chance of being among the chosen k; what tells is how far it lies above or
below the k-th. What that has meant lately is learned from what the layer then chose, one layer a step. That takes some
hundred steps; so that hints which have turned bad cost little until then, chances are held to what came of the last
few: where less came than they promised, they count for as much less.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.fusion import Calibration, any_of
from edgemoe.types.arrays import FloatArray, IntArray

LOW, HIGH, BINS = -4.0, 3.0, 29  # of the margin, in nats
TINY = np.float32(1e-9)
KEPT = 0.97  # of what was promised and what came, per layer
DOUBTED = 2.0  # so many experts more that came as promised


class GateLookAhead:
    """Calibrates one layer's hints to the next. Compute thread only."""

    def __init__(self, layers: int, top_k: int) -> None:
        self.calibration = Calibration(LOW, HIGH, BINS, slope=2.0)
        self._layers, self._top_k = layers, top_k
        self._probe = 1 % layers  # the layer that is learned from in this step
        self._margin: FloatArray | None = None  # [T, E] said of it
        self._promises: dict[int, tuple[list[int], float]] = {}  # by layer: experts, and the sum of their chances
        self._promised = self._came = DOUBTED  # experts

    def hear(self, layer: int, probs: FloatArray) -> None:
        """A hint for a layer, [T, E]."""
        if layer == self._probe:
            self._margin = self._margins(probs)

    def learn(self, layer: int, ids: IntArray) -> None:
        """What the layer chose, [T, k]."""
        if (promise := self._promises.pop(layer, None)) is not None:
            experts, promised = promise
            kept = len(set(experts).intersection(ids.ravel().tolist()))
            self._promised = DOUBTED + KEPT * (self._promised - DOUBTED) + promised
            self._came = DOUBTED + KEPT * (self._came - DOUBTED) + kept
        if layer != self._probe:
            return
        margin, self._margin = self._margin, None
        self._probe = self._probe % (self._layers - 1) + 1 if self._layers > 1 else 0
        if margin is not None and len(margin) == len(ids):
            came = np.zeros(margin.shape, np.bool_)
            came[np.arange(len(ids))[:, None], ids] = True
            self.calibration.learn(margin, came)

    def chances(self, layer: int, probs: FloatArray, experts: IntArray) -> FloatArray:
        """P(some token needs each of the experts [n] of a layer), of a hint for it [T, E]."""
        each = self.calibration(self._margins(probs))
        chance: FloatArray = (each[0] if len(each) == 1 else any_of(each))[experts]
        self._promises[layer] = experts.tolist(), float(chance.sum())
        return chance * np.float32(self.trust)

    @property
    def trust(self) -> float:
        """What came lately of what was promised, at most 1."""
        return min(1.0, self._came / self._promised)

    def _margins(self, probs: FloatArray) -> FloatArray:
        """Log of how many times the k-th largest each expert has, [T, E]."""
        least = np.partition(probs, -self._top_k, axis=1)[:, -self._top_k, None]
        margin: FloatArray = np.log((probs + TINY) / (least + TINY))
        return margin
