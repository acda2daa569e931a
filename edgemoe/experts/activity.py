"""Counts the experts that this engine's own requests choose, and pairs or successions of them, for placement.

docs/design/placement.md says which counts each policy needs. Counts decay. Each step is added in one compiled call,
with weights that grow as the earlier counts should have shrunk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from edgemoe.experts.tiers.residency_records import SharedRecord
from edgemoe.jit.intrinsics import INT, f32_at, record, u8_at, u16_at
from edgemoe.jit.object_cache import code
from edgemoe.types.arrays import FloatArray, fields
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.placement import ACTIVITY_HALF_LIFE_S, ACTIVITY_UNIT
from edgemoe.types.step import StepRouting

MOST_WEIGHT = 2.0**20  # of a token; at more, counts and weights are scaled down
MOST_HALVINGS = 100.0  # between two clearings: older counts have vanished, and float32 still holds such weights
LEAST_S = 10.0  # over which a rate is taken
PAIRS_BYTES = 64 << 20  # of memory for pairs or successions; a model of more is counted without them
Shares = np.ndarray[tuple[int, int], np.dtype[np.uint16]]

# * `ids` [layers, tokens, k] int16, all -1 in a layer that did not run
# * `chosen` and `computed` [L, E] float32
# * `pairs` [L, E, E] and `passed` [L - 1, E, E] float32, 0 if they are not counted
# * `weight` float32 of a token
# * `seen` [E] uint8, 0 between steps
COUNTS = fields("layers", "experts", "k", "tokens", "ids", "chosen", "computed", "pairs", "passed", "weight", "seen")


@code(INT)
def COUNT(call: int) -> None:
    """Adds a step's routing."""
    c = record(call, COUNTS)
    weight = f32_at(c.weight)[0]
    ids, chosen, pairs, passed, k = u16_at(c.ids), f32_at(c.chosen), f32_at(c.pairs), f32_at(c.passed), c.k
    computed, seen = f32_at(c.computed), u8_at(c.seen)
    for layer in range(c.layers):
        for token in range(c.tokens):
            at = (layer * c.tokens + token) * k
            if ids[at] >= c.experts:
                continue
            for i in range(k):
                first = ids[at + i]
                chosen[layer * c.experts + first] += weight
                if seen[first] == 0:
                    seen[first] = 1
                    computed[layer * c.experts + first] += weight
                row = (layer * c.experts + first) * c.experts
                if c.pairs != 0:
                    for j in range(i + 1, k):
                        pairs[row + ids[at + j]] += weight
                after = at + c.tokens * k
                if c.passed != 0 and layer + 1 < c.layers and ids[after] < c.experts:
                    for j in range(k):
                        passed[row + ids[after + j]] += weight
        for at in range(layer * c.tokens * k, (layer + 1) * c.tokens * k):
            if ids[at] < c.experts:
                seen[ids[at]] = 0


CODES = (COUNT,)


@dataclass(frozen=True, slots=True, eq=False)
class ActivityShares:
    """The recent tokens' routing, as shares in units of 1 / ACTIVITY_UNIT."""

    tokens: float  # with decay
    tokens_per_s: float  # of the same, also while less than a half-life has been counted
    steps_per_token: float
    chosen: Shares  # [L, E]
    computed: Shares  # [L, E] of steps, which computed an expert for one or more of their tokens
    pairs: Shares  # [P, 4] layer, both experts, share; heaviest first
    passed: Shares  # [S, 4] layer, its expert, one of the next layer, share; likewise


