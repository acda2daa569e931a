"""Blocks of layers with windows against a model that remembers everything."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from support.examples import examples
from test_blocks import EXPERTS, LAYERS, Blocks, Memory, sequence

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.sequence import Sequence
from edgemoe.engine.window_blocks import WindowBlocks
from edgemoe.types.step import BLOCK_TOKENS, first_seen, last_covered, least_blocks, most_kept

WINDOW = 20
COUNT = least_blocks(WINDOW) + 3


class WindowMemory(Memory):
    """The same for layers with windows, whose first block stays as it is."""

    block_bytes = 1

    def scatter(self, blocks: list[int], rows: Any) -> None:
        assert 0 not in blocks
        super().scatter(blocks, rows)


class BlocksAndWindows(Blocks):
    """A cache each of whose window's places stores the prefix that ends there."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = WindowMemory(COUNT)
        self.blocks = BlockManager(12, LAYERS, EXPERTS, windows=WindowBlocks(COUNT, WINDOW))
        self.kv_swap._blocks, self.kv_swap._windows = self.blocks, self.windows
        self.kv_swap._budget = self.kv_swap._room = 16

    @rule(seq=Blocks.live)
    def open(self, seq: Sequence) -> None:
        if self.blocks.fits_window(seq, [(other, 100) for other in self.sequences if other.blocks]):
            super().open(seq)

    @rule(seq=Blocks.live, count=st.integers(1, 40))
    def prepare(self, seq: Sequence, count: int) -> None:
        """Prepares a step that fails after it has written."""
        count = min(count, self.blocks.computable(seq)) if seq.blocks else 0
        if count > 0:
            self.blocks.prepare(seq, count)
            self._write(seq, count, spoiled=True)

    @rule(seq=Blocks.live, count=st.integers(1, 40))
    def compute(self, seq: Sequence, count: int) -> None:
        count = min(count, self.blocks.computable(seq)) if seq.blocks else 0
        if count > 0:
            self.blocks.prepare(seq, count)
            self._write(seq, count)
            super().compute(seq, count)

    def _write(self, seq: Sequence, count: int, spoiled: bool = False) -> None:
        for at in range(seq.computed, seq.computed + count):
            block = seq.window_blocks[at // BLOCK_TOKENS]
            assert block, "the block of zeros is written"
            self.windows.places[block][at % BLOCK_TOKENS] = None if spoiled else tuple(seq.tokens[: at + 1])

    @precondition(lambda self: self.sequences)
    @invariant()
    def windows_hold_their_sequences_past(self) -> None:
        for seq in self.sequences:
            for at in range(max(0, seq.computed + 1 - WINDOW) if seq.blocks else seq.computed, seq.computed):
                block = seq.window_blocks[at // BLOCK_TOKENS]
                assert self.windows.places[block][at % BLOCK_TOKENS] == tuple(seq.tokens[: at + 1])

    @invariant()
    def known_blocks_are_whole(self) -> None:
        windows = self.blocks._windows
        assert windows is not None
        for key, block in windows._known.items():
            last = self.windows.places[block][-1]
            assert last is not None
            assert self.blocks.keys(sequence(list(last)), len(last) // BLOCK_TOKENS)[-1] == key


BlocksAndWindows.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=50, deadline=None)
TestBlocksAndWindows = BlocksAndWindows.TestCase


def test_a_prefix_is_covered_where_the_next_tokens_window_is_known() -> None:
    for window in (1, 15, 16, 17, 20, 33, 100):
        for gap in range(12):
            covered = last_covered(12, window, lambda place, gap=gap: place != gap)  # type: ignore[misc]
            seen = [range(first_seen(count * BLOCK_TOKENS, window), count) for count in range(13)]
            assert covered == max(count for count in range(13) if gap not in seen[count])


def test_no_sequence_keeps_more_blocks_than_counted() -> None:
    for window in (1, 16, 20, 128, 1000):
        windows = WindowBlocks(200, window)
        seq = sequence([1] * 2000)
        held = 0
        for _ in range(1900):
            windows.extend(seq, seq.computed + 1)
            held = max(held, 199 - windows.free)
            seq.computed += 1
            windows.advance(seq)
        assert held <= most_kept(window)
