"""Runs one generating HTTP request: its sampling, its choices, and the deltas of text that emissions become."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from edgemoe.api.backend import Backend
from edgemoe.api.dialects.dialect import HERMES, OutputMarks
from edgemoe.api.dialects.output_parser import OutputParser
from edgemoe.api.dialects.tool_calls import OutputPieces
from edgemoe.api.field_names import FieldNames
from edgemoe.api.generate.answer_grammar import GrammarCandidates
from edgemoe.api.generate.grammar_trial import TriedGrammar
from edgemoe.api.generate.held_answer import AnswerName, HeldAnswer, Shown, ShownTokens, check_held
from edgemoe.api.metrics import GenerationClock, Metrics
from edgemoe.api.schema import RequestBody
from edgemoe.api.text.tokenizer import Detokenizer, StopMatcher, TextModel, Vocabulary
from edgemoe.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, ModelNotFound, QueueFull, RequestError
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import asked_names, plain_name
from edgemoe.types.request import (
    Emission,
    Identity,
    Principal,
    Request,
    RequestLimits,
    Sampling,
    TokenLogprob,
    cache_salt_of,
)

ANY_MODEL = "*"  # among aliases: every name


@dataclass(slots=True)
class ChoiceDelta:
    """Holds the new pieces of one choice. `finish` is "", "stop", "length" or "tool_calls"."""

    choice: int
    pieces: OutputPieces = field(default_factory=OutputPieces)
    logprobs: list[Emission] = field(default_factory=list)
    text_logprobs: list[Emission] = field(default_factory=list)  # of tokens that show text of the answer
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # from the second token on
    finish: str = ""

    @property
    def text(self) -> str:
        """Returns the text of the answer."""
        return self.pieces.text("text")

    @property
    def reasoning(self) -> str:
        """Returns the text of the reasoning."""
        return self.pieces.text("reasoning")

    def add(self, other: ChoiceDelta) -> None:
        """Appends the delta that follows this one."""
        self.pieces.extend(other.pieces)
        self.logprobs += other.logprobs
        self.text_logprobs += other.text_logprobs
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs
        self.finish = self.finish or other.finish

    def __bool__(self) -> bool:
        return bool(self.pieces or self.finish)


class CompletionChoice:
    """Turns the emissions of one choice into text, reasoning, tool calls, logprobs and a finish reason."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        stops: StopMatcher | None = None,
        marks: OutputMarks | None = None,
        prompt_only: bool = False,
    ):
        """Starts a choice. With `prompt_only` it shows no token, only the log probabilities of the prompt.

        These arrive with the first token, which is then dropped.
        """
        self.index = index
        self._prompt_only = prompt_only
        self.tokens = 0
        self.reasoning_tokens = 0
        self.accepted_drafts = self.rejected_drafts = 0  # tokens
        self.cached_tokens = 0
        self.finish = ""
        marks = marks or OutputMarks(HERMES)
        self._detokenizer = Detokenizer(vocabulary, shown=marks.names)
        self._stops = stops or StopMatcher()
        self._parser = OutputParser(marks, vocabulary.special)
        self._called = False
        self._delta = ChoiceDelta(index)
        self._unshown: list[int] = []  # tokens since the last `shown`
        self._unassigned: list[Emission] = []  # with log probabilities, since the last piece
        self._bytes_of = vocabulary.bytes_of

    def name(self, answer: str) -> None:
        """Takes the id of the answer that this is a choice of; must be called before the first token."""
        self._parser.name(f"{answer} {self.index}")

    @property
    def stop_string(self) -> str:
        """Returns the stop string that ended the text, or ""."""
        return self._stops.matched

    def add(self, emission: Emission) -> bool:
        """Adds one emission. Must not be called once `finish` is set.

        Returns True if the text has ended by a stop string or the last tool call, which the engine cannot know.
        """
        if emission.index == 0:
            self.cached_tokens = emission.cached_tokens
            self._delta.prompt_logprobs = emission.prompt_logprobs
        self.accepted_drafts += emission.accepted_drafts
        self.rejected_drafts += emission.rejected_drafts
        if emission.token is not None and not self._prompt_only:
            self._token(emission, emission.token)
        if emission.finish and not self.finish:
            self.end("length" if self._prompt_only else emission.finish)
        return bool(self.finish) and not emission.finish

    def replay(self, shown: ShownTokens) -> None:
        """Adds tokens that the client holds already."""
        for token in shown.tokens:
            if not self.finish:
                self._token(None, token)
        if shown.finish and not self.finish:
            self.end("stop" if shown.finish == "tool_calls" else shown.finish)

    def shown(self, delta: ChoiceDelta) -> ShownTokens:
        """Returns the tokens up to this delta, the last one, and behind the one before."""
        tokens, self._unshown = self._unshown, []
        return ShownTokens(self.index, tuple(tokens), delta.finish)  # type: ignore[arg-type]

    def end(self, reason: str) -> None:
        """Ends the text, which must not have ended, with its rest."""
        rest = "" if self._stops.stopped else self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        self._end(reason, rest)

    def delta(self) -> ChoiceDelta:
        """Returns the delta since the last call; falsy while there is nothing to show."""
        if not self._delta:
            return ChoiceDelta(self.index)
        delta, self._delta = self._delta, ChoiceDelta(self.index)
        return delta

    def _token(self, emission: Emission | None, token: int) -> None:
        self.tokens += 1
        self._unshown.append(token)
        self.reasoning_tokens += self._parser.reasoning
        if emission is not None and emission.logprob is not None:
            self._delta.logprobs.append(emission)
            self._unassigned.append(emission)
        self._add(self._parser.feed(self._stops.feed(self._detokenizer.feed(token))))
        if self._stops.stopped or self._parser.done:
            self._end("stop", "")

    def _end(self, reason: str, rest: str) -> None:
        self._add(self._parser.feed(rest))
        if not self._parser.done:
            self._add(self._parser.flush(is_cut=reason == "length"))
        self.finish = self._delta.finish = "tool_calls" if self._called and reason == "stop" else reason

    def _add(self, pieces: OutputPieces) -> None:
        self._called = self._called or any(piece.ended == "complete" for piece in pieces)
        self._delta.pieces.extend(pieces)
        if pieces and self._unassigned:
            self._delta.text_logprobs += self._tokens_of(pieces.text("text"))
            self._unassigned = []

    def _tokens_of(self, text: str) -> list[Emission]:
        """Returns the last tokens, as many as show `text`: marks and layout before it are not shown."""
        missing, at = len(text.encode()), len(self._unassigned)
        while missing > 0 and at:
            at -= 1
            missing -= len(self._bytes_of(self._unassigned[at].token or 0))
        return self._unassigned[at:]


