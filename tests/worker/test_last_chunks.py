"""The ends of prompts are told where they are wanted, once, and of nothing that is over."""

from __future__ import annotations

import numpy as np

from edgemoe.cluster.rpc.engine_messages import FromEngine, Submit
from edgemoe.cluster.rpc.messages.hand_over import LastChunk
from edgemoe.types.request import Request, Sampling
from edgemoe.types.routing import StepMeta
from edgemoe.worker.hand_over import LastChunks

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
    chunks = LastChunks()
    chunks.attach(told.append, lambda _request: None)
    chunks.want(submit(1))
    chunks.look(step(0, 30), NO_IDS)
    assert not told
    for _ in range(2):
        chunks.look(step(30, 40), NO_IDS)
    assert told == [LastChunk(request="r", attempt=1)]


def test_nothing_is_told_of_an_attempt_that_is_cancelled() -> None:
    told: list[FromEngine] = []
    chunks = LastChunks()
    chunks.attach(told.append, lambda _request: None)
    chunks.want(submit(1))
    chunks.forget("r", 1)
    chunks.look(step(30, 40), NO_IDS)
    chunks.want(submit(2))
    chunks.forget("r", 1)
    chunks.look(step(30, 40), NO_IDS)
    assert told == [LastChunk(request="r", attempt=2)]
