"""Builds the ASGI application: its routes, and how generating requests are prepared and answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import edgemoe
from edgemoe.api.backend import Backend
from edgemoe.api.endpoints import anthropic, chat, completions, responses
from edgemoe.api.endpoints import queries as tokens
from edgemoe.api.endpoints.anthropic import MessageFormat
from edgemoe.api.endpoints.events import EVENTS, EventStreams, stream_events
from edgemoe.api.endpoints.queries import reach, reload
from edgemoe.api.endpoints.responses import ResponsesFormat
from edgemoe.api.generate.generation import AnswerFormat, Generation, RequestSender, run_generation
from edgemoe.api.generate.grammar_trial import GrammarChecker, grammar_command
from edgemoe.api.http import responding as http
from edgemoe.api.http.bodies import BodyBudget
from edgemoe.api.http.middleware import RequestMiddleware
from edgemoe.api.http.page import PAGE, OriginCheck, Origins, page
from edgemoe.api.keys import KeyRing
from edgemoe.api.metrics import CONTENT_TYPE, Metrics
from edgemoe.api.schema import Chat, Completion, Detokenize, FieldNames, RequestBody, Tokenize, read
from edgemoe.api.text.bounded_text import BoundedText
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import ApiSettings
from edgemoe.errors import EdgemoeError, InvalidRequest, ModelNotFound, RequestError
from edgemoe.helper.turns import TaskTurns
from edgemoe.types.arrays import Json
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.principal import Identity, Principal, cache_salt_of
from edgemoe.types.request import RequestLimits

log = logging.getLogger(__name__)
R = TypeVar("R")

ANY = "*"  # among aliases: every name
PREPARE_THREADS = 3  # that decode bodies and wait for prompts, so that the event loop is free for streams
PREPARE_EACH = 2  # of them for one principal
LARGE_BYTES = 1 << 20  # of a body beyond which one is prepared at a time


@dataclass(slots=True)
class Api:
    """Holds what the endpoints share: settings, backend, tokenizer, metrics, threads."""

    settings: ApiSettings
    backend: Backend
    text: TextModel
    prompts: BoundedText  # which makes the text model's prompts
    metrics: Metrics = field(default_factory=Metrics)
    keys: KeyRing | None = None  # of which TCP clients must give one; None where nobody comes by TCP
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(PREPARE_THREADS, "prepare"))
    node: str = ""  # of this box, in a cluster
    shares_prefixes: bool = False  # among principals
    grammars: GrammarChecker = field(init=False)
    thread_turns: TaskTurns = field(default_factory=lambda: TaskTurns(PREPARE_THREADS, PREPARE_EACH))
    large_turns: TaskTurns = field(default_factory=lambda: TaskTurns(1, 1))
    bodies: BodyBudget = field(init=False)
    events: EventStreams = field(init=False)

    def __post_init__(self) -> None:
        self.events = EventStreams(self.backend, self.metrics)
        self.bodies = BodyBudget(self.settings.max_body_bytes)
        self.grammars = GrammarChecker(grammar_command(self.text.directory, self.text.eos))

    async def in_thread(self, principal: Principal, work: Callable[..., R], *args: Any) -> R:
        """Returns `work(*args)`, run in a thread, by principals in turn. Waiting for a turn can be cancelled."""
        loop = asyncio.get_running_loop()
        place = await self.thread_turns.begin(principal)
        future = self.threads.submit(work, *args)

        def free(_: Future[R]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended meanwhile
                loop.call_soon_threadsafe(place.end)

        future.add_done_callback(free)
        return await asyncio.wrap_future(future)

    @contextlib.asynccontextmanager
    async def large(self, raw: bytes, principal: Principal) -> AsyncIterator[None]:
        """Lets one large body be worked on at a time, by principals in turn."""
        if len(raw) <= LARGE_BYTES:
            yield
            return
        async with self.large_turns.turn(principal):
            yield

    def text_for(self, principal: Principal) -> TextModel:
        """Returns the text model that makes this principal's prompts in bounds. For use on threads."""
        return self.prompts.of(self.text, principal)

    async def close(self) -> None:
        """Ends the processes for untrusted work."""
        await asyncio.gather(self.prompts.close(), self.grammars.close())


