"""Reads blocks and states of the prefix cache for other engines, and stores blocks and states of theirs.

A reader does not hold blocks: the compute thread may reuse a block while another thread copies it. The block's
generation then differs, and the copy is discarded. A stored block is at once an ordinary, unheld entry of the prefix
cache. So a transfer that is cut off leaves nothing behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Row
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.blocks import SUMMED, BlockManager, extend_keys
from edgemoe.engine.state_slots import StateSlots
from edgemoe.engine.window_blocks import WindowBlocks
from edgemoe.families.spec import KVLayout
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import BLOCK_TOKENS, EntryKind, last_covered

ByteArray = npt.NDArray[np.uint8]


class PrefixEntry(NamedTuple):
    """A copy of the prefix cache's entry for one key."""

    generation: int  # of the place where it lies
    data: ByteArray


class PrefixTransfer:
    """The prefix cache as other engines see it. `kv` has the blocks and slots of all three managers."""

    def __init__(
        self,
        blocks: BlockManager,
        states: StateSlots | None,
        windows: WindowBlocks | None,
        kv: Any,
        layout: KVLayout,
    ) -> None:
        self._blocks, self._states, self._windows, self._kv, self._layout = blocks, states, windows, kv, layout
        self.entry_bytes = {  # 0 where the model has no such entries
            EntryKind.BLOCK: _row_bytes(kv.data) + blocks.signatures[:1].nbytes,
            EntryKind.STATE: 0 if states is None or kv.states is None else _row_bytes(kv.states.data),
            EntryKind.WINDOW: 0 if windows is None else _row_bytes(kv.windows.data),
        }

    def encoding(self, model: str) -> str:
        """Returns a digest of the model and of how its keys, values and states lie in bytes; `model` is its digest."""
        told = repr((model, self._layout, self.entry_bytes[EntryKind.STATE], self._blocks.signatures.shape[1:]))
        if self._windows is not None:
            told += repr((self._windows.window, self.entry_bytes[EntryKind.WINDOW]))
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def keys(self, tokens: Row[int], salt: bytes) -> list[bytes]:
        """Returns the keys of the blocks that a request of this salt beginning with these tokens can reuse."""
        keys: list[bytes] = []
        extend_keys(keys, tokens, (len(tokens) - 1) // BLOCK_TOKENS, salt)
        return keys

    def private_keys(self, tokens: Row[int], salt: bytes, private_salt: bytes) -> list[bytes]:
        """Returns the keys for the same blocks, where they come for one request alone. From any thread."""
        return self._blocks.private_keys(tokens, salt, private_salt)

    def known(self, keys: Row[bytes]) -> int:
        """Counts the leading blocks of these keys that are here. From any thread."""
        return next((n for n, key in enumerate(keys) if self._blocks.find(key) is None), len(keys))

    def with_window(self, keys: Row[bytes], elsewhere: Callable[[bytes], bool] = lambda _: False) -> int:
        """Returns the most of these blocks whose last window is here, or known `elsewhere`. From any thread."""
        if (windows := self._windows) is None:
            return len(keys)

        def is_known(place: int) -> bool:
            return windows.find(keys[place]) is not None or elsewhere(keys[place])

        return last_covered(len(keys), windows.window, is_known)

    def needed_windows(self, count: int) -> range:
        """Returns of which of the first `count` blocks the windows are needed after them; of none without windows."""
        return range(0) if self._windows is None else self._windows.needed(count)

    def has(self, key: bytes, kind: EntryKind) -> bool:
        """Returns whether the entry of a kind for a block's key is here. From any thread."""
        owner = self._owner(kind)
        return owner is not None and owner.find(key) is not None

    def _owner(self, kind: EntryKind) -> BlockManager | StateSlots | WindowBlocks | None:
        return (self._blocks, self._states, self._windows)[kind]

    def read(self, key: bytes, kind: EntryKind) -> PrefixEntry | None:
        """Returns the entry of a kind for a block's key; None where it is not here. From any thread."""
        owner = self._owner(kind)
        if owner is None or (found := owner.find(key)) is None:
            return None
        place, generation = found
        data = _bytes_of(self._rows(kind).gather([place]))
        if kind == EntryKind.BLOCK:
            data = np.concatenate([data, self._blocks.signatures[place].reshape(-1)])
        return PrefixEntry(generation, data) if owner.find(key) == found else None

    def signature(self, tokens: Row[int], salt: bytes) -> tuple[int, IntArray]:
        """Returns the number of a prompt's tokens in cached leading blocks, and these blocks' expert counts [L, E].

        From any thread. A block that is reused meanwhile counts as missing, so that the counts are exact. Blocks count
        as far as the window after them is here.
        """
        blocks, keys, here = self._blocks, list[bytes](), 0
        total: IntArray = np.zeros(blocks.signatures.shape[1:], np.int64)
        most = (len(tokens) - 1) // BLOCK_TOKENS
        while here == len(keys) < most:
            extend_keys(keys, tokens, min(most, here + SUMMED), salt)
            found = list(takewhile(bool, map(blocks.find, keys[here:])))
            part = blocks.total([place for place, _ in filter(None, found)])
            if [blocks.find(key) for key in keys[here : here + len(found)]] != found:
                break
            total += part
            here += len(found)
        if (usable := self.with_window(keys[:here])) < here:
            places = list(takewhile(bool, map(blocks.find, keys[:usable])))
            here, total = len(places), blocks.total([place for place, _ in filter(None, places)])
        return here * BLOCK_TOKENS, total

    def take_in(self, keys: Row[bytes], data: ByteArray, kind: EntryKind) -> bool:
        """Stores another engine's entry for the last of `keys`. Returns False where there is no place for it.

        On the compute thread, between steps.
        """

        owner = self._owner(kind)
        if owner is None:
            return False
        return owner.adopt(keys, lambda place: self._write(kind, place, data))

    def take_in_run(self, keys: Row[bytes], first: int, entries: Row[ByteArray]) -> int:
        """Stores blocks for keys[first:], which come after blocks that are here; see BlockManager.adopt_run.

        On the compute thread, between steps.
        """
        return self._blocks.adopt_run(
            keys[: first + len(entries)],
            first,
            lambda block, i: self._write(EntryKind.BLOCK, block, entries[i - first]),
        )

    def _write(self, kind: EntryKind, place: int, data: ByteArray) -> None:
        rows = self._rows(kind)
        split = _row_bytes(rows.data)
        rows.scatter([place], _rows_like(rows.data, data[:split]))
        if kind == EntryKind.BLOCK:
            signatures = self._blocks.signatures
            signatures[place] = data[split:].reshape(signatures.shape[1:])

    def _rows(self, kind: EntryKind) -> Any:
        """Returns the part of the cache with the entries of a kind."""
        if kind == EntryKind.STATE:
            return self._kv.states
        return self._kv.windows if kind == EntryKind.WINDOW else self._kv


def _rows_like(rows: torch.Tensor, data: ByteArray) -> torch.Tensor:
    return torch.from_numpy(data).view(rows.dtype).reshape(1, *rows.shape[1:])


def _row_bytes(rows: torch.Tensor) -> int:
    return rows[:1].numel() * rows.element_size()


def _bytes_of(row: torch.Tensor) -> ByteArray:
    data: ByteArray = row.contiguous().view(-1).view(torch.uint8).numpy()
    return data