ENGINE_ERRORS: dict[str, type[RequestError]] = {
    error.code: error for error in (DeadlineExceeded, EngineUnavailable) if error.code
}


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Holds the tokens of one prompt and how to continue it."""

    tokens: tuple[int, ...]
    sampling: Sampling
    expected: tuple[int, ...] = ()  # of a text that the answer is expected to repeat in part


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Describes the served model and the client that a body's request is prepared for."""

    text: TextModel  # renders and tokenizes for this client
    model: str  # the served model's id
    aliases: tuple[str, ...]  # further names of the model; ANY_MODEL: every name
    limits: RequestLimits
    principal: Principal
    shares_prefixes: bool  # all principals share cached prefixes

    def serves(self, name: str | None) -> bool:
        """Returns whether a name is the served model's or an alias (api.aliases)."""
        served = set(map(plain_name, (self.model, *self.aliases)))
        return not name or ANY_MODEL in self.aliases or not served.isdisjoint(asked_names(name))

    def check_model(self, name: str | None, *others: str) -> None:
        """Raises ModelNotFound where no name is the served model's or an alias (api.aliases)."""
        if not any(map(self.serves, (name, *others))):
            raise ModelNotFound(f"the model {name!r} is not served here; {self.model!r} is", param="model")

    def engine_requests(self, body: RequestBody, prompts: Sequence[TokenizedPrompt]) -> list[Request]:
        """Returns `body.n` requests for each prompt. Draws a seed if the body has none, so that a retry repeats it.

        A user that the body names divides the principal's share, and gives the request no other rights.
        """
        identity = Identity.of(self.principal, body.user or body.safety_identifier)
        salt = cache_salt_of(self.principal, body.cache_salt, shared=self.shares_prefixes)
        name = secrets.token_hex(8)
        return [
            Request(
                id=f"{name}-{at}-{choice}",
                prompt=prompt.tokens,
                sampling=prompt.sampling,
                seed=(secrets.randbits(63) if body.seed is None else body.seed) & (2**64 - 1),
                choice=choice,
                user=identity.user,
                principal=identity.principal,
                salt=salt,
                expected=prompt.expected,
            )
            for at, prompt in enumerate(prompts)
            for choice in range(body.n or 1)
        ]


class AnswerFormat(Protocol):
    """Writes deltas in the form of one endpoint."""

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        """Yields server-sent events, or lines of JSON, for the deltas."""

    def closing_events(self) -> Iterable[bytes]:
        """Yields the last events of a complete stream."""

    def error_events(self, error: RequestError) -> Iterable[bytes]:
        """Yields the last events of a stream that ended in `error`."""

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        """Returns the body of an answer that is not streamed, from one delta per choice, in order."""