def build(api: Api) -> Starlette:
    """Returns the ASGI application."""
    routes = [
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
        Route("/v1/chat/completions", _generating(_prepare_chat), methods=["POST"]),
        Route("/v1/completions", _generating(_prepare_completion), methods=["POST"]),
        Route("/v1/responses", _generating(_prepare_response), methods=["POST"]),
        Route("/v1/messages", _generating(_prepare_message), methods=["POST"]),
        Route("/v1/messages/count_tokens", _count_tokens, methods=["POST"]),
        Route("/v1/embeddings", _no_embeddings, methods=["POST"]),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/reload", reload, methods=["POST"]),
        Route("/version", _version),
        Route("/tokenizer_info", _tokenizer_info),
        Route("/health", _health),
        Route("/reach", reach),
        Route("/metrics", _metrics),
        Route(EVENTS, stream_events),
        *(Route(path, page) for path in PAGE),
    ]
    settings = api.settings
    app = Starlette(
        routes=routes,
        middleware=[
            *_cors(settings.cors_origins),
            Middleware(RequestMiddleware, keys=api.keys, metrics=api.metrics, node=api.node),
            Middleware(OriginCheck, origins=Origins(settings.cors_origins, settings.hosts), guarded={*PAGE, EVENTS}),
        ],
        exception_handlers={HTTPException: http.http_error, EdgemoeError: _edgemoe_error},
    )
    app.state.api = api
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Returns the middleware that lets pages of these origins call the API from a browser."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


# --- generating -----------------------------------------------------------------------------------------------

Prepared = tuple[Generation, AnswerFormat, bool, FieldNames]


class PrepareContext(NamedTuple):
    """What a request is prepared with, beside its body."""

    api: Api
    text: TextModel
    info: ModelInfo
    limits: RequestLimits
    principal: Principal


Prepare = Callable[[PrepareContext, bytes], Prepared]


def _generating(prepare: Prepare) -> Callable[[Request], Any]:
    """Returns an endpoint that calls `prepare` on the body in a thread, and runs the generation that it returns."""

    async def endpoint(request: Request) -> ASGIApp:
        api: Api = request.app.state.api
        principal: Principal = request.state.principal

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with api.bodies.open(principal) as body:
                raw = await api.bodies.read(body, request)
                async with http.while_connected(receive), api.large(raw, principal):
                    info, limits = await api.backend.model()
                    asked = PrepareContext(api, api.text_for(principal), info, limits, principal)
                    job, form, stream, origin = await api.in_thread(principal, prepare, asked, raw)
                    with origin.named():
                        job.constrain(await api.grammars.first(job.grammar, principal))
                del raw
            async with http.while_connected(receive):
                deltas = run_generation(job, api.backend, api.metrics, api.settings.request_timeout_s)
                await http.reply(send, job, form, deltas, stream)

        return answer

    return endpoint


def _prepare_chat(asked: PrepareContext, raw: bytes) -> Prepared:
    body = read(raw, Chat)
    job = chat.prepare(body, asked.text, asked.limits, _name(asked, body), _asker(asked, body))
    return job, chat.ChatFormat(job, body, asked.text), bool(body.stream), FieldNames({})


def _prepare_completion(asked: PrepareContext, raw: bytes) -> Prepared:
    body = read(raw, Completion)
    job = completions.prepare(body, asked.text, asked.limits, _name(asked, body), _asker(asked, body))
    return job, completions.CompletionFormat(job, body, asked.text), bool(body.stream), FieldNames({})


def _prepare_response(asked: PrepareContext, raw: bytes) -> Prepared:
    body = read(raw, responses.ResponsesBody)
    plain, origin = responses.as_chat(body)
    with origin.named():
        asker = _asker(asked, body)
        job = chat.prepare(plain, asked.text, asked.limits, _name(asked, body), asker, prefix="resp")
    return job, ResponsesFormat(job, body), bool(body.stream), origin


