"""Blocks of layers with windows: who holds each, and which ones stay findable (see docs/design/engine.md).

A sequence holds the blocks that its next tokens see, and gives back those behind them. A full block has the key of the
block that its tokens have in the other layers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Row
from itertools import chain

from edgemoe.engine.sequence import Sequence, blocks_for
from edgemoe.telemetry import metrics as names
from edgemoe.types.step import BLOCK_TOKENS, first_kept, first_seen, last_covered, least_blocks, most_kept

NOTHING = 0  # the block of zeros, which nobody writes; it stands for those before a sequence's own


class WindowBlocks:
    """Owns the blocks of layers with windows. A block that nobody holds is reused when its memory is needed.

    Passed blocks come first. Blocks before a place at which another prompt may go on come last, the least recently used
    ones first.
    """

    def __init__(self, blocks: int, window: int) -> None:
        """Serves windows of `window` tokens. There must be more blocks than one sequence holds while it computes."""
        assert blocks >= least_blocks(window), "there are too few blocks"
        self.count, self.window = blocks, window
        self.most = most_kept(window)  # blocks of a sequence between two steps
        self._refs = [1] + [0] * (blocks - 1)
        self._generations = [0] * blocks  # how often each was taken
        self._key: list[bytes | None] = [None] * blocks
        self._known: dict[bytes, int] = {}
        self._passed: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))  # the next one to be reused first
        self._kept: OrderedDict[int, None] = OrderedDict()  # the same

    # --- questions

    @property
    def free(self) -> int:
        """Counts blocks that no sequence holds, blocks of the prefix cache included."""
        return len(self._passed) + len(self._kept)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of blocks by metric name. May be called while a step runs."""
        return {names.WINDOW_BLOCKS: self.count, names.WINDOW_BLOCKS_REFERENCED: self.count - self.free}

    def covered(self, keys: Row[bytes]) -> int:
        """Returns the largest number of leading blocks of these keys whose last window is known."""
        return last_covered(len(keys), self.window, lambda place: keys[place] in self._known)

    def needed(self, count: int) -> range:
        """Returns the blocks that the token after `count` blocks sees."""
        return range(first_seen(count * BLOCK_TOKENS, self.window), count)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Returns the block known by `key`, and its generation; see BlockManager.find."""
        block = self._known.get(key)
        if block is None:
            return None
        generation = self._generations[block]
        return (block, generation) if self._known.get(key) == block else None

    def lacking(self, seq: Sequence, tokens: int) -> int:
        """Counts the free blocks that `seq` takes until it has `tokens` tokens, computed in steps of a block."""
        return max(0, min(self.most, blocks_for(tokens)) - self._held(seq))

    def capacity(self, seq: Sequence) -> int:
        """Returns how many tokens `seq` may have with all free blocks."""
        return (len(seq.window_blocks) + self.free) * BLOCK_TOKENS

    # --- changes

    def adopt(self, keys: Row[bytes], write: Callable[[int], None]) -> bool:
        """Has `write` fill a free block with a copy for the last of `keys`. Returns False where none is free."""
        if keys[-1] in self._known:
            return True
        if not self.free:
            return False
        block = self._take_free()
        try:
            write(block)
            self._key[block], self._known[keys[-1]] = keys[-1], block
        finally:
            self._release(block, kept=True)
        return True

    def resize(self, blocks: int) -> None:
        """Hands out the first `blocks` blocks only. Nobody may hold any, and none may be known."""
        assert self.free == self.count - 1
        assert not self._known
        self.count = blocks
        self._passed, self._kept = OrderedDict.fromkeys(range(1, blocks)), OrderedDict()

    def resume(self, seq: Sequence, keys: Row[bytes], branch: int) -> None:
        """Gives `seq` the last window of the blocks with these keys, which is known.

        Its first `branch` blocks are another prompt's, too. So the window there is kept, as that of its prompt's end.
        """
        needed = self.needed(len(keys))
        held = [self._known[key] for key in keys[needed.start :]]
        for block in held:
            self._hold(block)
        seq.window_begin = needed.start
        seq.window_blocks = [NOTHING] * needed.start + held
        seq.window_places = branch, (seq.prompt_tokens - 1) // BLOCK_TOKENS

    def extend(self, seq: Sequence, tokens: int) -> None:
        """Gives `seq` blocks for `tokens` tokens."""
        while len(seq.window_blocks) * BLOCK_TOKENS < tokens:
            seq.window_blocks.append(self._take_free())

    def skip(self, seq: Sequence, first: int) -> None:
        """Takes the blocks before `first` from `seq`, which gets no others for them."""
        self._pass(seq, first)
        seq.window_blocks += [NOTHING] * (first - len(seq.window_blocks))
        seq.window_begin = max(first, seq.window_begin)

    def index(self, seq: Sequence, i: int, key: bytes) -> None:
        """Remembers a full block of `seq` by its key, or swaps it for the one that is known by it."""
        if i < seq.window_begin:
            return
        block = seq.window_blocks[i]
        shared = self._known.setdefault(key, block)
        if shared == block:
            self._key[block] = key
        else:
            self._hold(shared)
            self._release(block, kept=False)
            seq.window_blocks[i] = shared

    def advance(self, seq: Sequence) -> None:
        """Takes the blocks from `seq` that its tokens no longer see."""
        self._pass(seq, first_kept(seq.computed, self.window))

    def trim(self, seq: Sequence, tokens: int) -> None:
        """Takes the blocks behind the first `tokens` tokens from `seq`."""
        while len(seq.window_blocks) > max(blocks_for(tokens), seq.window_begin):
            self._release(seq.window_blocks.pop(), kept=False)

    def close(self, seq: Sequence) -> None:
        """Releases all blocks of `seq`."""
        for block in seq.window_blocks[seq.window_begin :]:
            self._release(block, kept=True)
        seq.window_blocks, seq.window_begin, seq.window_places = [], 0, ()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Removes the blocks with these keys from the prefix cache."""
        for block in [self._known[key] for key in keys if key in self._known]:
            self._drop_key(block)
            if not self._refs[block]:
                self._kept.pop(block, None)
                self._passed[block] = None
                self._passed.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Removes all blocks from the prefix cache."""
        self.forget(list(self._known))

    def _held(self, seq: Sequence) -> int:
        return len(seq.window_blocks) - seq.window_begin

    def _pass(self, seq: Sequence, first: int) -> None:
        for i in range(seq.window_begin, min(first, len(seq.window_blocks))):
            kept = any(i in self.needed(place) for place in seq.window_places)
            self._release(seq.window_blocks[i], kept)
            seq.window_blocks[i] = NOTHING
            seq.window_begin = i + 1

    def _take_free(self) -> int:
        block, _ = (self._passed or self._kept).popitem(last=False)
        self._drop_key(block)
        self._refs[block] = 1
        self._generations[block] += 1
        return block

    def _drop_key(self, block: int) -> None:
        if (key := self._key[block]) is not None:
            del self._known[key]
            self._key[block] = None

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            self._kept.pop(block, None)
            self._passed.pop(block, None)
        self._refs[block] += 1

    def _release(self, block: int, kept: bool) -> None:
        self._refs[block] -= 1
        if self._refs[block]:
            return
        known = self._key[block] is not None
        (self._kept if kept and known else self._passed)[block] = None
        if not known:
            self._passed.move_to_end(block, last=False)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every invariant holds, given all sequences with blocks."""
        live = list(live)
        held = Counter(chain([NOTHING], *(seq.window_blocks[seq.window_begin :] for seq in live)))
        assert [held[block] for block in range(len(self._refs))] == self._refs, "reference counts are off"
        assert {*self._passed, *self._kept} == {block for block in range(self.count) if not self._refs[block]}
        assert not set(self._passed) & set(self._kept)
        assert {key: block for block, key in enumerate(self._key) if key is not None} == self._known
        for seq in live:
            assert set(seq.window_blocks[: seq.window_begin]) <= {NOTHING}
            assert seq.window_begin <= first_seen(seq.computed, self.window), "a block is missing"
            assert seq.computed <= len(seq.window_blocks) * BLOCK_TOKENS
            written = seq.window_blocks[max(seq.window_begin, seq.computed // BLOCK_TOKENS) :]
            assert all(self._refs[block] == 1 for block in written), "a block that is still being written is shared"
