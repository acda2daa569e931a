"""KV blocks: who holds each, the prefix cache, expert signatures, and swapped blocks (see docs/design/engine.md).

A full block is immutable. Its key is a hash chained over its parent's key and its own tokens, beginning with the
request's salt. Free blocks stay findable until their memory is needed, the least recently used first. Signatures
follow [ELDR, Prefix Cache Coherence], and cover generated tokens too.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Row
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.sequence import Sequence, SwappedBlocks, SwappedWindow, blocks_for
from edgemoe.engine.state_slots import StateSlots
from edgemoe.engine.window_blocks import WindowBlocks
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import BLOCK_TOKENS

_pack = struct.Struct(f"<{BLOCK_TOKENS}I").pack
MOST_PRIVATE = 1 << 12  # requests with private blocks
SUMMED = 64  # signatures at once: their sums fit uint16, and a slice of them a processor's cache


class PrivateBlocks(NamedTuple):
    """The first block of a request that other requests must not find, and the salt of its key."""

    first: int
    salt: bytes


class BlockManager:
    """Owns all KV blocks. Lookups are cheap by an invariant: where a block's key is known, so are its ancestors' keys.

    A sequence that holds a block also holds its ancestors, and releases its last block first. It swaps a block that it
    completes for one that is already known by the same key. Where its blocks were forgotten, later ones stay unknown.
    """

    def __init__(
        self,
        blocks: int,
        layers: int,
        experts: int,
        prefix_cache: bool = True,
        states: StateSlots | None = None,
        windows: WindowBlocks | None = None,
    ) -> None:
        """Makes all blocks free. `states` and `windows` are the places of a model that has such layers, too."""
        self.count = blocks
        self._states, self._windows = states, windows
        self.signatures: npt.NDArray[np.uint8] = np.zeros((blocks, layers, experts), np.uint8)  # [B, L, E]
        self._prefix_cache = prefix_cache
        self._refs = [0] * blocks
        self._generations = [0] * blocks  # how often each was taken
        self._key: list[bytes | None] = [None] * blocks
        self._parent: list[bytes | None] = [None] * blocks  # the key before each one's own
        self._known: dict[bytes, int] = {}  # parents come before their children
        self._private: OrderedDict[bytes, PrivateBlocks] = OrderedDict()  # by private salt
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # the next one to be reused first

    # --- questions

    @property
    def free(self) -> int:
        """Counts blocks that no sequence holds, blocks of the prefix cache included."""
        return len(self._free)

    def known(self, seq: Sequence) -> int:
        """Counts the leading blocks of `seq` that the prefix cache has, leaving at least one token to compute.

        Where the model has states or windows, these are the blocks after which the cache has those, too.
        Returns 0 where log probabilities of the prompt are wanted: they take logits, which are not cached.
        """
        if seq.wants_prompt_logprobs:
            return 0
        keys = self.keys(seq, (len(seq.tokens) - 1) // BLOCK_TOKENS)
        return self.covered(keys[: self._matching(keys)])

    def covered(self, keys: Row[bytes]) -> int:
        """Returns the most of these leading blocks, which are known, after which state and window are known, too."""
        count, before = len(keys), -1
        while count != before:
            before = count
            if self._states is not None:
                count = self._states.covered(keys[:count])
            if self._windows is not None:
                count = self._windows.covered(keys[:count])
        return count

    def _matching(self, keys: Row[bytes]) -> int:
        return bisect_left(keys, True, key=lambda key: key not in self._known)

    def needs(self, seq: Sequence) -> int:
        """Counts the free blocks that `open(seq)` would take."""
        held = sum(self._refs[self._known[key]] > 0 for key in seq.keys[: self.known(seq)])
        return blocks_for(len(seq.tokens)) - held

    def can_append(self, seq: Sequence) -> bool:
        """Returns whether the last token of `seq`, the only one without a place, fits its blocks or a free one."""
        if self._windows is not None and self._windows.capacity(seq) < len(seq.tokens):
            return False
        return len(seq.tokens) <= len(seq.blocks) * BLOCK_TOKENS or self.free > 0

    def computable(self, seq: Sequence) -> int:
        """Returns how many more tokens of `seq` a step may compute, for which there are blocks."""
        left = len(seq.tokens) - seq.computed
        return left if self._windows is None else min(left, self._windows.capacity(seq) - seq.computed)

    def fits_window(self, seq: Sequence, others: Iterable[tuple[Sequence, int]]) -> bool:
        """Returns whether layers with windows have blocks for `seq`, beside `others` and their expected tokens."""
        if (windows := self._windows) is None:
            return True
        promised = sum(windows.lacking(other, tokens) for other, tokens in others)
        return windows.lacking(seq, len(seq.tokens) + 1) + 1 + promised <= windows.free

    def keys(self, seq: Sequence, count: int) -> list[bytes]:
        """Returns the keys of the first `count` blocks, which must be full; empty without a prefix cache."""
        if not self._prefix_cache:
            return []
        request = seq.request
        extend_keys(seq.keys, seq.tokens, count, request.salt, self._private.get(request.private_salt))
        return seq.keys[:count]

    def private_keys(self, tokens: Row[int], salt: bytes, private_salt: bytes) -> list[bytes]:
        """Returns the keys for blocks of `tokens` that are fetched for one request.

        The leading blocks that are known here keep their shared keys. The keys of the others, and of all blocks behind
        them, are found by requests with this private salt alone. From any thread.
        """
        count = (len(tokens) - 1) // BLOCK_TOKENS
        keys: list[bytes] = []
        extend_keys(keys, tokens, count, salt)
        first = next((n for n, key in enumerate(keys) if key not in self._known), count)
        if self._windows is not None:
            missing = (n for n in self._windows.needed(count) if self._windows.find(keys[n]) is None)
            first = min(first, next(missing, count))
        self._private[private_salt] = private = PrivateBlocks(first, private_salt)
        self._private.move_to_end(private_salt)
        if len(self._private) > MOST_PRIVATE:
            self._private.popitem(last=False)
        del keys[first:]
        extend_keys(keys, tokens, count, salt, private)
        return keys

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Returns the block known by `key`, and its generation; None where there is none. From any thread.

        A copy of the block is valid if `find` still returns the same pair after the copy.
        """
        block = self._known.get(key)
        if block is None:
            return None
        generation = self._generations[block]
        return (block, generation) if self._known.get(key) == block else None

    def signature(self, seq: Sequence) -> IntArray:
        """Returns how often the computed tokens of `seq` chose each expert, [L, E]; cached tokens count too."""
        return self.total(seq.blocks)

    def total(self, blocks: Row[int]) -> IntArray:
        """Returns the sum of the signatures of these blocks, [L, E]."""
        total: IntArray = np.zeros(self.signatures.shape[1:], np.int64)
        for begin in range(0, len(blocks), SUMMED):
            total += self.signatures[list(blocks[begin : begin + SUMMED])].sum(axis=0, dtype=np.uint16)
        return total

    # --- changes

    def open(self, seq: Sequence) -> None:
        """Gives `seq` blocks for all its tokens, and counts tokens from the prefix cache as computed.

        The sequence also gets the state after the cached blocks, and their last window, where the model has such.
        """
        assert not seq.blocks, "the sequence has its blocks already"
        assert self.needs(seq) <= self.free, "there is no room for the sequence"
        keys = seq.keys[: self.known(seq)]
        hits = [self._known[key] for key in keys]
        for block in hits:
            self._hold(block)
        if self._states is not None:
            self._states.resume(seq, keys)
        if self._windows is not None:
            self._windows.resume(seq, keys, self._matching(seq.keys[: len(seq.tokens) // BLOCK_TOKENS]))
        seq.computed = len(hits) * BLOCK_TOKENS
        seq.blocks = hits + [self._take_free() for _ in range(blocks_for(len(seq.tokens)) - len(hits))]

    def append(self, seq: Sequence) -> None:
        """Makes a place for the last token of `seq`, in a new block if the others are full."""
        if len(seq.tokens) > len(seq.blocks) * BLOCK_TOKENS:
            seq.blocks.append(self._take_free())
        if self._windows is not None:
            self._windows.extend(seq, len(seq.tokens))

    def extend(self, seq: Sequence, tokens: int) -> int:
        """Makes places for drafted tokens behind the last token of `seq`, and returns for how many of `tokens`."""
        places = len(seq.tokens) + tokens
        while places > len(seq.blocks) * BLOCK_TOKENS and self.free > 0:
            seq.blocks.append(self._take_free())
        places = min(places, len(seq.blocks) * BLOCK_TOKENS)
        if self._windows is not None:
            places = min(places, self._windows.capacity(seq))
            self._windows.extend(seq, places)
        return places - len(seq.tokens)

    def trim(self, seq: Sequence) -> None:
        """Releases the blocks behind the last token of `seq`, which hold no token any more."""
        while len(seq.blocks) > blocks_for(len(seq.tokens)):
            self._release(seq.blocks.pop())
        if self._windows is not None:
            self._windows.trim(seq, len(seq.tokens))

    def prepare(self, seq: Sequence, tokens: int, snapshots: bool = True) -> None:
        """Takes slots for the states after the next `tokens` tokens of `seq`, and blocks for their windows.

        With `snapshots` it also takes slots for intermediate states that the prefix cache should keep.
        """
        if self._states is not None:
            self._states.prepare(seq, tokens, snapshots and self._prefix_cache)
        if self._windows is not None:
            self._windows.extend(seq, seq.computed + tokens)

    def skip_windows(self, seq: Sequence, first: int) -> None:
        """Lets `seq` begin with block `first` in layers with windows. Later ones that it holds stay."""
        if self._windows is not None:
            self._windows.skip(seq, first)

    def advance(self, seq: Sequence, tokens: int) -> None:
        """Counts `tokens` more of `seq` as computed, and remembers the blocks that this fills, and the states."""
        done, seq.computed = seq.computed // BLOCK_TOKENS, seq.computed + tokens
        keys = self.keys(seq, seq.computed // BLOCK_TOKENS)
        for i, key in enumerate(keys[done:], start=done):
            self._index_block(seq, i, key)
        if self._states is not None:
            self._states.advance(seq, keys)
        if self._windows is not None:
            self._windows.advance(seq)

    def close(self, seq: Sequence) -> None:
        """Releases all blocks of `seq`, the last one first, its states and its windows."""
        if self._states is not None and seq.blocks:
            self._states.close(seq)
        if self._windows is not None:
            self._windows.close(seq)
        for block in reversed(seq.blocks):
            self._release(block)
        seq.blocks, seq.computed = [], 0

    def adopt(self, keys: Row[bytes], write: Callable[[int], None]) -> bool:
        """Has `write` fill a free block with another engine's copy, and indexes it by the last of `keys`.

        Returns False, and changes nothing, unless all blocks before it are known here and another one is free.
        """
        return self.adopt_run(keys, len(keys) - 1, lambda block, _: write(block)) == len(keys)

    def adopt_run(self, keys: Row[bytes], first: int, write: Callable[[int, int], None]) -> int:
        """Has `write(block, i)` fill free blocks with copies for keys[i], i from `first` on, and indexes them.

        Returns how many leading keys are known here then: fewer than all where one before `first` is unknown, or no
        block is free.
        """
        if not self._prefix_cache or not all(key in self._known for key in keys[max(0, first - 1) : first]):
            return 0
        here = first
        while here < len(keys) and keys[here] in self._known:
            here += 1
        before = [block for key in keys[:here] if (block := self._known[key]) in self._free]
        self._reuse_last(before)
        taken: list[int] = []
        try:
            while here < len(keys) and len(self._free) > len(before) and keys[here] not in self._known:
                block = self._take_free()
                taken.append(block)
                write(block, here)
                self._key[block], self._known[keys[here]] = keys[here], block
                self._parent[block] = keys[here - 1] if here else None
                here += 1
        finally:
            for block in reversed(taken):
                self._release(block)
        self._reuse_last(before)
        return here

    def forget(self, keys: Row[bytes]) -> None:
        """Removes the blocks of these keys, and all blocks after them, from the prefix cache.

        Sequences that hold such blocks keep them.
        """
        gone = set(keys)
        for key, block in list(self._known.items()):
            if key in gone or self._parent[block] in gone:
                gone.add(key)
                self._drop_key(block)
                if not self._refs[block]:
                    self._free.move_to_end(block, last=False)
        if self._states is not None:
            self._states.forget(gone)
        if self._windows is not None:
            self._windows.forget(gone)

    def resize(self, blocks: int) -> None:
        """Hands out the first `blocks` blocks only. Nobody may hold any, and none may be known."""
        assert self.free == self.count
        assert not self._known
        self.count = blocks
        self._free = OrderedDict.fromkeys(range(blocks))

    def forget_all(self) -> None:
        """Removes all blocks and states from the prefix cache. Sequences that hold some keep them."""
        self.forget(list(self._known))
        for others in (self._states, self._windows):  # which outlive the blocks
            if others is not None:
                others.forget_all()

    def observe(self, blocks: IntArray, ids: npt.NDArray[np.int16]) -> None:
        """Adds the routing `ids` [L, T, k] to the signatures of the blocks [T] in which the tokens lie.

        Layers that did not run have -1.
        """
        ran = np.flatnonzero(ids[:, 0, 0] >= 0)
        np.add.at(self.signatures, (blocks[None, :, None], ran[:, None, None], ids[ran]), np.uint8(1))

    def _take_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._drop_key(block)
        self.signatures[block] = 0
        self._refs[block] = 1
        self._generations[block] += 1
        return block

    def _drop_key(self, block: int) -> None:
        if (key := self._key[block]) is not None:
            del self._known[key]
            self._key[block] = self._parent[block] = None

    def _reuse_last(self, chain: Row[int]) -> None:
        """Moves these free blocks, given from parent to child, to the end of the free list, the first parent last."""
        for block in reversed(chain):
            self._free.move_to_end(block)

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free[block] = None
            if self._key[block] is None:
                self._free.move_to_end(block, last=False)

    def _index_block(self, seq: Sequence, i: int, key: bytes) -> None:
        block = seq.blocks[i]
        if i and self._key[seq.blocks[i - 1]] is None:
            return  # its parent was forgotten
        shared = self._known.setdefault(key, block)
        if shared == block:
            self._key[block], self._parent[block] = key, seq.keys[i - 1] if i else None
        else:  # another sequence computed the same block meanwhile
            self._hold(shared)
            self._release(block)
            seq.blocks[i] = shared
        if self._windows is not None:
            self._windows.index(seq, i, key)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every invariant holds, given all sequences with blocks."""
        live = list(live)
        held = Counter(block for seq in live for block in seq.blocks)
        assert [held[block] for block in range(len(self._refs))] == self._refs, "reference counts are off"
        assert set(self._free) == {block for block in range(self.count) if not self._refs[block]}
        assert {key: block for block, key in enumerate(self._key) if key is not None} == self._known
        seen: set[bytes | None] = {None}
        for key, block in self._known.items():
            assert self._parent[block] in seen, "a block is known, but not its parent"
            seen.add(key)
        for seq in live:
            assert seq.computed <= min(len(seq.tokens), len(seq.blocks) * BLOCK_TOKENS)
            shared = [self._refs[block] > 1 for block in seq.blocks[seq.computed // BLOCK_TOKENS :]]
            assert not any(shared), "a block that is still being written is shared"
        assert self.signatures.max(initial=0) <= BLOCK_TOKENS
        if self._states is not None:
            self._states.check_integrity(live)
        if self._windows is not None:
            self._windows.check_integrity(live)


def extend_keys(
    keys: list[bytes], tokens: Row[int], count: int, salt: bytes, private: PrivateBlocks | None = None
) -> None:
    """Appends the keys of further full blocks of `tokens` to `keys`, up to `count` keys in all.

    Tokens with another salt have other keys, and so have `private` blocks and all behind them.
    """
    for i in range(len(keys), count):
        parent = keys[-1] if keys else salt
        if private is not None and i == private.first:
            parent = private.salt + parent
        block = _pack(*tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
        keys.append(hashlib.blake2b(parent + block, digest_size=16).digest())


class BlockStorage(Protocol):
    """Reads and writes KV blocks, or slots of states: the part of these that swapping needs."""

    def gather(self, places: list[int], /) -> torch.Tensor:
        """Returns a copy of these blocks or slots in host memory, one row each."""

    def scatter(self, places: list[int], rows: torch.Tensor, /) -> None:
        """Writes rows that `gather` returned into these blocks or slots."""


class CopyableStates(BlockStorage, Protocol):
    """Reads and writes slots of states."""

    @property
    def slot_bytes(self) -> int: ...


class CopyableWindows(BlockStorage, Protocol):
    """Reads and writes blocks of layers with windows."""

    @property
    def block_bytes(self) -> int: ...


class KVSwap:
    """Owns the host memory of paused sequences. A sequence that does not fit is computed again instead."""

    def __init__(
        self,
        kv: BlockStorage,
        blocks: BlockManager,
        block_bytes: int,
        budget_bytes: int,
        states: CopyableStates | None = None,
        windows: CopyableWindows | None = None,
    ) -> None:
        self._kv, self._states, self._windows = kv, states, windows
        self._blocks, self._block_bytes = blocks, block_bytes
        self._budget = self._room = budget_bytes

    def swap_out(self, seq: Sequence) -> bool:
        """Copies the computed blocks, window and state of `seq`. Returns False where there is no room."""
        held = seq.blocks[: blocks_for(seq.computed)]
        in_windows = seq.window_blocks[seq.window_begin : len(held)]
        size = len(held) * self._block_bytes
        size += self._states.slot_bytes if self._states else 0
        size += len(in_windows) * self._windows.block_bytes if self._windows else 0
        if not held or size > self._room:
            return False
        state = self._states.gather([seq.state]) if self._states else None
        window = SwappedWindow(seq.window_begin, self._windows.gather(in_windows)) if self._windows else None
        signatures = self._blocks.signatures[held]
        seq.swapped = SwappedBlocks(seq.computed, self._kv.gather(held), signatures, state, window, size)
        self._room -= size
        return True

    def restore(self, seq: Sequence) -> None:
        """Copies swapped blocks that the prefix cache lacks, windows and state into the new blocks of `seq`."""
        if seq.swapped is None:
            return
        tokens, rows, signatures, state, window, _ = seq.swapped
        known = blocks_for(seq.computed)
        if tokens > seq.computed:
            fresh = seq.blocks[known : len(rows)]
            self._kv.scatter(fresh, rows[known:])
            self._blocks.signatures[fresh] = signatures[known:]
            if window is not None:
                self._blocks.skip_windows(seq, window.first)
            self._blocks.prepare(seq, tokens - seq.computed, snapshots=False)
            if self._states is not None and state is not None:
                self._states.scatter([slot for _, slot in seq.next_states], state)
            if self._windows is not None and window is not None:
                begin = max(known, window.first)
                self._windows.scatter(seq.window_blocks[begin : len(rows)], window.rows[begin - window.first :])
            self._blocks.advance(seq, tokens - seq.computed)
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Frees the swapped blocks of `seq`, if it has some."""
        if seq.swapped is not None:
            self._room += seq.swapped.size_bytes
            seq.swapped = None

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the waiting sequences' swapped blocks add up to the room taken."""
        swapped = sum(seq.swapped.size_bytes for seq in waiting if seq.swapped)
        assert self._room >= 0
        assert swapped + self._room == self._budget
