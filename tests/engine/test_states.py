"""The engine with a model that has a state beside keys and values: any path to the state gives the same tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from support.engine_kit import SPEC, Drive, PlainDecoder, prompt
from support.examples import examples
from support.states_kit import SLOTS, PlainStates, StatefulDecoder, stateful_model
from test_blocks import EXPERTS, LAYERS, Blocks, Memory, sequence
from test_loop import STYLES

from edgemoe.engine import state_slots
from edgemoe.engine.blocks import BlockManager, KVSwap
from edgemoe.engine.sequence import Sequence
from edgemoe.engine.state_slots import StateSlots, is_kept, places_on_the_way
from edgemoe.types.step import BLOCK_TOKENS, Batch

LENGTHS = [3, 17, 70, 33, 1, 120, 16, 48, 5, 90]
PERIOD = 2  # blocks between snapshots


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "SNAPSHOT_BLOCKS", PERIOD)


def submit(drive: Drive, n: int, **options: Any) -> None:
    drive.submit(prompt(LENGTHS[n], n), f"r{n}", seed=n, **STYLES[n % len(STYLES)], **options)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each request's tokens on an idle engine without reuse."""
    tokens = []
    for n in range(len(LENGTHS)):
        drive = Drive(model=stateful_model(), step_tokens=512, prefix_cache=False)
        submit(drive, n, max_tokens=40)
        drive.run()
        tokens.append(drive.tokens(f"r{n}"))
    return tokens


def computed(drive: Drive) -> int:
    return sum(sum(batch.query_lens) for batch in drive.model.decoder.steps)


