"""A gate's hint in compiled code: who is likely, by which chance, and what of that is missing.

Both calls work on a HINT record. Between them the cache policy adds what else it knows of who is likely.
"""

from __future__ import annotations

import math

import numpy as np

from edgemoe.experts.tiers.residency_records import NVME, POOL, RAM, STATE
from edgemoe.jit.intrinsics import INT, code, f32_at, fields, i64_at, jit, record, u8_at

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
def HEAR(hint: int) -> int:
    """Writes who is likely: the union of each token's `top_k`, the most probable first, with calibrated chances.

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
def MISSING(hint: int) -> int:
    """Keeps of who is likely what is missing in the fastest tier and worth anything, the highest chance first.

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
    """Adds a token's `top_k` to who is likely, and notes the probability of the last of them."""
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
    """Sorts who is likely by the probability of the token that it is most probable for; of equals, by number."""
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
        below, part = 0, 0.0  # also of what is no number
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


CODES = (HEAR, MISSING)
