"""Holds the resources that an application's endpoints share, with the fair turns of the threads for requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from edgemoe.api.api_keys import KeyRing
from edgemoe.api.backend import Backend, BoxSnapshot, State
from edgemoe.api.endpoints.event_stream import EventStreams
from edgemoe.api.generate.generation import ANY_MODEL, RequestContext
from edgemoe.api.generate.grammar_trial import GrammarChecker, grammar_command
from edgemoe.api.http.bodies import BodyBudget
from edgemoe.api.http.distant_answer import DistantAnswer
from edgemoe.api.metrics import Metrics
from edgemoe.api.model_wish import ModelWish
from edgemoe.api.text.bounded_text import BoundedText
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import ApiSettings
from edgemoe.helper.turns import TaskTurns
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import ModelInfo, loading_text
from edgemoe.types.request import Principal

R = TypeVar("R")

TIER_BYTES = 'edgemoe_tier_bytes{tier="%s"}'
PREPARE_THREADS = 3  # decode bodies and wait for prompts, so that the event loop is free for streams
PREPARE_EACH = 2  # threads that one principal may have
LARGE_BYTES = 1 << 20  # longer bodies are prepared one at a time


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Describes the packed store, for clients that list models. 0 is unknown."""

    disk_bytes: int = 0
    parameters: int = 0
    modified_s: float = 0.0  # since 1970


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that requests may name, loaded or not."""

    name: str
    state: State
    info: ModelInfo | None  # None where its store cannot be read
    context_tokens: int
    capabilities: Sequence[str]
    store: StoreFacts
    ram_bytes: int = 0  # of experts
    vram_bytes: int = 0
    is_pinned: bool = True
    idle_s: float = 0.0  # since its last request
    expires_s: float | None = None  # until it is unloaded; None: not by the clock
    boxes: Sequence[str] = ()  # of the cluster that serve it by this name; () outside a cluster


class ModelChoice(Protocol):
    """The models of a daemon."""

    @property
    def has_several(self) -> bool:
        """Returns whether requests may choose among models."""

    @property
    def state(self) -> State:
        """Returns the daemon's state: it is ready also while models that are not pinned are not loaded."""

    def using(self, wish: ModelWish) -> AbstractAsyncContextManager[Api]:
        """Has a model loaded, and holds it meanwhile. Yields its resources. None is the first model.

        Raises ModelNotFound, EngineUnavailable.
        """

    async def release(self, name: str | None) -> str:
        """Unloads a model as soon as no request uses it. Returns its name. Raises ModelNotFound."""

    async def listed(self) -> Sequence[ListedModel]:
        """Returns all models, the first one first."""

    async def find_listed(self, name: str | None) -> ListedModel:
        """Returns one model. Raises ModelNotFound."""

    async def text_of(self, name: str | None) -> Api:
        """Returns the resources of a model, which need not be loaded. Raises ModelNotFound, EngineUnavailable."""

    def loading(self, wish: ModelWish) -> str:
        """Returns how far the loading of a model is; "" of a loaded one. Raises ModelNotFound."""

    def elsewhere(self, wish: ModelWish) -> DistantAnswer | None:
        """Returns the way to an answer by other boxes; None where the wish is for this one."""

    def describe(self) -> list[Json]:
        """Returns the models' states for /health; none of a daemon with one model."""

    def snapshots(self) -> Sequence[BoxSnapshot]:
        """Returns the latest snapshots of the first model's engines on all boxes, and of this box's other models."""

    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Returns the metrics of the models' engines and of the cluster, by model."""

    async def reload(self) -> str:
        """Serves the models of the settings as they are now. Returns a message. Raises ReloadRefused."""


@dataclass(slots=True)
class Api:
    """Holds the settings, backend, tokenizer, metrics and threads that the endpoints share.

    With several `models` it is the first one's. Each other one has an Api of its own, with the same threads and turns.
    """

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
    choice: ModelChoice | None = None  # of all models that the daemon serves
    grammars: GrammarChecker = field(init=False)
    thread_turns: TaskTurns = field(default_factory=lambda: TaskTurns(PREPARE_THREADS, PREPARE_EACH))
    large_turns: TaskTurns = field(default_factory=lambda: TaskTurns(1, 1))
    bodies: BodyBudget = field(init=False)
    events: EventStreams = field(init=False)

    def __post_init__(self) -> None:
        self.events = EventStreams(self.backend, self.metrics, self.describe, self.snapshots)
        self.bodies = BodyBudget(self.settings.max_body_bytes)
        self.grammars = GrammarChecker(grammar_command(self.text.directory, self.text.eos))

    @property
    def models(self) -> ModelChoice | None:
        """Returns the models of a daemon that serves several; None where there is no choice."""
        return self.choice if self.choice is not None and self.choice.has_several else None

    @property
    def state(self) -> State:
        """Returns the daemon's state."""
        return self.backend.state if self.models is None else self.models.state

    def describe(self) -> Json:
        """Returns the body of /health."""
        models = [] if self.models is None else self.models.describe()
        return self.backend.describe() | ({"status": self.state, "models": models} if models else {})

    def snapshots(self) -> Sequence[BoxSnapshot]:
        """Returns the latest snapshots of the engines of all boxes, and of this box's models."""
        return self.backend.snapshots() if self.models is None else self.models.snapshots()

    @contextlib.asynccontextmanager
    async def chosen(self, wish: ModelWish) -> AsyncIterator[Api]:
        """Holds the model for a request. Yields its resources. Raises ModelNotFound, EngineUnavailable."""
        if self.models is None:
            yield self
            return
        async with self.models.using(wish) as api:
            yield api

    def loading(self, wish: ModelWish) -> str:
        """Returns how far the loading of a request's model is; "" of a loaded one. Raises ModelNotFound."""
        if self.models is not None:
            return self.models.loading(wish)
        at = self.backend.describe()["loading"] if self.backend.state == "loading" else None
        return f"loading: {loading_text(at)}" if at else ""

    def elsewhere(self, wish: ModelWish, request: Request) -> DistantAnswer | None:
        """Returns the way to an answer by other boxes; None where this one answers, as it does forwarded ones."""
        if self.models is None or request.scope["state"].get("teller"):
            return None
        return self.models.elsewhere(wish)

    async def listed(self) -> Sequence[ListedModel]:
        """Returns the models that requests may name. Raises EngineUnavailable."""
        return [await self._listed()] if self.models is None else await self.models.listed()

    async def find_listed(self, name: str | None) -> ListedModel:
        """Returns one model. Raises ModelNotFound, EngineUnavailable."""
        return await self._listed() if self.models is None else await self.models.find_listed(name)

    async def _listed(self) -> ListedModel:
        info, limits = await self.backend.model()
        tiers = (self.backend.metrics().get(TIER_BYTES % tier, 0) for tier in ("ram", "vram"))
        ram_bytes, vram_bytes = map(int, tiers)
        can = self.text.capabilities
        return ListedModel(
            info.id, self.backend.state, info, limits.context_tokens, can, self.store, ram_bytes, vram_bytes
        )

    async def context(self, principal: Principal) -> RequestContext:
        """Waits for an engine. Returns the context that this principal's requests are prepared in.

        Raises EngineUnavailable.
        """
        info, limits = await self.backend.model()
        text = self.prompts.of(self.text, principal)
        aliases = self.settings.aliases if self.models is None else (ANY_MODEL,)  # the body's name has chosen this one
        return RequestContext(text, info.id, tuple(aliases), limits, principal, self.shares_prefixes)

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
