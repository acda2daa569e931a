"""Keys and values of paused sequences, kept in host memory within a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.sequence import Sequence, blocks_for


class Copyable(Protocol):
    """Reads and writes KV blocks: the part of the KV cache that swapping needs."""

    def gather(self, blocks: list[int]) -> torch.Tensor:
        """Returns a copy of these blocks in host memory, one row each."""

    def scatter(self, blocks: list[int], rows: torch.Tensor) -> None:
        """Writes rows that `gather` returned into these blocks."""


class SwappedBlocks(NamedTuple):
    """The keys, values and signatures that a paused sequence had computed."""

    tokens: int
    rows: torch.Tensor  # [n, ...] a KV block each
    signatures: npt.NDArray[np.uint8]  # [n, L, E]


class KVSwap:
    """Owns swapped keys and values. A sequence that does not fit is computed again instead."""

    def __init__(self, kv: Copyable, blocks: BlockManager, block_bytes: int, budget_bytes: int) -> None:
        self._kv = kv
        self._blocks = blocks
        self._budget = self._room = budget_bytes // block_bytes  # blocks

    def swap_out(self, seq: Sequence) -> bool:
        """Copies the computed blocks of `seq` to host memory. Returns False where there is no room for them."""
        held = seq.blocks[: blocks_for(seq.computed)]
        if not held or len(held) > self._room:
            return False
        seq.swapped = SwappedBlocks(seq.computed, self._kv.gather(held), self._blocks.signatures[held])
        self._room -= len(held)
        return True

    def restore(self, seq: Sequence) -> None:
        """Copies the swapped blocks that the prefix cache did not supply into the new blocks of `seq`."""
        if seq.swapped is None:
            return
        tokens, rows, signatures = seq.swapped
        known = blocks_for(seq.computed)
        if tokens > seq.computed:
            fresh = seq.blocks[known : len(rows)]
            self._kv.scatter(fresh, rows[known:])
            self._blocks.signatures[fresh] = signatures[known:]
            self._blocks.advance(seq, tokens - seq.computed)
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Frees what is swapped out of `seq`, if anything is."""
        if seq.swapped is not None:
            self._room += len(seq.swapped.rows)
            seq.swapped = None

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Asserts that the waiting sequences' swapped blocks add up to the room taken."""
        swapped = sum(len(seq.swapped.rows) for seq in waiting if seq.swapped)
        assert self._room >= 0
        assert swapped + self._room == self._budget
