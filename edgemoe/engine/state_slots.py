"""State slots: who holds each, and the states that the prefix cache keeps (see docs/design/engine.md).

A written slot is immutable: a step reads one slot and writes another. A state at the end of a block has the block's key
and stays findable until its slot is needed, the least recently used first. A step also writes intermediate states.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Row

from edgemoe.engine.sequence import Sequence
from edgemoe.types.step import BLOCK_TOKENS

SNAPSHOT_BLOCKS = 32
BEGINNING = 0  # the slot of the state before the first token, which nobody writes


class StateSlots:
    """Owns the slots of states. A running sequence holds one, and another while a step is prepared or runs.

    The slots beyond these keep snapshots. Without any, a prefix is never reused.
    """

    def __init__(self, slots: int, sequences: int) -> None:
        """Serves at most `sequences` sequences at a time, for which `slots` must be at least 2 * sequences + 1."""
        assert slots > 2 * sequences, "there are too few slots"
        self.count = slots
        self._spare = slots - 1 - 2 * sequences  # slots for intermediate states
        self._on_the_way = 0  # slots taken for intermediate states of prepared steps
        self._refs = [1] + [0] * (slots - 1)
        self._generations = [0] * slots  # how often each was taken
        self._key: list[bytes | None] = [None] * slots
        self._known: dict[bytes, int] = {}
        self._depths = Counter[int]()  # of the known states: blocks before them
        self._depth = [0] * slots
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, slots))  # the next one to be reused first

    # --- questions

    def covered(self, keys: Row[bytes]) -> int:
        """Returns the largest number of leading blocks of these keys after which a state is known."""
        depths = (depth for depth in self._depths if depth <= len(keys) and keys[depth - 1] in self._known)
        return max(depths, default=0)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Returns the slot of the state after the block with this key, and its generation; see BlockManager.find."""
        slot = self._known.get(key)
        if slot is None:
            return None
        generation = self._generations[slot]
        return (slot, generation) if self._known.get(key) == slot else None

    # --- changes

    def adopt(self, keys: Row[bytes], write: Callable[[int], None]) -> bool:
        """Has `write` fill a free slot with the state after these blocks. Returns False where none is free."""
        if keys[-1] in self._known:
            return True
        if not self._free:
            return False
        slot = self._take_free()
        try:
            write(slot)
            self._index(slot, keys)
        finally:
            self._release(slot)
        return True

    def resize(self, slots: int, sequences: int) -> None:
        """Hands out the first `slots` slots only. Nobody may hold any, and none may be known."""
        assert len(self._free) == self.count - 1
        assert not self._known
        self.count, self._spare = slots, slots - 1 - 2 * sequences
        self._free = OrderedDict.fromkeys(range(1, slots))

    def resume(self, seq: Sequence, keys: Row[bytes]) -> None:
        """Gives `seq` the state after the blocks with these keys, which is known; without blocks the first one."""
        seq.state = self._known[keys[-1]] if keys else BEGINNING
        self._hold(seq.state)

    def prepare(self, seq: Sequence, tokens: int, snapshots: bool) -> None:
        """Takes slots for the states that the next `tokens` tokens of `seq` lead to, in place of earlier ones."""
        self._withdraw(seq)
        for place in places_on_the_way(seq, tokens) if snapshots else ():
            if self._on_the_way < self._spare:
                self._on_the_way += 1
                seq.next_states.append((place - seq.computed, self._take_free()))
        seq.next_states.append((tokens, self._take_free()))

    def advance(self, seq: Sequence, keys: Row[bytes]) -> None:
        """Gives `seq`, whose full blocks have these keys, the states that were prepared and computed."""
        before = seq.computed - seq.next_states[-1][0]
        self._release(seq.state)
        for tokens, slot in seq.next_states:
            depth, rest = divmod(before + tokens, BLOCK_TOKENS)
            if not rest and depth <= len(keys):
                self._remember(seq, slot, depth, keys)
        for _, slot in seq.next_states[:-1]:
            self._release(slot)
        self._on_the_way -= len(seq.next_states) - 1
        seq.state, seq.next_states = seq.next_states[-1][1], []

    def close(self, seq: Sequence) -> None:
        """Releases all slots of `seq`."""
        self._withdraw(seq)
        self._release(seq.state)
        seq.state, seq.snapshot = BEGINNING, 0

    def forget(self, keys: Iterable[bytes]) -> None:
        """Removes the states after the blocks with these keys from the prefix cache."""
        for slot in [self._known[key] for key in keys if key in self._known]:
            self._forget(slot)
            if not self._refs[slot]:
                self._free.move_to_end(slot, last=False)

    def forget_all(self) -> None:
        """Removes all states from the prefix cache."""
        self.forget(list(self._known))

    def _withdraw(self, seq: Sequence) -> None:
        for _, slot in seq.next_states:
            self._release(slot)
        self._on_the_way -= max(0, len(seq.next_states) - 1)
        seq.next_states = []

    def _take_free(self) -> int:
        slot, _ = self._free.popitem(last=False)
        self._forget(slot)
        self._refs[slot] = 1
        self._generations[slot] += 1
        return slot

    def _hold(self, slot: int) -> None:
        if self._refs[slot] == 0:
            del self._free[slot]
        self._refs[slot] += 1

    def _release(self, slot: int) -> None:
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self._free[slot] = None
            if self._key[slot] is None:
                self._free.move_to_end(slot, last=False)

    def _remember(self, seq: Sequence, slot: int, depth: int, keys: Row[bytes]) -> None:
        if keys[depth - 1] in self._known:
            return
        self._index(slot, keys[:depth])
        former = None if is_kept(seq, seq.snapshot) else self._known.get(keys[seq.snapshot - 1])
        if former is not None and self._refs[former] == 0:
            self._forget(former)
            self._free.move_to_end(former, last=False)
        seq.snapshot = depth

    def _index(self, slot: int, keys: Row[bytes]) -> None:
        self._key[slot], self._depth[slot] = keys[-1], len(keys)
        self._known[keys[-1]] = slot
        self._depths[len(keys)] += 1

    def _forget(self, slot: int) -> None:
        if (key := self._key[slot]) is None:
            return
        del self._known[key]
        self._key[slot] = None
        self._depths[self._depth[slot]] -= 1
        self._depths += Counter()  # drops zeros

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every invariant holds, given all running sequences."""
        live = list(live)
        held = Counter([BEGINNING, *(seq.state for seq in live)])
        pending = Counter(slot for seq in live for _, slot in seq.next_states)
        assert [(held + pending)[slot] for slot in range(len(self._refs))] == self._refs, "reference counts are off"
        assert not any(self._key[slot] or held[slot] or count > 1 for slot, count in pending.items())
        assert set(self._free) == {slot for slot in range(self.count) if not self._refs[slot]}
        assert {key: slot for slot, key in enumerate(self._key) if key is not None} == self._known
        assert self._depths == Counter(self._depth[slot] for slot in self._known.values())
        assert self._on_the_way == sum(max(0, len(seq.next_states) - 1) for seq in live) <= self._spare
        for seq in live:
            assert (seq.state == BEGINNING) == (seq.computed == 0)


def is_kept(seq: Sequence, depth: int) -> bool:
    """Returns whether the state after `depth` blocks is kept when the sequence has gone on; 0 blocks have none."""
    return depth % SNAPSHOT_BLOCKS == 0 or depth == (seq.prompt_tokens - 1) // BLOCK_TOKENS


def places_on_the_way(seq: Sequence, tokens: int) -> list[int]:
    """Returns the places in `seq` at which a step of `tokens` writes states, without its end."""
    begin, end = seq.computed // BLOCK_TOKENS, (seq.computed + tokens - 1) // BLOCK_TOKENS
    last = (seq.computed + tokens) // BLOCK_TOKENS
    return [depth * BLOCK_TOKENS for depth in range(begin + 1, end + 1) if depth == last or is_kept(seq, depth)]
