"""The last chunk of a prompt is reported once, if its front has asked for that, and never for an ended request."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_kit import SPEC, Drive, prompt

from edgemoe.ipc.messages import FromEngine, LastChunkStarted, Submit
from edgemoe.policy.routing.signatures import shares_of
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Request, Sampling
from edgemoe.types.step import StepMeta, StepRouting
from edgemoe.worker.prefill_decode_transfer import LastChunkNotifier

PROMPT = tuple(range(40))
NO_IDS = np.zeros((1, 40, 1), np.int16)


def submit(attempt: int) -> Submit:
    request = Request(id="r", prompt=PROMPT, sampling=Sampling(), seed=1)
    return Submit(request=request, attempt=attempt, hand_over=True)


def step(begin: int, end: int) -> StepMeta:
    count, positions = end - begin, np.arange(begin, end)
    return StepMeta(("r",), np.array([count]), np.array([False]), positions, positions)


def test_the_end_of_a_prompt_is_told_before_its_step_where_most_is_computed_and_once() -> None:
    told: list[FromEngine] = []
    chunks = LastChunkNotifier()
    chunks.attach(told.append, lambda _request: None)
    chunks.register(submit(1))
    chunks.on_step_begun(step(0, 30), NO_IDS)
    assert not told
    for _ in range(2):
        chunks.on_step_begun(step(30, 40), NO_IDS)
    assert told == [LastChunkStarted(request="r", attempt=1)]


@pytest.mark.parametrize(("computed", "told_before"), [(0, 0), (19, 0), (20, 1)])
def test_a_step_that_computes_more_than_half_is_told_of_when_it_is_over(computed: int, told_before: int) -> None:
    told: list[FromEngine] = []
    chunks = LastChunkNotifier()
    chunks.attach(told.append, lambda _request: None)
    chunks.register(submit(1))
    chunks.on_step_begun(step(computed, 40), NO_IDS)
    assert len(told) == told_before
    chunks.on_step_ended(StepRouting(step(computed, 40), NO_IDS, NO_IDS.astype(np.float32), {}, 0.1, 0.0))
    assert len(told) == 1


def test_nothing_is_told_of_an_attempt_that_is_cancelled() -> None:
    told: list[FromEngine] = []
    chunks = LastChunkNotifier()
    chunks.attach(told.append, lambda _request: None)
    chunks.register(submit(1))
    chunks.forget("r", 1)
    chunks.on_step_begun(step(30, 40), NO_IDS)
    chunks.register(submit(2))
    chunks.forget("r", 1)
    chunks.on_step_begun(step(30, 40), NO_IDS)
    assert told == [LastChunkStarted(request="r", attempt=2)]


@pytest.mark.parametrize(
    ("step_tokens", "known"), [(128, 100), (64, 64), (49, 98), (25, 75)], ids=["one step", "two", "three", "four"]
)
def test_the_reported_signature_covers_the_prompt_or_the_steps_before_the_last(step_tokens: int, known: int) -> None:
    """The known part is at least half of the prompt."""
    told, chunks = list[FromEngine](), LastChunkNotifier()
    drive = Drive(observe=chunks.on_step_ended, expect=chunks.on_step_begun, step_tokens=step_tokens)

    def signature_of(request: str) -> ExpertSignature:
        (seq,) = drive.engine.scheduler.running
        return ExpertSignature(*shares_of(drive.engine.blocks.signature(seq), SPEC.router.top_k))

    chunks.attach(told.append, signature_of)
    asked = Request(id="r", prompt=tuple(prompt(100)), sampling=Sampling(max_tokens=4), seed=1)
    chunks.register(Submit(request=asked, attempt=1, hand_over=True))
    drive.submit(asked.prompt, max_tokens=4)
    drive.run()
    (last,) = told
    assert isinstance(last, LastChunkStarted)
    assert last.signature is not None
    assert last.signature.tokens == known
