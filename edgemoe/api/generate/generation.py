"""Runs one generating HTTP request on the backend and turns its emissions into deltas."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from edgemoe.api.backend import Backend
from edgemoe.api.generate.choice import Choice, Delta
from edgemoe.api.generate.grammar import GrammarChoice
from edgemoe.api.generate.grammar_check import TriedGrammar
from edgemoe.api.metrics import Clock, Metrics
from edgemoe.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, QueueFull, RequestError
from edgemoe.types.arrays import Json
from edgemoe.types.principal import Identity
from edgemoe.types.request import Emission, Request, Sampling

ENGINE_ERRORS: dict[str, type[RequestError]] = {
    error.code: error for error in (DeadlineExceeded, EngineUnavailable) if error.code
}


@dataclass(frozen=True, slots=True)
class Asker:
    """Whom a request is from, and the salt of its cached blocks."""

    identity: Identity
    salt: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one prompt and how to continue it."""

    tokens: tuple[int, ...]
    sampling: Sampling


class Format(Protocol):
    """Writes deltas in the form of one endpoint."""

    def events(self, deltas: list[Delta]) -> Iterable[bytes]:
        """Yields server-sent events for what is new."""

    def end(self) -> Iterable[bytes]:
        """Yields the last events of a complete stream."""

    def error(self, error: RequestError) -> Iterable[bytes]:
        """Yields the last events of a stream that ended in `error`."""

    def whole(self, choices: list[Delta]) -> Json:
        """Returns the body of an answer that is not streamed, from one delta per choice, in order."""


@dataclass(slots=True)
class Generation:
    """Holds what one HTTP request asks for, ready to run."""

    prefix: str  # of its id: "chatcmpl", "cmpl", "resp", "msg"
    model: str
    requests: list[Request]
    choices: list[Choice]
    prompt_tokens: int
    grammar: GrammarChoice | None = None  # to be checked
    id: str = field(default="")
    created: int = field(default_factory=lambda: int(time.time()))
    clock: Clock | None = None  # set when it starts to run

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.prefix}-{secrets.token_hex(12)}"

    def constrain(self, tried: TriedGrammar | None) -> None:
        """Has every choice follow the grammar, if there is one."""
        if tried is not None:
            for at, each in enumerate(self.requests):
                sampling = structs.replace(each.sampling, grammar=tried.grammar, grammar_trial=tried.trial)
                self.requests[at] = structs.replace(each, sampling=sampling)

    def usage(self) -> Json:
        """Returns OpenAI's usage object for what has been generated so far."""
        completion = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached_tokens(), self.prompt_tokens)},
            "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices)},
        }

    def timings(self) -> Json:
        """Returns llama.cpp's timings object for what has been generated so far."""
        return self.clock.timings(self.prompt_tokens, self.cached_tokens()) if self.clock is not None else {}

    @property
    def finished(self) -> bool:
        """Returns whether every choice has ended."""
        return all(choice.finish for choice in self.choices)

    def cached_tokens(self) -> int:
        """Counts prompt tokens that the prefix cache supplied, once for each prompt."""
        return sum(
            choice.cached_tokens
            for choice, request in zip(self.choices, self.requests, strict=True)
            if not request.choice
        )


def requests(prompts: Sequence[Prompt], n: int, seed: int | None, asker: Asker) -> list[Request]:
    """Returns `n` requests for each prompt. Draws a seed where `seed` is None, so that a replay repeats the answer."""
    name = secrets.token_hex(8)
    return [
        Request(
            id=f"{name}-{at}-{choice}",
            prompt=prompt.tokens,
            sampling=prompt.sampling,
            seed=(secrets.randbits(63) if seed is None else seed) & (2**64 - 1),
            choice=choice,
            user=asker.identity.user,
            principal=asker.identity.principal,
            salt=asker.salt,
        )
        for at, prompt in enumerate(prompts)
        for choice in range(n)
    ]


async def run(
    job: Generation, backend: Backend, metrics: Metrics, timeout_s: float
) -> AsyncGenerator[list[Delta], None]:
    """Yields the deltas of all choices as they arrive. Raises RequestError."""
    choices = {request.id: choice for request, choice in zip(job.requests, job.choices, strict=True)}
    with backend.open(job.requests, timeout_s) as ticket:
        clock = job.clock = Clock(metrics)
        metrics.prompt_tokens.inc(job.prompt_tokens)
        async for emissions in ticket:
            touched: dict[str, Choice] = {}
            for emission in emissions:
                choice = choices[emission.request]
                if choice.finish:
                    continue
                _check(emission)
                touched[emission.request] = choice
                if choice.take(emission):
                    ticket.cancel(emission.request)
                clock.emitted(emission, ended=bool(choice.finish))
            if deltas := [delta for choice in touched.values() if (delta := choice.delta())]:
                yield deltas


async def collect(job: Generation, deltas: AsyncGenerator[list[Delta], None]) -> list[Delta]:
    """Returns each choice's deltas joined into one, in order of choices."""
    whole = [Delta(choice.index) for choice in job.choices]
    async with aclosing(deltas):
        async for some in deltas:
            for delta in some:
                whole[delta.choice].add(delta)
    for delta in whole:
        delta.pieces.settle()
    return whole


def _check(emission: Emission) -> None:
    """Raises the RequestError that the engine ended a request with."""
    if emission.finish != "error":
        return
    message = emission.error or "the engine could not go on with this request"
    if emission.error_code == QueueFull.code:
        raise QueueFull(message, retry_after_s=emission.retry_after_s or 1.0)
    if emission.error_code in ENGINE_ERRORS:
        raise ENGINE_ERRORS[emission.error_code](message)
    if emission.error_code in ("invalid_request", "context_length_exceeded", "invalid_grammar"):
        raise InvalidRequest(message, code=emission.error_code)
    raise RequestError(message, code=emission.error_code or "engine_error")
