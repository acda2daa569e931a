"""Turns a later layer's gate, applied to this layer's hidden state, into chances of need. Not in [Two-Tier].

The margin to the k-th most probable expert is calibrated by the layer's later routing, one layer a step. While hints
promise more experts than the layers choose, all chances are scaled down by that ratio.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable

import numpy as np

from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import NVME, POOL, RAM, STATE, SharedRecord
from edgemoe.jit.intrinsics import INT, f32_at, i64_at, jit, record, u8_at
from edgemoe.jit.object_cache import code
from edgemoe.policy.forecast_mix import Calibration
from edgemoe.types.arrays import FloatArray, IntArray, fields, place_of

LOW, HIGH, BINS = -4.0, 3.0, 29  # of the margin, in nats
TINY = np.float32(1e-9)

# `probs` [tokens, width] float32 of `layer`, of which each token chooses `top_k`; `state` is residency's record.
# `share` float32 of BINS is the calibration; `margins` [tokens, width] float32 is 0 where nobody wants them. `count`
# experts are `likely`, and then missing: with `chance` and `utility` float32 and `tiers`. `trust` and `promised` [1]
# float32. Scratch memory: `tops` [top_k], `least` [tokens] float32, `best` [E] float32, `marked` [E] uint8.
HINT = fields(
    *("state", "layer", "tokens", "width", "top_k", "probs", "share", "margins", "count", "likely", "chance"),
    *("utility", "tiers", "trust", "promised", "tops", "least", "best", "marked"),
)


@code(INT, result=INT)
def LIKELY_EXPERTS(hint: int) -> int:
    """Writes the likely experts: the union of each token's `top_k`, most probable first, with calibrated chances.

    Returns whether any of them is missing in the fastest tier; without one, there are no chances.
    """
    h = record(hint, HINT)
    probs, likely = f32_at(h.probs), i64_at(h.likely)
    h.count = 0
    for token in range(h.tokens):
        _mark_top(hint, token)
    missing = 0
    for i in range(h.count):
        u8_at(h.marked)[likely[i]] = 0
        missing += _tier(h.state, h.layer, likely[i]) != _fastest(h.state)
    if h.margins != 0:
        for token in range(h.tokens):
            for at in range(token * h.width, (token + 1) * h.width):
                f32_at(h.margins)[at] = _margin(probs[at], f32_at(h.least)[token])
    if missing == 0:
        return 0
    if h.tokens > 1:
        _sort_likely(hint)
    promised = np.float32(0)
    for i in range(h.count):
        chance = _chance(hint, likely[i])
        promised += chance
        f32_at(h.chance)[i] = chance * f32_at(h.trust)[0]
    f32_at(h.promised)[0] = promised
    return 1


@code(INT, result=INT)
def MISSING_EXPERTS(hint: int) -> int:
    """Keeps the likely experts that the fastest tier lacks and that are worth anything, highest chance first.

    Returns their number. Of equals the more probable one is first.
    """
    h, n = record(hint, HINT), 0
    likely, chances, utilities, tiers = i64_at(h.likely), f32_at(h.chance), f32_at(h.utility), i64_at(h.tiers)
    for i in range(h.count):
        expert, chance, utility, tier = likely[i], chances[i], utilities[i], _tier(h.state, h.layer, likely[i])
        if tier == _fastest(h.state) or not utility > np.float32(-np.inf):
            continue
        at = n
        while at > 0 and chances[at - 1] < chance:
            likely[at], chances[at] = likely[at - 1], chances[at - 1]
            utilities[at], tiers[at] = utilities[at - 1], tiers[at - 1]
            at -= 1
        likely[at], chances[at], utilities[at], tiers[at] = expert, chance, utility, tier
        n += 1
    h.count = n
    return n


@jit
def _mark_top(hint: int, token: int) -> None:
    """Adds a token's `top_k` to the likely experts, and stores the probability of the last one."""
    h = record(hint, HINT)
    tops, base, count = i64_at(h.tops), token * h.width, 0
    probs = f32_at(h.probs)
    for expert in range(h.width):
        p = probs[base + expert]
        if count == h.top_k and p <= probs[base + tops[count - 1]]:
            continue
        count = min(count + 1, h.top_k)
        at = count - 1
        while at > 0 and probs[base + tops[at - 1]] < p:
            tops[at] = tops[at - 1]
            at -= 1
        tops[at] = expert
    f32_at(h.least)[token] = probs[base + tops[count - 1]]
    for i in range(count):
        expert = tops[i]
        p = probs[base + expert]
        if u8_at(h.marked)[expert] == 0:
            u8_at(h.marked)[expert] = 1
            i64_at(h.likely)[h.count] = expert
            h.count += 1


