"""Counts what this engine's own requests choose: how often each expert, and which pairs together.

A placement that lets tokens call few boxes needs to know what is chosen together, and no more than that: pairs tell no
words and no order [Prism, III-B]. Counts decay, so that what boxes are asked for lately decides. Steps add in one
compiled call, by weights that grow as the counts should have shrunk. What peers ask for is not counted here: it is
counted where the request runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgemoe.experts.tiers.records import SharedRecord
from edgemoe.kernels.cpu.intrinsics import INT, code, f32_at, fields, record, u16_at
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.placement import ACTIVITY_HALF_LIFE_S, ACTIVITY_UNIT
from edgemoe.types.routing import StepRouting

MOST_WEIGHT = 2.0**20  # of a token; at more, counts and weights are scaled down
PAIRS_BYTES = 64 << 20  # of memory for pairs; a model of more is counted without them

# `ids` [layers, tokens, k] int16, all -1 where a layer did not run; `chosen` [L, E] and `pairs` [L, E, E] float32, 0
# where there are none; `weight` float32 of a token.
COUNTS = fields("layers", "experts", "k", "tokens", "ids", "chosen", "pairs", "weight")


@code(INT)
def COUNT(call: int) -> None:
    """Adds a step's choices."""
    c = record(call, COUNTS)
    weight = f32_at(c.weight)[0]
    ids, chosen, pairs, k = u16_at(c.ids), f32_at(c.chosen), f32_at(c.pairs), c.k
    for layer in range(c.layers):
        for token in range(c.tokens):
            at = (layer * c.tokens + token) * k
            if ids[at] >= c.experts:
                continue
            for i in range(k):
                first = ids[at + i]
                chosen[layer * c.experts + first] += weight
                if c.pairs == 0:
                    continue
                row = (layer * c.experts + first) * c.experts
                for j in range(i + 1, k):
                    pairs[row + ids[at + j]] += weight


CODES = (COUNT,)


@dataclass(frozen=True, slots=True, eq=False)
class ActivityShares:
    """States what the tokens of late chose: shares of them, in units of 1 / ACTIVITY_UNIT."""

    tokens: float  # with decay
    chosen: np.ndarray[tuple[int, int], np.dtype[np.uint16]]  # [L, E]
    pairs: np.ndarray[tuple[int, int], np.dtype[np.uint16]]  # [P, 4] layer, both experts, share; heaviest first


class ActivityCounter:
    """Owns the counts. `add` on the compute thread; `shares` on any."""

    def __init__(self, geometry: ExpertGeometry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began_s, self._tokens = clock, clock(), 0.0
        layers, experts = geometry.layers, geometry.experts
        self._record = record = SharedRecord(COUNTS)
        record["layers"], record["experts"], record["k"] = layers, experts, geometry.top_k
        self._chosen: FloatArray = record.array("chosen", (layers, experts), dtype=np.float32)
        self._weight: FloatArray = record.array("weight", 1, dtype=np.float32)
        self._pairs: FloatArray | None = None
        if layers * experts * experts * 4 <= PAIRS_BYTES:
            self._pairs = record.array("pairs", (layers, experts, experts), dtype=np.float32)

    def add(self, routing: StepRouting) -> None:
        """Adds a step of this engine's requests."""
        weight = self._weight_now()
        if weight > MOST_WEIGHT:
            self._scale_down(weight)
            weight = 1.0
        ids = np.ascontiguousarray(routing.ids)
        self._weight[0], self._record["tokens"], self._record["ids"] = weight, ids.shape[1], ids.ctypes.data
        COUNT.call_briefly(self._record.address)
        self._tokens += weight * ids.shape[1]

    def clear(self) -> None:
        """Forgets what was counted."""
        self._tokens = 0.0
        for counts in (self._chosen, self._pairs):
            if counts is not None:
                counts[:] = 0.0

    def shares(self, most_pairs: int) -> ActivityShares:
        """Returns what was chosen of late, with so many pairs at most, equally many of each layer."""
        scale = ACTIVITY_UNIT / max(self._tokens, 1e-30)
        chosen = np.minimum(np.rint(self._chosen * scale), ACTIVITY_UNIT).astype(np.uint16)
        rows = [np.zeros((0, 4), np.uint16)]
        layers, experts = chosen.shape
        for layer in range(layers if self._pairs is not None else 0):
            assert self._pairs is not None
            together = self._pairs[layer] * scale
            both = np.triu(together + together.T, 1).ravel()
            count = min(most_pairs // layers, len(both) - 1)
            best = np.argpartition(-both, count)[:count]
            best = best[both[best] >= 0.5]
            best = best[np.argsort(-both[best], kind="stable")]
            weights = np.minimum(np.rint(both[best]), ACTIVITY_UNIT)
            rows.append(
                np.stack([np.full(len(best), layer), *divmod(best, experts), weights], axis=1).astype(np.uint16)
            )
        return ActivityShares(self._tokens / self._weight_now(), chosen, np.concatenate(rows))

    def _weight_now(self) -> float:
        """Returns what a token counts now: twice as much after each half-life."""
        return float(2.0 ** ((self._clock() - self._began_s) / ACTIVITY_HALF_LIFE_S))

    def _scale_down(self, weight: float) -> None:
        for counts in (self._chosen, self._pairs):
            if counts is not None:
                counts /= np.float32(weight)
        self._tokens /= weight
        self._began_s = self._clock()