def _prepare_message(asked: PrepareContext, raw: bytes) -> Prepared:
    body = read(raw, anthropic.MessagesBody)
    if body.max_tokens is None:
        raise InvalidRequest("max_tokens: is missing", param="max_tokens", code="missing_required_parameter")
    plain, origin = anthropic.as_chat(body)
    with origin.named():
        asker = _asker(asked, plain)
        job = chat.prepare(plain, asked.text, asked.limits, _name(asked, body), asker, prefix="msg")
    return job, MessageFormat(job), bool(body.stream), origin


def _name(asked: PrepareContext, body: RequestBody) -> str:
    return _served(asked.api, body.model, asked.info)


def _served(api: Api, name: str | None, info: ModelInfo) -> str:
    """Returns the served model's name. Raises ModelNotFound for a name that is none of its (api.aliases)."""
    if name not in (None, info.id, *api.settings.aliases) and ANY not in api.settings.aliases:
        raise ModelNotFound(f"the model {name!r} is not served here; {info.id!r} is", param="model")
    return info.id


def _asker(asked: PrepareContext, body: RequestBody) -> RequestSender:
    """Returns whom a request is from. What its body says divides what the principal has, and nothing more."""
    salt = cache_salt_of(asked.principal, body.cache_salt, shared=asked.api.shares_prefixes)
    return RequestSender(Identity.of(asked.principal, body.user or body.safety_identifier), salt)


# --- the rest ---------------------------------------------------------------------------------------------------


async def _models(request: Request) -> Response:
    api: Api = request.app.state.api
    info, limits = await api.backend.model()
    card = tokens.model_card(info, limits.context_tokens)
    others = [card | {"id": name, "root": info.id} for name in api.settings.aliases if name not in (ANY, info.id)]
    return JSONResponse({"object": "list", "data": [card, *others]})


async def _model(request: Request) -> Response:
    info, limits = await request.app.state.api.backend.model()
    _served(request.app.state.api, request.path_params["name"], info)
    return JSONResponse(tokens.model_card(info, limits.context_tokens))


async def _no_embeddings(request: Request) -> Response:
    raise ModelNotFound("the model served here has no embeddings", code="no_embeddings")


async def _tokenize(request: Request) -> Response:
    return await _quick(request, Tokenize, tokens.tokenize)


async def _detokenize(request: Request) -> Response:
    return await _quick(request, Detokenize, tokens.detokenize)


async def _count_tokens(request: Request) -> Response:
    return await _quick(request, anthropic.MessagesBody, _count)


def _count(body: anthropic.MessagesBody, text: TextModel, limits: RequestLimits) -> Json:
    plain, origin = anthropic.as_chat(body)
    with origin.named():
        return {"input_tokens": len(chat.prompt_of(plain, text, limits))}


async def _quick(request: Request, kind: type[R], work: Callable[[R, TextModel, RequestLimits], Any]) -> Response:
    api: Api = request.app.state.api
    principal: Principal = request.state.principal

    def in_thread(raw: bytes) -> Response:
        body = read(raw, kind)
        _served(api, getattr(body, "model", None), info)
        return JSONResponse(work(body, text, limits))

    with api.bodies.open(principal) as body:
        raw = await api.bodies.read(body, request)
        async with http.while_connected(request.receive), api.large(raw, principal):
            info, limits = await api.backend.model()
            text = api.text_for(principal)
            return await api.in_thread(principal, in_thread, raw)


async def _version(request: Request) -> Response:
    return JSONResponse({"version": edgemoe.__version__})


async def _tokenizer_info(request: Request) -> Response:
    api: Api = request.app.state.api
    return JSONResponse(api.text.about())


async def _health(request: Request) -> Response:
    api: Api = request.app.state.api
    state = api.backend.state
    about = api.backend.describe() if request.state.known else {"status": state}
    return JSONResponse(about, 200 if state == "ready" else 503)


async def _metrics(request: Request) -> Response:
    api: Api = request.app.state.api
    return Response(api.metrics.render(api.backend.metrics()), media_type=CONTENT_TYPE)


def _edgemoe_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return http.error_response(error, request.url.path)
    log.error("a request failed", exc_info=error, extra={"path": request.url.path})
    return http.error_response(RequestError(str(error)), request.url.path)
