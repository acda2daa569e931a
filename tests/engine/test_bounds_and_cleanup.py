"""Bounds and clean-up of the engine's parts: memory left at the end, and behaviour at the limits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.engine_kit import Drive, PlainDecoder, prompt
from test_sampler import VOCAB, random_logits, sequence, tokens
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from edgemoe.engine import loop, sampler
from edgemoe.engine import steps as step
from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.fairness import ServiceAccounts
from edgemoe.engine.loop import StepLoop
from edgemoe.engine.sampler import pick, sample
from edgemoe.engine.scheduler import PROMPT_ROWS, Scheduler
from edgemoe.engine.sequence import Sequence
from edgemoe.engine.steps import ForwardRunner
from edgemoe.types.request import Request, Sampling
from edgemoe.types.step import BLOCK_TOKENS, StepMeta


@pytest.mark.parametrize(
    ("owner", "stage"),
    [
        (PlainDecoder, "forward"),
        (step, "sample"),
        (ForwardRunner, "commit"),
        (Scheduler, "schedule"),
        (StepLoop, "_deliver_token"),
    ],
)
def test_a_step_has_an_age_wherever_it_is_and_none_is_computing_between_steps(
    owner: Any, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive, stood = Drive(), []
    real = getattr(owner, stage)

    def held(*args: object) -> object:
        started.set()
        assert seen.wait(60)
        return real(*args)

    started, seen = threading.Event(), threading.Event()
    monkeypatch.setattr(owner, stage, held)
    drive.submit(max_tokens=1)
    thread = threading.Thread(target=drive.step)
    thread.start()
    assert started.wait(60)
    first_s = drive.engine.runner.standstill_s()
    while (stands_s := drive.engine.runner.standstill_s()) <= first_s:
        pass
    stood.append(stands_s)
    seen.set()
    thread.join(60)
    assert stood[0] > 0.0
    assert drive.tokens()
    assert drive.engine.runner.standstill_s() == 0.0
    drive.model.decoder.forward = lambda *_: 1 / 0
    drive.submit(name="bad")
    with pytest.raises(ZeroDivisionError):
        drive.step()
    assert drive.engine.runner.standstill_s() == 0.0, "after a step that failed too"


def test_a_step_stands_still_only_where_it_comes_to_no_other_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    drive, now_s, seen = Drive(), [0.0], []
    ids = np.full((4, 1, 2), -1, np.int16)
    runner = drive.engine.runner
    monkeypatch.setattr(runner, "clock", lambda: now_s[0])

    def begin(meta: StepMeta) -> npt.NDArray[np.int16]:
        real(meta)
        return ids

    def forward(*_: object) -> torch.Tensor:
        for layer in range(len(ids)):
            seen.append(runner.standstill_s())
            now_s[0] += 100.0
            seen.append(runner.standstill_s())
            ids[layer] = layer
        raise ZeroDivisionError

    real = drive.model.experts.begin_step
    monkeypatch.setattr(drive.model.experts, "begin_step", begin)
    monkeypatch.setattr(drive.model.decoder, "forward", forward)
    drive.submit()
    with pytest.raises(ZeroDivisionError):
        drive.step()
    assert seen[: 2 * len(ids)] == [0.0, 100.0] * len(ids)


def test_blocks_that_no_lookup_can_find_are_reused_before_remembered_ones() -> None:
    blocks = BlockManager(4, 1, 1)
    request = Request(id="a", prompt=tuple(range(BLOCK_TOKENS * 2 + 1)), sampling=Sampling(), seed=0)
    seq = Sequence(request, (), 1, 0.0, 1.0)
    blocks.open(seq)
    blocks.advance(seq, BLOCK_TOKENS * 2 + 1)
    unkeyed = seq.blocks[-1]
    blocks.close(seq)
    small = Sequence(Request(id="b", prompt=(999,), sampling=Sampling(), seed=0), (), 1, 0.0, 1.0)
    blocks.open(small)
    assert small.blocks == [unkeyed]


def test_the_prompts_whose_rows_are_wanted_share_one_bound() -> None:
    drive = Drive(step_tokens=1024, max_sequences=8)
    for n in range(4):
        drive.submit(prompt(50, n), f"r{n}", prompt_logprobs=1, max_tokens=1)
    drive.run()
    assert max(len(batch.logit_rows) for batch in drive.model.decoder.steps) <= PROMPT_ROWS + 8
    assert all(len(drive.tokens(f"r{n}")) == 1 for n in range(4))


def test_a_full_inbox_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_INBOX", 3)
    drive = Drive()
    for n in range(5):
        drive.submit(name=f"r{n}", max_tokens=1)
    drive.run()
    assert [drive.end(f"r{n}").error_code for n in range(5)] == ["", "", "", "queue_full", "queue_full"]


def test_a_refusal_leaves_nothing_of_an_older_attempt_and_a_newer_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_INBOX", 1)
    drive = Drive()
    drive.submit(attempt=2, max_tokens=30)
    drive.step()
    for attempt in (1, 3):
        drive.submit(name="fills", max_tokens=1)
        drive.submit(attempt=attempt, max_tokens=30)
        drive.step()
        assert len(drive.engine.scheduler.running) == (1 if attempt == 1 else 0)
    drive.run()
    ends = [(one.attempt, one.error_code) for one in drive.emitted if one.request == "r" and one.finish]
    assert ends == [(1, "queue_full"), (3, "queue_full")]
    assert drive.engine.blocks.free == drive.engine.blocks.count


def test_a_deadline_passes_while_waiting_too() -> None:
    drive = Drive(max_sequences=1)
    drive.submit(name="running", max_tokens=100)
    drive.step()
    drive.submit(name="waiting", remaining_s=0.5)
    for _ in range(8):
        drive.step()
    assert drive.end("waiting").error_code == "deadline_exceeded"
    assert not any(one.finish for one in drive.emitted if one.request == "running")


def test_swapped_memory_is_freed_when_its_request_is_cancelled() -> None:
    drive = Drive(blocks=10, output_reserve=0.0, preemption="park")
    kv_swap = drive.engine.scheduler._kv_swap
    assert kv_swap is not None
    room = kv_swap._room
    for n in range(4):
        drive.submit(prompt(30, n), f"r{n}", max_tokens=40)
    while kv_swap._room == room:
        drive.step()
    for n in range(4):
        drive.engine.loop.cancel(f"r{n}", 1)
    drive.step()
    assert kv_swap._room == room


def test_a_returning_user_has_no_credit_for_the_absence() -> None:
    users = ServiceAccounts(9)
    users.add_request("idle")
    users.remove_request("idle")
    users.add_request("busy")
    users["busy"].service += 1000
    users.add_request("idle")
    assert users.service_ahead(["idle", "busy"]) == [0.0, 0.0]


@pytest.mark.parametrize(("length", "emitted", "code"), [(500, 12, ""), (500, 13, "context_length_exceeded")])
def test_prompt_and_output_together_stay_within_the_context(length: int, emitted: int, code: str) -> None:
    drive = Drive()
    drive.submit(prompt(length), emitted=prompt(emitted, 1), attempt=2, max_tokens=100)
    drive.run()
    assert drive.end().error_code == code


def test_top_p_applies_after_top_k() -> None:
    weights = torch.tensor([0.40, 0.30, *[0.3 / 48] * 48])
    logits = torch.log(weights)[None]
    seen = {tokens(sample(logits.clone(), [sequence(seed=n, top_k=2, top_p=0.55)]))[0] for n in range(200)}
    assert seen == {0}, "0.4 of 0.7 is over 0.55; of all it would not be"


def test_the_end_of_the_cumulated_weights_is_never_passed() -> None:
    weights = torch.zeros(1, 2, 64)
    weights[0, 0, 3] = 1.0
    assert pick(weights, torch.tensor([[1.0]], dtype=torch.float64)).tolist() == [3]


@pytest.mark.parametrize("penalty", [0.01, 0.8, 1.3, 100.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(1)
    row = sequence((5, 5, 9), repetition_penalty=penalty)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[1, 2, 5, 5, 9]]), logits.clone())
    sampler.adjust(logits, [row])
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), rtol=1e-6)
    assert logits.shape == (1, VOCAB)


def test_a_deadline_may_be_at_the_end_of_time() -> None:
    drive, ended = Drive(), []
    drive.submit(remaining_s=float("inf"))
    drive.engine.loop._run_inbox()
    (seq,) = drive.engine.scheduler.waiting
    seq.ready = False  # like a request whose grammar is being compiled: the loop sleeps until a message arrives
    thread = drive.engine.start(1, ended.append)
    drive.engine.loop.stop()
    thread.join(60)
    assert ended == [None]
    drive.engine.loop._stopped = False
    drive.engine.loop._inbox.put(lambda: None)
    drive.engine.loop._sleep()  # raises OverflowError if the wait is as long as the deadline