def test_a_step_writes_the_states_within_it_that_are_kept() -> None:
    """All cuts after its first token and before its last: at the last whole block, or accepted by `is_kept`."""
    for begin, tokens in itertools.product((0, 5, 16, 17, 32, 47), range(1, 70)):
        seq = sequence(range(150))
        seq.computed = begin
        end = begin + tokens
        last = end // BLOCK_TOKENS * BLOCK_TOKENS
        places = [
            place
            for place in range(0, end, BLOCK_TOKENS)
            if place > begin and (place == last or is_kept(seq, place // BLOCK_TOKENS))
        ]
        assert places_on_the_way(seq, tokens) == places


def test_the_state_matters(alone: list[list[int]]) -> None:
    drive = Drive()
    submit(drive, 2, max_tokens=40)
    drive.run()
    assert drive.tokens("r2") != alone[2]


@pytest.mark.parametrize("slots", [3, 9, SLOTS])
@pytest.mark.parametrize("chosen", [{}, {"step_tokens": 16}, {"prefix_cache": False}], ids=str)
def test_every_request_gets_in_any_company_the_tokens_that_it_gets_alone(
    alone: list[list[int]], slots: int, chosen: dict[str, Any]
) -> None:
    drive, arrivals = Drive(model=stateful_model(slots), **chosen), np.random.default_rng(0)
    for n in range(len(LENGTHS)):
        submit(drive, n)
        for _ in range(arrivals.integers(4)):
            drive.step()
            assert len(drive.engine.scheduler.running) <= (slots - 1) // 2
    drive.run()
    assert [drive.tokens(f"r{n}") for n in range(len(LENGTHS))] == [tokens[:12] for tokens in alone]


@pytest.mark.parametrize("way", ["recompute", "park"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pre_emption_changes_no_token(alone: list[list[int]], way: str, prefix_cache: bool) -> None:
    drive = Drive(blocks=12, output_reserve=0.0, preemption=way, prefix_cache=prefix_cache, model=stateful_model())
    for n in (1, 3, 6, 8):
        submit(drive, n, max_tokens=40)
    drive.run()
    assert drive.engine.scheduler.paused_total[way] > 0
    assert [drive.tokens(f"r{n}") for n in (1, 3, 6, 8)] == [alone[n] for n in (1, 3, 6, 8)]


@pytest.mark.parametrize("length", [64, 75, 80])
def test_a_prompt_that_the_prefix_cache_has_goes_on_from_its_state(length: int) -> None:
    drive = Drive(model=stateful_model())
    for name in ("miss", "hit"):
        drive.submit(prompt(length), name, temperature=1.0, max_tokens=50)
        drive.run()
    assert drive.tokens("hit") == drive.tokens("miss")
    assert drive.engine.scheduler.prefix_tokens["hit"] == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_conversation_goes_on_from_the_end_of_its_last_answer() -> None:
    drive = Drive(model=stateful_model())
    drive.submit(prompt(20), "first", max_tokens=30)
    drive.run()
    longer = [*prompt(20), *drive.tokens("first"), 7, 7]
    drive.submit(longer, "second")
    drive.run()
    assert next(one for one in drive.emitted if one.request == "second").cached_tokens == 48
    fresh = Drive(model=stateful_model())
    fresh.submit(longer)
    fresh.run()
    assert drive.tokens("second") == fresh.tokens()


def test_a_prefix_is_reused_up_to_the_last_state_that_was_kept() -> None:
    """Two prompts begin alike for 55 tokens; a state is kept every 32."""
    drive, begin = Drive(model=stateful_model(), step_tokens=200), prompt(55)
    for name, seed in (("first", 1), ("second", 2)):
        drive.submit([*begin, *prompt(40, seed)], name)
        drive.run()
    assert next(one for one in drive.emitted if one.request == "second").cached_tokens == 32


def test_without_room_for_snapshots_nothing_is_reused_wrongly(alone: list[list[int]]) -> None:
    drive = Drive(model=stateful_model(slots=3))
    for n in (2, 5, 2, 5, 2):
        submit(drive, n)
        drive.run()
        assert drive.tokens(f"r{n}") == alone[n][:12]
        drive.emitted.clear()


def test_choices_share_the_prompt_and_differ_after_it() -> None:
    drive = Drive(model=stateful_model())
    for choice in range(4):
        drive.submit(prompt(64), f"r{choice}", choice=choice, temperature=2.0)
    drive.run()
    assert computed(drive) == 64 + 3 * BLOCK_TOKENS + 4 * 11
    assert len({tuple(drive.tokens(f"r{choice}")) for choice in range(4)}) == 4


def test_a_replay_from_any_token_gives_the_same_continuation(alone: list[list[int]]) -> None:
    for cut in range(0, 40, 3):
        drive = Drive(model=stateful_model())
        submit(drive, 3, emitted=alone[3][:cut], attempt=2, max_tokens=40)
        drive.run()
        assert drive.tokens("r3") == alone[3][cut:]


def test_a_missing_expert_that_comes_back_costs_no_token(alone: list[list[int]]) -> None:
    """A step fails in its second layer, when states are written; it is computed again from the states before."""
    drive = Drive(model=stateful_model(), missing_expert_timeout_s=100.0)
    for n in (2, 3, 7):
        submit(drive, n)
    for _ in range(60):
        drive.model.experts.missing = {(1, expert) for expert in range(0, SPEC.geometry.experts, 2)}
        drive.step()
        drive.model.experts.missing = set()
        drive.step()
    drive.run()
    assert [drive.tokens(f"r{n}") for n in (2, 3, 7)] == [alone[n][:12] for n in (2, 3, 7)]


class Poisoned(StatefulDecoder):
    """Raises, when all is computed, if a step has many of the bad request's tokens."""

    def forward(self, batch: Batch, kv: Any, experts: Any) -> torch.Tensor:
        logits = PlainDecoder.forward(self, batch, kv, experts)
        if (batch.tokens == 261).sum() > 3:
            raise IndexError("the test says so")
        return logits


def test_a_request_that_the_model_cannot_take_costs_nobody_else_a_token(alone: list[list[int]]) -> None:
    decoder = Poisoned()
    drive = Drive(model=stateful_model()._replace(decoder=decoder, experts=decoder.experts))
    for n in range(len(LENGTHS)):
        submit(drive, n)
    drive.step()
    drive.submit([*prompt(20, 99), *[261] * 10, *prompt(10, 98)], "bad")
    drive.run()
    assert drive.end("bad").error_code == "request_failed"
    assert [drive.tokens(f"r{n}") for n in range(len(LENGTHS))] == [tokens[:12] for tokens in alone]


@pytest.mark.parametrize("step", [1, 9])
def test_states_that_are_lost_once_cost_nobody_a_token(step: int, alone: list[list[int]]) -> None:
    drive = Drive(model=stateful_model())
    drive.model.decoder.lost = (step,)
    for _ in range(2):
        for n in (2, 5, 9):
            submit(drive, n)
        drive.run()
        drive.model.decoder.lost = ()
        ends = [drive.emitted.pop() for _ in range(len(drive.emitted))]
        assert {one.finish for one in ends} == {"", "length"}
        for n in (2, 5, 9):
            assert [one.token for one in reversed(ends) if one.request == f"r{n}"] == alone[n][:12]


def test_requests_that_hang_up_leave_no_slot_behind() -> None:
    drive = Drive(model=stateful_model(), blocks=20, preemption="park", output_reserve=0.0)
    for n in range(len(LENGTHS)):
        submit(drive, n, max_tokens=60)
        drive.step()
        drive.engine.loop.cancel(f"r{n - 2}", 1)
    for n in range(len(LENGTHS)):
        drive.engine.loop.cancel(f"r{n}", 1)
    drive.run()
    assert drive.engine.blocks.free == 20
    drive.engine.blocks.check_integrity([])


def test_a_long_answer_leaves_a_state_a_period_and_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "SNAPSHOT_BLOCKS", 4)
    drive = Drive(model=stateful_model())
    drive.submit(prompt(40), max_tokens=150)
    drive.run()
    states = drive.engine.blocks._states
    assert states is not None
    assert sorted(+states._depths) == [2, 4, 8, 11]


def test_a_swapped_state_counts_in_the_budget() -> None:
    blocks = BlockManager(12, LAYERS, EXPERTS, states=StateSlots(12, 3))
    memory, states = Memory(12), PlainStates(12)
    seq = sequence([1] * 20)
    blocks.open(seq)
    blocks.prepare(seq, 18)
    blocks.advance(seq, 18)
    for budget, fits in ((3, False), (4, True)):
        swap = KVSwap(memory, blocks, states.slot_bytes // 2, budget * states.slot_bytes // 2, states)
        assert swap.swap_out(seq) is fits, "two blocks, and a state as large as two more"


# --- the slots, against a model that remembers everything


class BlocksAndStates(Blocks):
    """A cache each of whose slots stores the tokens of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[tuple[int, ...]] = [()] * 12
        self.slot_bytes = 1
        self.blocks = BlockManager(12, LAYERS, EXPERTS, states=StateSlots(12, 3))
        self.kv_swap._blocks, self.kv_swap._states = self.blocks, self

    def gather(self, slots: list[int]) -> Any:
        return [self.slots[slot] for slot in slots]

    def scatter(self, slots: list[int], rows: Any) -> None:
        for slot, row in zip(slots, rows, strict=True):
            self.slots[slot] = row

    @rule(seq=Blocks.live)
    def open(self, seq: Sequence) -> None:
        if sum(bool(other.blocks) for other in self.sequences) < 3:
            super().open(seq)

    @rule(seq=Blocks.live, count=st.integers(1, 40))
    def prepare(self, seq: Sequence, count: int) -> None:
        """Prepares a step that is never computed, or fails after it has written."""
        if seq.blocks and seq.uncomputed:
            self.blocks.prepare(seq, min(count, seq.uncomputed))
            for _, slot in seq.next_states:
                self.slots[slot] = (-1,)

    @rule(seq=Blocks.live, count=st.integers(1, 40))
    def compute(self, seq: Sequence, count: int) -> None:
        count = min(count, seq.uncomputed)
        if seq.blocks and count:
            self.blocks.prepare(seq, count)
            for tokens, slot in seq.next_states:
                assert slot not in (0, seq.state)
                self.slots[slot] = tuple(seq.tokens[: seq.computed + tokens])
            super().compute(seq, count)

    @precondition(lambda self: self.sequences)
    @invariant()
    def everybody_has_their_own_state(self) -> None:
        for seq in self.sequences:
            if seq.blocks:
                assert self.slots[seq.state] == tuple(seq.tokens[: seq.computed])
        for key, slot in self.blocks._states._known.items():  # type: ignore[union-attr]
            known = list(self.slots[slot])
            assert self.blocks.keys(sequence(known), len(known) // BLOCK_TOKENS)[-1] == key


BlocksAndStates.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=50, deadline=None)
TestBlocksAndStates = BlocksAndStates.TestCase
