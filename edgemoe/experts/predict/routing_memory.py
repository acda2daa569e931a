"""Recall: what was needed next, the last times that routing looked like this.

Not in [Two-Tier]. A ring of past tokens keeps which experts each chose in every layer, and how soon each expert was
needed again by the same sequence, as decay^tokens. A sequence's present is aligned with the tokens of the ring by how
many experts they share, layer by layer, the tokens before them included with a falling weight; the best aligned ones
say together when each expert comes next. Causal: what has not happened yet counts as never.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core import types as numba_types
from numba.extending import intrinsic

from edgemoe.types.arrays import FloatArray, IntArray

Words = npt.NDArray[np.uint64]
NONE = -1
SHARE_OF_PAST = 0.3  # weight of the alignment up to the token before
TEMPERATURE = 0.06  # in shares of equal experts: how much better an alignment must be to count e times as much
DECAY = 0.8  # worth of being needed one token later
HORIZON = 24  # tokens; beyond them "never"
ALIGNED = 32  # layers that alignment looks at, at most: of more, every second, every third...


class RoutingMemory:
    """The ring of past tokens: `slots` of them, whichever sequences they are from."""

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        self.layers, self.experts, self.slots = layers, experts, slots
        words = -(-experts // 64)
        self.written = 0
        self.chosen: Words = np.zeros((layers, words, slots), np.uint64)  # bit e: expert e was chosen
        self.soon: npt.NDArray[np.uint8] = np.zeros((slots, layers * experts), np.uint8)  # 255 * decay^tokens
        self.before: IntArray = np.full(slots, NONE, np.int64)  # slot of the same sequence's token before
        self.after: IntArray = np.full(slots, NONE, np.int64)
        self._worth = np.round(255 * DECAY ** np.arange(HORIZON)).astype(np.uint8)

    @property
    def filled(self) -> int:
        """Slots in use: the first ones."""
        return min(self.written, self.slots)

    def next_slot(self) -> int:
        """The slot that the next token takes."""
        return self.written % self.slots

    def append(self, words: Words, before: int) -> int:
        """One more token of the sequence whose token before lies in slot `before`; `words` [L, W]. Its slot."""
        slot = self.next_slot()
        if (heir := int(self.after[slot])) != NONE:
            self.before[heir] = NONE
        if (past := int(self.before[slot])) != NONE:
            self.after[past] = NONE
        if before == slot:  # a ring of one sequence that has come round
            before = NONE
        self.chosen[:, :, slot] = words
        self.soon[slot] = 0
        self.before[slot], self.after[slot] = before, NONE
        if before != NONE:
            self.after[before] = slot
        _tell_back(self.soon, self.chosen, words, before, self.before, self._worth, self.experts)
        self.written += 1
        return slot


class RoutingHistory:
    """One sequence's alignment with the memory."""

    def __init__(self, memory: RoutingMemory, top_k: int, neighbours: int) -> None:
        self.memory = memory
        self.last = NONE  # slot of its latest token
        self.words: Words = np.zeros(memory.chosen.shape[:2], np.uint64)  # of the running token
        self.match = np.zeros(memory.slots, np.float32)  # of the running token so far with each slot's
        self.matched = np.zeros(memory.slots, np.float32)  # of the latest whole token
        self.slots: IntArray = np.zeros(4 * neighbours, np.int64)  # [n] the best aligned, for the running token
        self.weights = np.zeros(4 * neighbours, np.float32)  # [n] of sum 1
        self.n, self.best, self.spread = 0, 0.0, 1.0  # how many; the best match, 0..1; how many count
        self._stride = -(-memory.layers // ALIGNED)
        self._step = np.float32((1 - SHARE_OF_PAST) / (-(-memory.layers // self._stride) * top_k))

    def begin(self) -> None:
        """A token begins: all that is known is what came before."""
        _shift(self.match, self.matched, self.memory.before, self.memory.filled, np.float32(SHARE_OF_PAST))

    def see(self, layer: int, experts: IntArray) -> None:
        """The running token chose `experts` [k] in `layer`."""
        filled = 0 if layer % self._stride else self.memory.filled
        _see(self.match, self.memory.chosen[layer], self.words[layer], experts, filled, self._step)

    def glance(self, experts: IntArray) -> None:
        """A whole token chose `experts` [L, k]; in place of `begin`, `see` and `align`. The best aligned slots move on
        with it, and what the next token's alignment knows of the past is nothing."""
        _move_on(self.words, experts, self.slots, self.n, self.memory.after)
        self.match[:] = 0

    def align(self, layers_done: int, neighbours: int) -> None:
        """Chooses the best aligned slots, of those whose token before is known too."""
        known = SHARE_OF_PAST + (1 - SHARE_OF_PAST) * layers_done / self.memory.layers  # of a perfect match
        self.n, best, self.spread = _select(
            self.match,
            self.memory.before,
            self.memory.filled,
            neighbours,
            np.float32(TEMPERATURE * known),
            self.slots,
            self.weights,
        )
        self.best = best / known

    def recall(self, never: FloatArray, first: int, last: int, layers_done: int) -> None:
        """Multiplies `never` [L * E] of layers `first` to `last` by 1 - E[decay^tokens to the next need]."""
        memory = self.memory
        split = min(max(first, layers_done), last)
        for start, end, ahead in ((first, split, False), (split, last, True)):
            if start < end:
                keys = start * memory.experts, end * memory.experts
                _add(never, memory.soon, memory.before, self.slots, self.weights, self.n, *keys, ahead)

    def end(self) -> None:
        """The token is whole: it becomes a part of the memory."""
        self.last = self.memory.append(self.words, self.last)
        self.match, self.matched = self.matched, self.match


def _count_bits(context, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return numba_types.uint64(numba_types.uint64), generate


_popcount: Any = intrinsic(_count_bits)


@njit(fastmath=True, nogil=True)
def _shift(match: FloatArray, matched: FloatArray, before: IntArray, n: int, share: np.float32) -> None:
    """The match with each slot, known from the token before alone."""
    for slot in range(n):
        match[slot] = share * matched[before[slot]] if before[slot] >= 0 else np.float32(0)


@njit(fastmath=True, nogil=True)
def _see(match: FloatArray, chosen: Words, words: Words, experts: IntArray, n: int, step: np.float32) -> None:
    """Packs `experts` [k] into `words` [W], and adds `step` for each that a slot has in common; `chosen` [W, slots]."""
    _pack(words, experts)
    for word in range(words.shape[0]):
        row, wanted = chosen[word], words[word]
        for slot in range(n):
            match[slot] += step * np.float32(np.int64(_popcount(row[slot] & wanted)))


@njit(nogil=True)
def _pack(words: Words, experts: IntArray) -> None:
    words[:] = 0
    for expert in experts:
        words[expert >> 6] |= np.uint64(1) << np.uint64(expert & 63)


@njit(nogil=True)
def _move_on(words: Words, experts: IntArray, slots: IntArray, n: int, after: IntArray) -> None:
    """Packs a whole token's experts [L, k] into `words` [L, W]; replaces slots by those of the tokens after them."""
    for layer in range(words.shape[0]):
        _pack(words[layer], experts[layer])
    for i in range(n):
        if after[slots[i]] >= 0:
            slots[i] = after[slots[i]]


@njit(fastmath=True, nogil=True)
def _select(
    match: FloatArray,
    before: IntArray,
    n: int,
    wanted: int,
    temperature: np.float32,
    slots: IntArray,
    weights: FloatArray,
) -> tuple[int, float, float]:
    """About the `wanted` best matches, with softmax weights: how many, the best match, and how many count."""
    best = np.float32(-1)
    for slot in range(n):
        if before[slot] >= 0 and match[slot] > best:
            best = match[slot]
    if best < 0:
        return 0, 0.0, 1.0
    bins = 64  # of equal width, down to where a match counts e^-6 of the best
    counts = np.zeros(bins, np.int64)
    per_bin = np.float32(bins) / (np.float32(6) * temperature)
    for slot in range(n):
        if before[slot] >= 0:
            bin_ = int((best - match[slot]) * per_bin)
            if bin_ < bins:
                counts[bin_] += 1
    cut, found = 0, 0
    while cut < bins and found < wanted:
        found += counts[cut]
        cut += 1
    taken, total = 0, np.float32(0)
    for slot in range(n):
        if before[slot] >= 0 and taken < slots.shape[0] and int((best - match[slot]) * per_bin) < cut:
            slots[taken] = slot
            weights[taken] = math.exp((match[slot] - best) / temperature)
            total += weights[taken]
            taken += 1
    squares = np.float32(0)
    for i in range(taken):
        weights[i] /= total
        squares += weights[i] * weights[i]
    return taken, float(best), 1.0 / float(squares)


@njit(fastmath=True, nogil=True)
def _add(
    never: FloatArray,
    soon: npt.NDArray[np.uint8],
    before: IntArray,
    slots: IntArray,
    weights: FloatArray,
    n: int,
    first: int,
    last: int,
    ahead: bool,
) -> None:
    """`recall` for keys `first` to `last`; `ahead`: their layers are still to come in the aligned tokens."""
    sums = np.zeros(last - first, np.float32)
    for i in range(n):
        weight = weights[i] * np.float32(1 / 255)
        if weight * np.float32(255) < np.float32(1e-3):
            continue
        row = soon[before[slots[i]] if ahead else slots[i], first:last]
        for x in range(last - first):
            sums[x] += weight * np.float32(row[x])
    for x in range(last - first):
        never[first + x] *= np.float32(1) - sums[x]


@njit(nogil=True)
def _tell_back(
    soon: npt.NDArray[np.uint8],
    chosen: Words,
    words: Words,
    latest: int,
    before: IntArray,
    utility: npt.NDArray[np.uint8],
    experts: int,
) -> None:
    """Tells a sequence's earlier tokens, from the latest backwards, which experts were needed now."""
    for layer in range(words.shape[0]):
        for word in range(words.shape[1]):
            bits = words[layer, word]
            while bits:
                lowest = bits & (~bits + numba_types.uint64(1))
                bits ^= lowest
                key = layer * experts + word * 64 + int(_popcount(lowest - numba_types.uint64(1)))
                slot, tokens = latest, 0
                while slot >= 0 and tokens < utility.shape[0]:
                    soon[slot, key] = utility[tokens]
                    if chosen[layer, word, slot] & lowest:
                        break
                    slot, tokens = before[slot], tokens + 1
