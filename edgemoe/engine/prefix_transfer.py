"""Reads blocks and states of the prefix cache for other engines, and stores blocks and states of theirs.

A reader does not hold blocks: the compute thread may reuse a block while another thread copies it. The block's
generation then differs, and the copy is discarded. A stored block is at once an ordinary, unheld entry of the prefix
cache. So a transfer that is cut off leaves nothing behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Row
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.blocks import SUMMED, BlockManager, extend_keys
from edgemoe.engine.state_slots import StateSlots
from edgemoe.families.spec import KVLayout
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import BLOCK_TOKENS

ByteArray = npt.NDArray[np.uint8]


class PrefixEntry(NamedTuple):
    """A copy of the prefix cache's entry for one key."""

    generation: int  # of the place where it lies
    data: ByteArray  # keys and values of a block, then its signature; or a state


class PrefixTransfer:
    """The prefix cache as other engines see it. `kv` has as many blocks as the manager, and a slot for each state."""

    def __init__(self, blocks: BlockManager, states: StateSlots | None, kv: Any, layout: KVLayout) -> None:
        self._blocks, self._states, self._kv, self._layout = blocks, states, kv, layout

    def encoding(self, model: str) -> str:
        """Returns a digest of the model and of how its keys, values and states lie in bytes; `model` is its digest."""
        told = repr((model, self._layout, self.state_bytes, self._blocks.signatures.shape[1:]))
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def keys(self, tokens: Row[int], salt: bytes) -> list[bytes]:
        """Returns the keys of the blocks that a request of this salt beginning with these tokens can reuse."""
        keys: list[bytes] = []
        extend_keys(keys, tokens, (len(tokens) - 1) // BLOCK_TOKENS, salt)
        return keys

    def private_keys(self, tokens: Row[int], salt: bytes, private_salt: bytes) -> list[bytes]:
        """Returns the keys for the same blocks, where they come for one request alone. From any thread."""
        return self._blocks.private_keys(tokens, salt, private_salt)

    @property
    def block_bytes(self) -> int:
        """Returns the size of a block's entry."""
        return _row_bytes(self._kv.data) + self._blocks.signatures[:1].nbytes

    @property
    def state_bytes(self) -> int:
        """Returns the size of a state; 0 where the model has none."""
        return 0 if self._states is None else _row_bytes(self._kv.states.data)

    def known(self, keys: Row[bytes]) -> int:
        """Counts the leading blocks of these keys that are here. From any thread."""
        return next((n for n, key in enumerate(keys) if self._blocks.find(key) is None), len(keys))

    def has(self, key: bytes, state: bool) -> bool:
        """Returns whether the block known by `key` is here, or the state after it. From any thread."""
        owner = self._states if state else self._blocks
        return owner is not None and owner.find(key) is not None

    def read(self, key: bytes, state: bool) -> PrefixEntry | None:
        """Returns the block known by `key`, or the state after it; None where it is not here. From any thread."""
        owner = self._states if state else self._blocks
        if owner is None or (found := owner.find(key)) is None:
            return None
        place, generation = found
        if state:
            data = _bytes_of(self._kv.states.gather([place]))
        else:
            data = np.concatenate([_bytes_of(self._kv.gather([place])), self._blocks.signatures[place].reshape(-1)])
        return PrefixEntry(generation, data) if owner.find(key) == found else None

    def signature(self, tokens: Row[int], salt: bytes) -> tuple[int, IntArray]:
        """Returns the number of a prompt's tokens in cached leading blocks, and these blocks' expert counts [L, E].

        From any thread. A block that is reused meanwhile counts as missing, so that the counts are exact.
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
        return here * BLOCK_TOKENS, total

    def take_in(self, keys: Row[bytes], data: ByteArray, state: bool) -> bool:
        """Stores another engine's entry for the last of `keys`. Returns False where there is no place for it.

        On the compute thread, between steps.
        """

        def write_state(slot: int) -> None:
            self._kv.states.scatter([slot], _rows_like(self._kv.states.data, data))

        if state:
            return self._states is not None and self._states.adopt(keys, write_state)
        return self._blocks.adopt(keys, lambda block: self._write_block(block, data))

    def take_in_run(self, keys: Row[bytes], first: int, entries: Row[ByteArray]) -> int:
        """Stores blocks for keys[first:], which come after blocks that are here; see BlockManager.adopt_run.

        On the compute thread, between steps.
        """
        return self._blocks.adopt_run(
            keys[: first + len(entries)], first, lambda block, i: self._write_block(block, entries[i - first])
        )

    def _write_block(self, block: int, data: ByteArray) -> None:
        signatures, split = self._blocks.signatures, _row_bytes(self._kv.data)
        self._kv.scatter([block], _rows_like(self._kv.data, data[:split]))
        signatures[block] = data[split:].reshape(signatures.shape[1:])


def _rows_like(rows: torch.Tensor, data: ByteArray) -> torch.Tensor:
    return torch.from_numpy(data).view(rows.dtype).reshape(1, *rows.shape[1:])


def _row_bytes(rows: torch.Tensor) -> int:
    return rows[:1].numel() * rows.element_size()


def _bytes_of(row: torch.Tensor) -> ByteArray:
    data: ByteArray = row.contiguous().view(-1).view(torch.uint8).numpy()
    return data
