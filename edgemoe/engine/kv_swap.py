"""Keys, values and states of paused sequences, kept in host memory within a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.sequence import Sequence, SwappedBlocks, blocks_for


class Copyable(Protocol):
    """Reads and writes KV blocks, or slots of states: the part of these that swapping needs."""

    def gather(self, places: list[int], /) -> torch.Tensor:
        """Returns a copy of these blocks or slots in host memory, one row each."""

    def scatter(self, places: list[int], rows: torch.Tensor, /) -> None:
        """Writes rows that `gather` returned into these blocks or slots."""


class CopyableStates(Copyable, Protocol):
    """Reads and writes slots of states."""

    @property
    def slot_bytes(self) -> int: ...


class KVSwap:
    """Owns what is swapped out. A sequence that does not fit is computed again instead."""

    def __init__(
        self,
        kv: Copyable,
        blocks: BlockManager,
        block_bytes: int,
        budget_bytes: int,
        states: CopyableStates | None = None,
    ) -> None:
        self._kv, self._states = kv, states
        self._blocks = blocks
        self._budget = self._room = budget_bytes // block_bytes  # blocks
        self._state_size = 0 if states is None else -(-states.slot_bytes // block_bytes)  # blocks

    def swap_out(self, seq: Sequence) -> bool:
        """Copies the computed blocks and the state of `seq` to host memory. Returns False where there is no room."""
        held = seq.blocks[: blocks_for(seq.computed)]
        size = len(held) + self._state_size
        if not held or size > self._room:
            return False
        state = self._states.gather([seq.state]) if self._states else None
        signatures = self._blocks.signatures[held]
        seq.swapped = SwappedBlocks(seq.computed, self._kv.gather(held), signatures, state, size)
        self._room -= size
        return True

    def restore(self, seq: Sequence) -> None:
        """Copies what is swapped out and the prefix cache did not supply into the new blocks and state of `seq`."""
        if seq.swapped is None:
            return
        tokens, rows, signatures, state, _ = seq.swapped
        known = blocks_for(seq.computed)
        if tokens > seq.computed:
            fresh = seq.blocks[known : len(rows)]
            self._kv.scatter(fresh, rows[known:])
            self._blocks.signatures[fresh] = signatures[known:]
            self._blocks.prepare(seq, tokens - seq.computed, snapshots=False)
            if self._states is not None and state is not None:
                self._states.scatter([slot for _, slot in seq.next_states], state)
            self._blocks.advance(seq, tokens - seq.computed)
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Frees what is swapped out of `seq`, if anything is."""
        if seq.swapped is not None:
            self._room += seq.swapped.size
            seq.swapped = None

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Asserts that the waiting sequences' swapped blocks add up to the room taken."""
        swapped = sum(seq.swapped.size for seq in waiting if seq.swapped)
        assert self._room >= 0
        assert swapped + self._room == self._budget
