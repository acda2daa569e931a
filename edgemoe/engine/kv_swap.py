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
    """The part of the KV cache that parking needs."""

    def gather(self, blocks: list[int]) -> torch.Tensor:
        """A copy of these blocks in host memory, one row each."""

    def scatter(self, blocks: list[int], rows: torch.Tensor) -> None:
        """Writes rows that `gather` returned into these blocks."""


class SwappedBlocks(NamedTuple):
    """What a paused sequence had computed."""

    tokens: int
    rows: torch.Tensor  # [n, ...] a KV block each
    signatures: npt.NDArray[np.uint8]  # [n, L, E]


class KVSwap:
    """Owner of parked keys and values. Where they do not fit, the sequence is computed again."""

    def __init__(self, kv: Copyable, blocks: BlockManager, block_bytes: int, budget_bytes: int) -> None:
        self._kv = kv
        self._blocks = blocks
        self._budget = self._room = budget_bytes // block_bytes  # blocks

    def park(self, seq: Sequence) -> bool:
        """Copies what `seq` has computed; false where there is no room for it."""
        held = seq.blocks[: blocks_for(seq.computed)]
        if not held or len(held) > self._room:
            return False
        seq.parked = SwappedBlocks(seq.computed, self._kv.gather(held), self._blocks.signatures[held])
        self._room -= len(held)
        return True

    def restore(self, seq: Sequence) -> None:
        """Puts parked blocks that the prefix cache did not supply into the blocks that `seq` was given."""
        if seq.parked is None:
            return
        tokens, rows, signatures = seq.parked
        known = blocks_for(seq.computed)
        if tokens > seq.computed:
            fresh = seq.blocks[known : len(rows)]
            self._kv.scatter(fresh, rows[known:])
            self._blocks.signatures[fresh] = signatures[known:]
            self._blocks.advance(seq, tokens - seq.computed)
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Forgets what is parked of `seq`."""
        if seq.parked is not None:
            self._room += len(seq.parked.rows)
            seq.parked = None

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Asserts that exactly the waiting sequences account for the room taken."""
        parked = sum(len(seq.parked.rows) for seq in waiting if seq.parked)
        assert self._room >= 0
        assert parked + self._room == self._budget