@dataclass(slots=True)
class Generation:
    """Holds the engine requests and choices of one HTTP request, ready to run."""

    prefix: str  # of its id: "chatcmpl", "cmpl", "resp", "msg"
    model: str
    requests: list[Request]
    choices: list[CompletionChoice]
    prompt_tokens: int
    grammar: GrammarCandidates | None = None  # to be checked
    id: str = field(default="")
    created: int = field(default_factory=lambda: int(time.time()))
    clock: GenerationClock | None = None  # set when it starts to run
    held: Sequence[Shown] = ()  # frames that the client holds already
    emitted: Mapping[str, Sequence[int]] = field(default_factory=dict)  # their tokens, by request

    def __post_init__(self) -> None:
        self._name(self.id or f"{self.prefix}-{secrets.token_hex(12)}")

    def _name(self, id: str) -> None:
        self.id = id
        for choice in self.choices:
            choice.name(id)

    @property
    def answer(self) -> AnswerName | None:
        """Returns the answer's name, with which any box goes on with it; None where none can."""
        if not self.can_be_held:
            return None
        return AnswerName(id=self.id, created=self.created, seeds=tuple(request.seed for request in self.requests))

    @property
    def can_be_held(self) -> bool:
        """Returns whether another box can go on with the answer; log probabilities of a prompt come only once."""
        return all(request.sampling.prompt_logprobs is None for request in self.requests)

    def shown(self, deltas: Sequence[ChoiceDelta]) -> tuple[ShownTokens, ...]:
        """Returns the tokens that these deltas show, the last ones of their choices."""
        return tuple(self.choices[delta.choice].shown(delta) for delta in deltas)

    def resume(self, held: HeldAnswer, vocab: int) -> None:
        """Goes on behind the part that the client holds. Raises InvalidRequest where it is no part of this answer."""
        if not (self.can_be_held and held.answer.id.startswith(f"{self.prefix}-")):
            raise InvalidRequest("held: this is no part of an answer to this request", code="invalid_held")
        tokens = check_held(held, [request.sampling.max_tokens for request in self.requests], vocab)
        seeds, self.created, self.held = held.answer.seeds, held.answer.created, held.frames
        self.requests = [structs.replace(one, seed=seed) for one, seed in zip(self.requests, seeds, strict=True)]
        self.emitted = {one.id: mine for one, mine in zip(self.requests, tokens, strict=True)}
        self._name(held.answer.id)

    def replay(self) -> Iterator[list[ChoiceDelta]]:
        """Yields the deltas of each frame that the client holds."""
        for frame in self.held:
            choices = [self.choices[shown.choice] for shown in frame]
            for choice, shown in zip(choices, frame, strict=True):
                choice.replay(shown)
            deltas = [choice.delta() for choice in choices]
            for choice, delta in zip(choices, deltas, strict=True):
                choice.shown(delta)
            yield deltas

    def constrain(self, tried: TriedGrammar | None) -> None:
        """Has every choice follow the grammar, if there is one."""
        if tried is not None:
            for at, each in enumerate(self.requests):
                sampling = structs.replace(each.sampling, grammar=tried.grammar, grammar_trial=tried.trial)
                self.requests[at] = structs.replace(each, sampling=sampling)

    def usage(self) -> Json:
        """Returns OpenAI's usage object for the tokens generated so far."""
        completion = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached_tokens(), self.prompt_tokens)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": sum(choice.accepted_drafts for choice in self.choices),
                "rejected_prediction_tokens": sum(choice.rejected_drafts for choice in self.choices),
            },
        }

    def timings(self) -> Json:
        """Returns llama.cpp's timings object for the tokens generated so far."""
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


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """Holds a generation that is ready to run, and the way to write its answer."""

    generation: Generation
    answer_format: AnswerFormat
    is_stream: bool
    fields: FieldNames = field(default_factory=lambda: FieldNames({}))


async def run_generation(
    generation: Generation, backend: Backend, metrics: Metrics, timeout_s: float
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yields the deltas of all choices as they arrive. Raises RequestError.

    Where no more comes within `timeout_s`, the tokens so far are the answer, and its finish is "length".
    """
    choices = {request.id: choice for request, choice in zip(generation.requests, generation.choices, strict=True)}
    with backend.open(generation.requests, timeout_s, generation.emitted) as submission:
        for request, choice in choices.items():
            if choice.finish:  # in the part that the client holds
                submission.cancel(request)
        clock = generation.clock = GenerationClock(metrics)
        metrics.prompt_tokens.inc(generation.prompt_tokens)
        try:
            async for emissions in submission:
                touched: dict[str, CompletionChoice] = {}
                for emission in emissions:
                    choice = choices[emission.request]
                    if choice.finish:
                        continue
                    _raise_engine_error(emission)
                    touched[emission.request] = choice
                    if choice.add(emission):
                        submission.cancel(emission.request)
                    clock.emitted(emission, ended=bool(choice.finish))
                if deltas := [delta for choice in touched.values() if (delta := choice.delta())]:
                    yield deltas
        except DeadlineExceeded:
            unfinished = [choice for choice in generation.choices if not choice.finish]
            if not any(choice.tokens for choice in generation.choices):
                raise
            for choice in unfinished:
                choice.end("length")
            yield [choice.delta() for choice in unfinished]


async def collect_deltas(generation: Generation, deltas: AsyncGenerator[list[ChoiceDelta], None]) -> list[ChoiceDelta]:
    """Returns each choice's deltas joined into one, in order of choices."""
    whole = [ChoiceDelta(choice.index) for choice in generation.choices]
    async with aclosing(deltas):
        async for some in deltas:
            for delta in some:
                whole[delta.choice].add(delta)
    for delta in whole:
        delta.pieces.drop_broken_tool_calls()
    return whole


def _raise_engine_error(emission: Emission) -> None:
    """Raises the RequestError that the engine ended a request with, if the emission has one."""
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
