"""Block tables, prefix cache and signatures against a model that remembers everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from support.examples import examples

from edgemoe.engine.blocks import BlockManager, KVSwap, extend_keys
from edgemoe.engine.sequence import Sequence, blocks_for
from edgemoe.types.request import Request, Sampling
from edgemoe.types.step import BLOCK_TOKENS

LAYERS, EXPERTS, TOP_K = 2, 5, 2


def sequence(tokens: list[int], name: str = "r") -> Sequence:
    request = Request(id=name, prompt=tuple(tokens), sampling=Sampling(), seed=0)
    return Sequence(request, (), 1, 0.0, 1e9)


def routing(prefix: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns distinct experts [L, k] for the prefix's last token, as a gate that sees the whole prefix."""
    random = np.random.default_rng([len(prefix), *prefix])
    return np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)]).astype(np.int16)


def signature(tokens: list[int]) -> np.ndarray[Any, Any]:
    """Computes the reference: each token's experts, counted one by one."""
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    for end in range(1, len(tokens) + 1):
        for layer, experts in enumerate(routing(tuple(tokens[:end]))):
            counts[layer, experts] += 1
    return counts


class Memory:
    """A KV cache that stores, in each token's place, the whole prefix that ends with the token."""

    def __init__(self, blocks: int) -> None:
        self.places: list[list[tuple[int, ...] | None]] = [[None] * BLOCK_TOKENS for _ in range(blocks)]

    def gather(self, blocks: list[int]) -> Any:
        return [list(self.places[block]) for block in blocks]

    def scatter(self, blocks: list[int], rows: Any) -> None:
        for block, row in zip(blocks, rows, strict=True):
            self.places[block] = list(row)