class ActivityCounter:
    """Owns the counts. `add` on the compute thread; `shares` on any."""

    def __init__(
        self,
        geometry: ExpertGeometry,
        clock: Callable[[], float] = time.monotonic,
        *,
        successions: bool = False,
    ) -> None:
        """Counts pairs of experts that tokens chose together, or `successions`."""
        self._clock, self._tokens, self._steps = clock, 0.0, 0.0
        self._since_s = self._began_s = clock()  # start of the counts, of the weights
        self.steps = 0  # added
        layers, experts = geometry.layers, geometry.experts
        self._record = record = SharedRecord(COUNTS)
        record["layers"], record["experts"], record["k"] = layers, experts, geometry.top_k
        self._chosen: FloatArray = record.array("chosen", (layers, experts), dtype=np.float32)
        self._computed: FloatArray = record.array("computed", (layers, experts), dtype=np.float32)
        self._seen = record.array("seen", experts, dtype=np.uint8)
        self._weight: FloatArray = record.array("weight", 1, dtype=np.float32)
        self._pairs = self._passed = np.zeros((0, experts, experts), np.float32)
        if layers * experts * experts * 4 > PAIRS_BYTES:
            return
        if successions:
            self._passed = record.array("passed", (layers - 1, experts, experts), dtype=np.float32)
        else:
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
        self._steps += weight
        self.steps += 1

    def clear(self) -> None:
        """Sets all counts to zero."""
        self._tokens, self._steps, self._since_s = 0.0, 0.0, self._clock()
        for counts in (self._chosen, self._computed, self._pairs, self._passed):
            counts[:] = 0.0

    def shares(self, most: int) -> ActivityShares:
        """Returns the recent routing with at most `most` pairs or successions, equally many of each layer."""
        scale = ACTIVITY_UNIT / max(self._tokens, 1e-30)
        chosen, computed = _shares(self._chosen, self._tokens), _shares(self._computed, self._steps)
        pairs = _heaviest(
            (np.triu(each + each.T, 1) * np.float32(scale) for each in self._pairs), most // max(1, len(self._pairs))
        )
        passed = _heaviest((each * np.float32(scale) for each in self._passed), most // max(1, len(self._passed)))
        tokens = self.tokens
        per_s, steps = tokens / max(self._counted_s(), LEAST_S), self._steps / max(self._tokens, 1e-30)
        return ActivityShares(tokens, per_s, steps, chosen, computed, pairs, passed)

    @property
    def tokens(self) -> float:
        """Returns how many tokens are counted, with decay."""
        return self._tokens / self._weight_now()

    @property
    def pairs(self) -> FloatArray:
        """Returns how often two experts were chosen together, [L, E, E], in a unit that changes.

        A pair is in one of its two places, or partly in both. Empty, [0, E, E], where pairs are not counted.
        """
        return self._pairs

    def _counted_s(self) -> float:
        """Returns the seconds of which the counts are, with the same decay."""
        age_s = self._clock() - self._since_s
        return float(ACTIVITY_HALF_LIFE_S / math.log(2) * (1 - 2.0 ** -(age_s / ACTIVITY_HALF_LIFE_S)))

    def _weight_now(self) -> float:
        """Returns the present weight of a token, which doubles in each half-life."""
        return float(2.0 ** min((self._clock() - self._began_s) / ACTIVITY_HALF_LIFE_S, MOST_HALVINGS))

    def _scale_down(self, weight: float) -> None:
        for counts in (self._chosen, self._computed, self._pairs, self._passed):
            counts /= np.float32(weight)
        self._tokens, self._steps = self._tokens / weight, self._steps / weight
        self._began_s = self._clock()


def _shares(counts: FloatArray, whole: float) -> Shares:
    """Returns each count [L, E] as a share of `whole`."""
    scaled = np.minimum(np.rint(counts * (ACTIVITY_UNIT / max(whole, 1e-30))), ACTIVITY_UNIT)
    return np.asarray(scaled, np.uint16)


def _heaviest(layers: Iterable[FloatArray], most: int) -> Shares:
    """Returns each layer's heaviest shares [E, E], `most` of them: layer, both experts, share, [n, 4]."""
    rows = [np.zeros((0, 4), np.uint16)]
    for layer, shares in enumerate(layers):
        each, count = shares.ravel(), min(most, shares.size - 1)
        best = np.argpartition(-each, count)[:count]
        best = best[each[best] >= 0.5]
        best = best[np.argsort(-each[best], kind="stable")]
        columns = np.full(len(best), layer), *divmod(best, len(shares)), np.minimum(np.rint(each[best]), ACTIVITY_UNIT)
        rows.append(np.stack(columns, axis=1).astype(np.uint16))
    return np.concatenate(rows)
