"""Recall: the experts that were needed next after past tokens with similar routing.

Not in [Two-Tier]. A ring of past tokens keeps each token's experts in every layer, and each expert's next need by the
same sequence, as decay^tokens. A sequence is aligned with the ring by shared experts, layer by layer, with a falling
weight for earlier tokens. The best matches together predict each expert's next need. Later needs count as never.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types as numba_types

from edgemoe.jit.intrinsics import INT, carray, i64_at, intrinsic, jit, record, u8_at, u64_at
from edgemoe.jit.object_cache import code
from edgemoe.types.arrays import FloatArray, IntArray, fields, place_of

Words = npt.NDArray[np.uint64]
NONE = -1
SHARE_OF_PAST = 0.3  # weight of the alignment up to the token before
TEMPERATURE = 0.06  # in shares of equal experts: how much better an alignment must be to count e times as much
DECAY = 0.8  # worth of being needed one token later
HORIZON_TOKENS = 24  # beyond them "never"
ALIGNED = 32  # layers that alignment looks at, at most: of more, every second, every third...
LOOKS = 4  # alignments of a sequence in one step, at even distances between the layers, at most
BINS = 64  # bins of equal width for matches, down to a weight of e^-6 of the best

# The ring; arrays are addresses, see `RoutingMemory`. `written` counts tokens.
MEMORY = fields("layers", "experts", "words", "slots", "chosen", "soon", "before", "after", "worth", "written")
WRITTEN = place_of(MEMORY, "written")


class RoutingMemory:
    """The ring of past tokens: `slots` of them, whichever sequences they are from."""

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        self.layers, self.experts, self.slots = layers, experts, slots
        self.words = words = -(-experts // 64)
        self.chosen: Words = np.zeros((layers, words, slots), np.uint64)  # bit e: expert e was chosen
        self.soon: npt.NDArray[np.uint8] = np.zeros((slots, layers * experts), np.uint8)  # 255 * decay^tokens
        self.before: IntArray = np.full(slots, NONE, np.int64)  # slot of the same sequence's token before
        self.after: IntArray = np.full(slots, NONE, np.int64)
        self._worth = np.round(255 * DECAY ** np.arange(HORIZON_TOKENS)).astype(np.uint8)
        arrays = (self.chosen, self.soon, self.before, self.after, self._worth)
        row = (layers, experts, words, slots, *(array.ctypes.data for array in arrays), 0)
        self._record = np.array([row], MEMORY)
        self._view = self._record.view(np.int64)
        self.address = self._record.ctypes.data

    @property
    def written(self) -> int:
        """Tokens so far."""
        return int(self._view[WRITTEN])

    @written.setter
    def written(self, tokens: int) -> None:
        self._view[WRITTEN] = tokens

    @property
    def filled(self) -> int:
        """Slots in use: the first ones."""
        return min(self.written, self.slots)

    def append(self, words: Words, before: int) -> int:
        """Appends a token, `words` [L, W], after the token in slot `before` of its sequence. Returns its slot."""
        slot = self.written % self.slots
        APPEND.call_briefly(self.address, words.ctypes.data, before)
        return slot

    def clear(self) -> None:
        """Clears the memory of all tokens."""
        self.written = 0
        self.chosen[:], self.soon[:], self.before[:], self.after[:] = 0, 0, NONE, NONE


def _count_bits(context, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return numba_types.uint64(numba_types.uint64), generate


_popcount: Any = intrinsic(_count_bits)


@jit
def append(memory: int, words: Words, before: int) -> int:
    """Implements `RoutingMemory.append` for a MEMORY record."""
    m = record(memory, MEMORY)
    chosen = carray(u64_at(m.chosen), (m.layers, m.words, m.slots))
    soon = carray(u8_at(m.soon), (m.slots, m.layers * m.experts))
    befores, afters = carray(i64_at(m.before), (m.slots,)), carray(i64_at(m.after), (m.slots,))
    slot = m.written % m.slots
    if afters[slot] != NONE:
        befores[afters[slot]] = NONE
    if befores[slot] != NONE:
        afters[befores[slot]] = NONE
    if before == slot:  # a ring of one sequence that has come round
        before = NONE
    for layer in range(m.layers):
        for word in range(m.words):
            chosen[layer, word, slot] = words[layer, word]
    soon[slot] = 0
    befores[slot], afters[slot] = before, NONE
    if before != NONE:
        afters[before] = slot
    _update_past_tokens(soon, chosen, words, before, befores, carray(u8_at(m.worth), (HORIZON_TOKENS,)), m.experts)
    m.written += 1
    return slot  # type: ignore[no-any-return]


@code(INT, INT, INT)
def APPEND(memory: int, words: int, before: int) -> None:
    """Calls `append` for words at an address."""
    m = record(memory, MEMORY)
    append(memory, carray(u64_at(words), (m.layers, m.words)), before)


@jit
def shift(match: FloatArray, matched: FloatArray, before: IntArray, n: int) -> None:
    """Begins a token: computes the match with each slot from the previous token alone."""
    for slot in range(n):
        match[slot] = np.float32(SHARE_OF_PAST) * matched[before[slot]] if before[slot] >= 0 else np.float32(0)


@jit
def add_matches(match: FloatArray, chosen: Words, words: Words, n: int, step: np.float32) -> None:
    """Adds `step` for each expert that a slot has in common with `words` [W]; `chosen` [W, slots]."""
    for word in range(words.shape[0]):
        row, wanted = chosen[word], words[word]
        for slot in range(n):
            match[slot] += step * np.float32(np.int64(_popcount(row[slot] & wanted)))


@jit
def pack(words: Words, experts: npt.NDArray[np.int16]) -> None:
    """Sets the bits of `experts` [k] in `words` [W]."""
    words[:] = 0
    for expert in experts:
        words[expert >> 6] |= np.uint64(1) << np.uint64(expert & 63)


@jit
def move_on(slots: IntArray, n: int, after: IntArray) -> None:
    """Replaces the best aligned slots by the slots of the following tokens."""
    for i in range(n):
        if after[slots[i]] >= 0:
            slots[i] = after[slots[i]]


@jit
def select(
    memory: int,
    match: FloatArray,
    wanted: int,
    temperature: np.float32,
    slots: IntArray,
    weights: FloatArray,
    counts: IntArray,
) -> tuple[int, np.float32, np.float32]:
    """Selects about `wanted` best matches whose previous token is known too. Fills their slots and softmax weights.

    Returns their number, the best match, and how many count. `counts` [bins] is scratch memory.
    """
    m = record(memory, MEMORY)
    before, n, best = i64_at(m.before), min(m.written, m.slots), np.float32(-1)
    for slot in range(n):
        if before[slot] >= 0 and match[slot] > best:
            best = match[slot]
    if best < 0:
        return 0, np.float32(0), np.float32(1)
    counts[:] = 0
    per_bin = np.float32(BINS) / (np.float32(6) * temperature)
    for slot in range(n):
        if before[slot] >= 0:
            bin_ = int((best - match[slot]) * per_bin)
            if bin_ < BINS:
                counts[bin_] += 1
    cut, found = 0, 0
    while cut < BINS and found < wanted:
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
    return taken, best, np.float32(1) / squares


@jit
def recall(
    never: FloatArray,
    memory: int,
    slots: IntArray,
    weights: FloatArray,
    first: int,
    ahead: bool,
    sums: FloatArray,
) -> None:
    """Multiplies `never` [E], of keys from `first` on, by 1 - E[decay^tokens to the next need], as aligned slots say.

    `ahead`: their layer is still to come in the aligned tokens. `sums` [E] is scratch.
    """
    m = record(memory, MEMORY)
    soon, before = carray(u8_at(m.soon), (m.slots, m.layers * m.experts)), i64_at(m.before)
    experts = never.shape[0]
    sums[:] = 0
    for i in range(len(slots)):
        weight = weights[i] * np.float32(1 / 255)
        if weight * np.float32(255) < np.float32(1e-3):
            continue
        row = soon[max(before[slots[i]], 0) if ahead else slots[i], first : first + experts]
        for x in range(experts):
            sums[x] += weight * np.float32(row[x])
    for x in range(experts):
        never[x] *= np.float32(1) - sums[x]


@jit
def _update_past_tokens(
    soon: npt.NDArray[np.uint8],
    chosen: Words,
    words: Words,
    latest: int,
    before: IntArray,
    utility: npt.NDArray[np.uint8],
    experts: int,
) -> None:
    """Credits the experts needed now to a sequence's earlier tokens, from the latest backwards."""
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