class Blocks(RuleBasedStateMachine):
    """Sequences over a tiny alphabet, so that many prefixes are equal, in too few blocks."""

    live: Any = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, LAYERS, EXPERTS)
        self.memory = Memory(12)
        self.kv_swap = KVSwap(self.memory, self.blocks, block_bytes=1, budget_bytes=6)
        self.sequences: list[Sequence] = []

    @rule(target=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=70))
    def arrive(self, tokens: list[int]) -> Sequence:
        # long runs of the same token, so that whole blocks are equal
        seq = sequence([tokens[0]] * (len(tokens) // 2) + tokens[len(tokens) // 2 :])
        self.sequences.append(seq)
        return seq

    @rule(seq=live)
    def open(self, seq: Sequence) -> None:
        if not seq.blocks and seq in self.sequences and self.blocks.needs(seq) <= self.blocks.free:
            self.blocks.open(seq)
            assert seq.computed < len(seq.tokens), "at least one token is left to compute"
            self.kv_swap.restore(seq)

    @rule(seq=live, count=st.integers(1, 40))
    def compute(self, seq: Sequence, count: int) -> None:
        count = min(count, seq.uncomputed)
        if not seq.blocks or not count:
            return
        span = range(seq.computed, seq.computed + count)
        places = [seq.blocks[at // BLOCK_TOKENS] for at in span]
        for at, block in zip(span, places, strict=True):
            self.memory.places[block][at % BLOCK_TOKENS] = tuple(seq.tokens[: at + 1])
        ids = np.stack([routing(tuple(seq.tokens[: at + 1])) for at in span], axis=1)
        self.blocks.observe(np.array(places), ids)
        self.blocks.advance(seq, count)

    @rule(seq=live, token=st.integers(0, 1))
    def generate(self, seq: Sequence, token: int) -> None:
        if seq.blocks and not seq.uncomputed and len(seq.tokens) < 100:
            seq.tokens.append(token)
            if self.blocks.can_append(seq):
                self.blocks.append(seq)
            else:
                seq.tokens.pop()

    @rule(seq=live, swap=st.booleans())
    def pause(self, seq: Sequence, swap: bool) -> None:
        if seq.blocks and seq.uncomputed:
            if swap:
                self.kv_swap.swap_out(seq)
            self.blocks.close(seq)

    @rule(seq=live)
    def forget(self, seq: Sequence) -> None:
        self.blocks.forget(seq.keys)
        assert self.blocks.known(seq) == 0 or not seq.keys[: len(seq.tokens) // BLOCK_TOKENS]

    @rule(seq=consumes(live))
    def leave(self, seq: Sequence) -> None:
        self.blocks.close(seq)
        self.kv_swap.drop(seq)
        self.sequences.remove(seq)

    @precondition(lambda self: self.sequences)
    @invariant()
    def everybody_sees_their_own_past(self) -> None:
        for seq in self.sequences:
            for at in range(seq.computed):
                stored = self.memory.places[seq.blocks[at // BLOCK_TOKENS]][at % BLOCK_TOKENS]
                assert stored == tuple(seq.tokens[: at + 1])

    @invariant()
    def signatures_are_exact(self) -> None:
        for seq in self.sequences:
            if seq.blocks:
                assert (self.blocks.signature(seq) == signature(seq.tokens[: seq.computed])).all()

    @invariant()
    def blocks_add_up(self) -> None:
        self.blocks.check_integrity([seq for seq in self.sequences if seq.blocks])
        self.kv_swap.check_integrity(self.sequences)


Blocks.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


def computed(blocks: BlockManager, tokens: list[int]) -> Sequence:
    seq = sequence(tokens)
    blocks.open(seq)
    blocks.advance(seq, seq.uncomputed)
    return seq


def test_keys_are_made_of_every_token_that_a_message_may_name() -> None:
    keys: list[bytes] = []
    extend_keys(keys, [1 << 31] * BLOCK_TOKENS, 1, b"")
    assert len(keys) == 1


def test_a_known_prompt_costs_only_the_tokens_after_its_full_blocks() -> None:
    blocks = BlockManager(8, LAYERS, EXPERTS)
    blocks.close(computed(blocks, list(range(40))))
    again = sequence(list(range(40)))
    blocks.open(again)
    assert again.computed == 32


def test_a_prompt_of_full_blocks_still_computes_its_last_block_for_the_logits() -> None:
    blocks = BlockManager(8, LAYERS, EXPERTS)
    blocks.close(computed(blocks, list(range(32))))
    again = sequence(list(range(32)))
    blocks.open(again)
    assert again.computed == 16


def test_running_sequences_share_the_blocks_of_a_common_prefix() -> None:
    blocks = BlockManager(8, LAYERS, EXPERTS)
    first = computed(blocks, list(range(33)))
    second = sequence([*range(32), 99])
    blocks.open(second)
    assert second.blocks[:2] == first.blocks[:2]
    assert blocks.free == 8 - 4


def test_the_longest_unused_blocks_are_reused_first_and_a_prefix_loses_its_tail_first() -> None:
    blocks = BlockManager(4, LAYERS, EXPERTS)
    blocks.close(computed(blocks, list(range(32))))
    blocks.close(computed(blocks, list(range(100, 132))))
    blocks.close(computed(blocks, [7] * 16))
    assert blocks.known(sequence([*range(32), 0])) == 1
    assert blocks.known(sequence([*range(100, 132), 0])) == 2


def test_without_prefix_cache_nothing_is_shared() -> None:
    blocks = BlockManager(8, LAYERS, EXPERTS, prefix_cache=False)
    blocks.close(computed(blocks, list(range(40))))
    again = sequence(list(range(40)))
    blocks.open(again)
    assert again.computed == 0


def test_a_block_computed_twice_at_once_is_kept_once() -> None:
    blocks = BlockManager(8, LAYERS, EXPERTS)
    first, second = sequence(list(range(17))), sequence(list(range(17)))
    blocks.open(first)
    blocks.open(second)
    blocks.advance(first, 17)
    blocks.advance(second, 17)
    assert first.blocks[0] == second.blocks[0]
    assert blocks.free == 8 - 3
    blocks.check_integrity([first, second])


def test_successors_of_forgotten_blocks_are_not_found_either() -> None:
    blocks = BlockManager(12, LAYERS, EXPERTS)
    held, cached = computed(blocks, list(range(47))), computed(blocks, [*range(32), *[9] * 17])
    blocks.close(cached)
    blocks.forget(held.keys)
    assert blocks.known(cached) == 0
    held.tokens.append(99)
    blocks.advance(held, 1)
    blocks.check_integrity([held])
    again = computed(blocks, [*range(47), 99, 1])
    assert not {*again.blocks} & {*held.blocks}
    assert blocks.known(again) == 3
    blocks.check_integrity([held, again])


def test_signatures_take_at_most_a_hundredth_of_the_keys_and_values_of_real_models() -> None:
    for layers, experts, kv_heads, head_dim in ((48, 128, 4, 128), (94, 128, 4, 128), (32, 8, 8, 128)):
        kv_bytes = 2 * layers * kv_heads * head_dim * 2 * BLOCK_TOKENS
        assert BlockManager(3, layers, experts).signatures.nbytes / 3 <= kv_bytes / 100


def test_blocks_round_up() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