@jit
def _sort_likely(hint: int) -> None:
    """Sorts the likely experts by their highest probability for any token; of equals, by number."""
    h = record(hint, HINT)
    likely, best = i64_at(h.likely), f32_at(h.best)
    for i in range(h.count):
        expert, most = likely[i], np.float32(0)
        for token in range(h.tokens):
            most = max(most, f32_at(h.probs)[token * h.width + expert])
        best[expert] = most
        at = i
        while at > 0 and (best[likely[at - 1]] < most or (best[likely[at - 1]] == most and likely[at - 1] > expert)):
            likely[at] = likely[at - 1]
            at -= 1
        likely[at] = expert


@jit
def _chance(hint: int, expert: int) -> np.float32:
    """Returns P(some token needs the expert)."""
    h, nobody, chance = record(hint, HINT), np.float32(1), np.float32(0)
    for token in range(h.tokens):
        margin = _margin(f32_at(h.probs)[token * h.width + expert], f32_at(h.least)[token])
        place = (margin - LOW) * ((BINS - 1) / (HIGH - LOW))
        below, part = 0, 0.0  # also for NaN
        if place >= BINS - 1:
            below, part = BINS - 2, 1.0
        elif place > 0:
            below = int(place)
            part = place - below
        chance = np.float32(f32_at(h.share)[below] + part * (f32_at(h.share)[below + 1] - f32_at(h.share)[below]))
        nobody *= np.float32(1) - chance
    return chance if h.tokens == 1 else np.float32(1) - nobody


@jit
def _margin(p: np.float32, least: np.float32) -> np.float32:
    """Returns the log of how many times the least one `p` is."""
    return np.float32(math.log(np.float32(p + TINY) / np.float32(least + TINY)))


@jit
def _tier(state: int, layer: int, expert: int) -> int:
    """Returns the fastest tier that has an expert."""
    s = record(state, STATE)
    pools, key = i64_at(s.pools), layer * s.experts + expert
    if s.devices > 0:
        device = record(pools[1 + i64_at(s.device_of)[key]], POOL)
        if i64_at(device.where)[key] >= 0:
            return device.tier  # type: ignore[no-any-return]
    return RAM if i64_at(record(pools[0], POOL).where)[key] >= 0 else NVME


@jit
def _fastest(state: int) -> int:
    """Returns the fastest tier there is."""
    s = record(state, STATE)
    return record(i64_at(s.pools)[min(1, s.devices)], POOL).tier  # type: ignore[no-any-return]


CODES = (LIKELY_EXPERTS, MISSING_EXPERTS)


KEPT = 0.97  # decay of promised and chosen counts, per layer
DOUBTED = 2.0  # weight of the prior, in experts
HINTED_CALLS = 2  # expert calls that a hint forecasts, per expert of the layer; with more, nearly all are needed
LAYER, TOKENS, WIDTH, MARGINS, COUNT = (
    place_of(HINT, name) for name in ("layer", "tokens", "width", "margins", "count")
)


class GateLookAhead:
    """Calibrates one layer's hints for the next, and lists the experts they ask for. Compute thread only."""

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
        self._probs: FloatArray = shared.array("probs", HINTED_CALLS * experts * experts // top_k, dtype=np.float32)
        self._trust, self._sum = (shared.array(name, 1, 1, np.float32) for name in ("trust", "promised"))
        self._share: FloatArray = shared.set_array("share", self.calibration.share.astype(np.float32))
        for name, size in (("tops", top_k), ("least", HINTED_CALLS * experts // top_k), ("best", experts)):
            shared.array(name, size)
        shared.array("marked", experts, dtype=np.uint8)
        self._hear, self._missing = LIKELY_EXPERTS.call_briefly, MISSING_EXPERTS.call_briefly

    def likely_experts(self, layer: int, probs: FloatArray) -> tuple[IntArray, FloatArray] | None:
        """Returns the experts [n] that a hint for a layer, [T, E], makes likely, and P(some token needs it) of each.

        Likely are each token's most probable. None where all of them are in the fastest tier. T * k is below
        HINTED_CALLS * E.
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
        """Returns the missing experts of the latest hint, whose experts have these chances and utilities [n].

        Each with its tier, chance and utility, the highest chance first; none with a utility of zero.
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
        """Learns from the layer's routing, [T, k]."""
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
        """The recent share of promised experts that were chosen, at most 1."""
        return min(1.0, self._came / self._promised)
