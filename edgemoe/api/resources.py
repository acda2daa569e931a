"""Holds the resources that an application's endpoints share, with the fair turns of the threads for requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edgemoe.api.api_keys import KeyRing
from edgemoe.api.backend import Backend
from edgemoe.api.endpoints.event_stream import EventStreams
from edgemoe.api.generate.generation import RequestContext
from edgemoe.api.generate.grammar_trial import GrammarChecker, grammar_command
from edgemoe.api.http.bodies import BodyBudget
from edgemoe.api.metrics import Metrics
from edgemoe.api.text.bounded_text import BoundedText
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import ApiSettings
from edgemoe.helper.turns import TaskTurns
from edgemoe.types.principal import Principal

R = TypeVar("R")

PREPARE_THREADS = 3  # decode bodies and wait for prompts, so that the event loop is free for streams
PREPARE_EACH = 2  # threads that one principal may have
LARGE_BYTES = 1 << 20  # longer bodies are prepared one at a time


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Describes the packed store, for clients that list models. 0 is unknown."""

    disk_bytes: int = 0
    parameters: int = 0
    modified_s: float = 0.0  # since 1970


@dataclass(slots=True)
class Api:
    """Holds the settings, backend, tokenizer, metrics and threads that the endpoints share."""

    settings: ApiSettings
    backend: Backend
    text: TextModel
    prompts: BoundedText  # renders and tokenizes for `text`
    metrics: Metrics = field(default_factory=Metrics)
    keys: KeyRing | None = None  # TCP clients must give one of them; None without a TCP listener
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(PREPARE_THREADS, "prepare"))
    node: str = ""  # this box's name in a cluster
    shares_prefixes: bool = False  # all principals share cached prefixes
    store: StoreFacts = StoreFacts()
    grammars: GrammarChecker = field(init=False)
    thread_turns: TaskTurns = field(default_factory=lambda: TaskTurns(PREPARE_THREADS, PREPARE_EACH))
    large_turns: TaskTurns = field(default_factory=lambda: TaskTurns(1, 1))
    bodies: BodyBudget = field(init=False)
    events: EventStreams = field(init=False)

    def __post_init__(self) -> None:
        self.events = EventStreams(self.backend, self.metrics)
        self.bodies = BodyBudget(self.settings.max_body_bytes)
        self.grammars = GrammarChecker(grammar_command(self.text.directory, self.text.eos))

    async def context(self, principal: Principal) -> RequestContext:
        """Waits for an engine. Returns the context that this principal's requests are prepared in.

        Raises EngineUnavailable.
        """
        info, limits = await self.backend.model()
        text = self.prompts.of(self.text, principal)
        return RequestContext(text, info.id, tuple(self.settings.aliases), limits, principal, self.shares_prefixes)

    async def in_thread(self, principal: Principal, work: Callable[..., R], *args: Any) -> R:
        """Returns `work(*args)`, run in a thread, by principals in turn. Waiting for a turn can be cancelled."""
        loop = asyncio.get_running_loop()
        place = await self.thread_turns.begin(principal)
        future = self.threads.submit(work, *args)

        def free(_: Future[R]) -> None:
            with contextlib.suppress(RuntimeError):  # the daemon has ended meanwhile: the loop is closed
                loop.call_soon_threadsafe(place.give_back)

        future.add_done_callback(free)
        return await asyncio.wrap_future(future)

    @contextlib.asynccontextmanager
    async def large(self, raw: bytes, principal: Principal) -> AsyncIterator[None]:
        """Admits one large body at a time to the `with` block, by principals in turn; small bodies enter at once."""
        if len(raw) <= LARGE_BYTES:
            yield
            return
        async with self.large_turns.turn(principal):
            yield

    async def close(self) -> None:
        """Ends the processes that work on untrusted prompts and schemas."""
        await asyncio.gather(self.prompts.close(), self.grammars.close())
