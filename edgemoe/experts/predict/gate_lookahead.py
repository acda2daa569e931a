"""Free look-ahead: a later layer's own gate, applied to this layer's hidden state, as chances.

Not in [Two-Tier]. A gate's softmax is no chance of being among the chosen k; what tells is how far it lies above or
below the k-th. What that has meant lately is learned from what the layer then chose, one layer a step. That takes some
hundred steps; so that hints which have turned bad cost little until then, chances are held to what came of the last
few: where less came than they promised, they count for as much less. Hints are read in compiled code (`gate_hint`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from edgemoe.experts.predict.gate_hint import BINS, HEAR, HIGH, HINT, LOW, MISSING
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import SharedRecord
from edgemoe.jit.intrinsics import place_of
from edgemoe.policy.fusion import Calibration
from edgemoe.types.arrays import FloatArray, IntArray

KEPT = 0.97  # of what was promised and what came, per layer
DOUBTED = 2.0  # so many experts more that came as promised
MOST_CALLS = 2  # expert calls that a hint foretells, per expert of the layer; of more, nearly all are needed
LAYER, TOKENS, WIDTH, MARGINS, COUNT = (
    place_of(HINT, name) for name in ("layer", "tokens", "width", "margins", "count")
)


class GateLookAhead:
    """Calibrates one layer's hints to the next, and tells what they ask for. Compute thread only."""

    def __init__(self, residency: Residency, top_k: int) -> None:
        self.calibration = Calibration(LOW, HIGH, BINS, slope=2.0)
        layers, experts = residency.ram.layers, residency.ram.experts
        self._layers = layers
        self._probe = 1 % layers  # the layer that is learned from in this step
        self._margin: FloatArray | None = None  # [T, E] said of it
        self._promises: dict[int, tuple[set[int], float]] = {}  # by layer: experts, and the sum of their chances
        self._promised = self._came = DOUBTED  # experts
        self._record = shared = SharedRecord(HINT)
        self._address, self._fields = ctypes.c_int64(shared.address), shared.numbers  # converted once
        self._residency = residency  # whose memory the record refers to
        shared["state"], shared["top_k"] = residency.address, top_k
        self._likely, self._tiers = shared.views("likely", experts), shared.views("tiers", experts)
        self._chance = shared.views("chance", experts, np.float32)
        self._utility = shared.views("utility", experts, np.float32)
        self._probs: FloatArray = shared.array("probs", MOST_CALLS * experts * experts // top_k, dtype=np.float32)
        self._trust, self._sum = (shared.array(name, 1, 1, np.float32) for name in ("trust", "promised"))
        self._share: FloatArray = shared.take("share", self.calibration.share.astype(np.float32))
        for name, size in (("tops", top_k), ("least", MOST_CALLS * experts // top_k), ("best", experts)):
            shared.array(name, size)
        shared.array("marked", experts, dtype=np.uint8)
        self._hear, self._missing = HEAR.call_briefly, MISSING.call_briefly

    def hear(self, layer: int, probs: FloatArray) -> tuple[IntArray, FloatArray] | None:
        """Returns the experts [n] that a hint for a layer, [T, E], makes likely, and P(some token needs it) of each.

        Likely are each token's most probable. None where all of them are in the fastest tier. T * k is below
        MOST_CALLS * E.
        """
        fields = self._fields
        fields[LAYER], fields[MARGINS] = layer, 0
        fields[TOKENS], fields[WIDTH] = probs.shape
        self._probs[: probs.size] = probs.ravel()
        if layer == self._probe:
            self._margin = np.empty(probs.shape, np.float32)
            fields[MARGINS] = self._margin.ctypes.data
        if not self._hear(self._address):
            return None
        n = fields[COUNT]
        likely = self._likely[n].copy()
        self._promises[layer] = set(likely.tolist()), float(self._sum[0])
        return likely, self._chance[n].copy()

    def missing(self, chance: FloatArray, utility: FloatArray) -> Iterable[tuple[int, int, float, float]]:
        """Returns the missing experts among those of the latest hint, which have these chances and utilities [n].

        Each with its tier, chance and utility, the highest chance first; none that is worth nothing.
        """
        n = len(chance)
        self._chance[n][...], self._utility[n][...] = chance, utility
        n = self._missing(self._address)
        return zip(
            self._likely[n].tolist(),
            self._tiers[n].tolist(),
            self._chance[n].tolist(),
            self._utility[n].tolist(),
            strict=True,
        )

    def learn(self, layer: int, ids: IntArray) -> None:
        """What the layer chose, [T, k]."""
        if (promise := self._promises.pop(layer, None)) is not None:
            experts, promised = promise
            kept = len(experts.intersection(ids.ravel().tolist()))
            self._promised = DOUBTED + KEPT * (self._promised - DOUBTED) + promised
            self._came = DOUBTED + KEPT * (self._came - DOUBTED) + kept
            self._trust[0] = self.trust
        if layer != self._probe:
            return
        margin, self._margin = self._margin, None
        self._probe = self._probe % (self._layers - 1) + 1 if self._layers > 1 else 0
        if margin is not None and len(margin) == len(ids):
            came = np.zeros(margin.shape, np.bool_)
            came[np.arange(len(ids))[:, None], ids] = True
            self.calibration.learn(margin, came)
            self._share[:] = self.calibration.share

    @property
    def trust(self) -> float:
        """What came lately of what was promised, at most 1."""
        return min(1.0, self._came / self._promised)
