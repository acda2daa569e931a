"""Builds the ASGI application: its routes, and the way of a generating request from its body to its answer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgemoe.api import ollama_queries, queries
from edgemoe.api.api_keys import KeyRing
from edgemoe.api.endpoints import anthropic, completions, llama_infill, ollama, responses
from edgemoe.api.endpoints import chat_completions as chat
from edgemoe.api.endpoints.event_stream import EVENTS, stream_events
from edgemoe.api.generate.generation import PreparedAnswer, RequestContext, run_generation
from edgemoe.api.http import responding as http
from edgemoe.api.http.middleware import OriginCheck, Origins, PlainPaths, RequestMiddleware
from edgemoe.api.http.page import PAGE, page
from edgemoe.api.model_wish import NO_WISH, ModelWish, read_ollama_wish, read_wish
from edgemoe.api.resources import Api
from edgemoe.errors import EdgemoeError, RequestError
from edgemoe.types.principal import Principal

log = logging.getLogger(__name__)

Prepare = Callable[
    [RequestContext, bytes], PreparedAnswer | Response
]  # decodes a body; prepares its generation, if any


def build(api: Api) -> Starlette:
    """Returns the ASGI application of the Unix socket and of `api.tcp`."""
    routes = [
        *_openai_routes(),
        *_ollama_routes(),
        Route("/infill", _generating(llama_infill.prepare), methods=["POST"]),
        Route("/props", queries.props),
        Route("/tokenize", queries.tokenize, methods=["POST"]),
        Route("/detokenize", queries.detokenize, methods=["POST"]),
        Route("/reload", queries.reload, methods=["POST"]),
        Route("/cluster", queries.members),
        Route("/cluster", queries.change_members, methods=["POST"]),
        Route("/version", queries.version),
        Route("/tokenizer_info", queries.tokenizer_info),
        Route("/health", queries.health),
        Route("/reach", queries.reach),
        Route("/metrics", queries.metrics),
        Route(EVENTS, stream_events),
        *(Route(path, page) for path in PAGE),
    ]
    return _application(api, routes, api.keys, guarded={*PAGE, EVENTS})


def build_ollama(api: Api) -> Starlette:
    """Returns the ASGI application of `api.ollama_tcp`, with the paths of Ollama's own port.

    Without keys the Host and Origin of every request are checked, since any web page can reach a loopback port.
    """
    routes = [Route("/", ollama_queries.greet), *_ollama_routes(), *_openai_routes(), Route("/health", queries.health)]
    return _application(api, routes, None if api.settings.ollama_keyless else api.keys, guarded=None)


def _openai_routes() -> list[Route]:
    return [
        Route("/v1/models", queries.list_models),
        Route("/v1/models/{name:path}", queries.describe_model),
        Route("/v1/chat/completions", _generating(chat.prepare), methods=["POST"]),
        Route("/v1/completions", _generating(completions.prepare), methods=["POST"]),
        Route("/v1/responses", _generating(responses.prepare), methods=["POST"]),
        Route("/v1/messages", _generating(anthropic.prepare), methods=["POST"]),
        Route("/v1/messages/count_tokens", queries.count_tokens, methods=["POST"]),
        Route("/v1/embeddings", queries.refuse_embeddings, methods=["POST"]),
    ]


def _ollama_routes() -> list[Route]:
    return [
        Route("/api/chat", _generating(ollama.prepare_chat, read_ollama_wish, ollama.unloaded_chat), methods=["POST"]),
        Route(
            "/api/generate", _generating(ollama.prepare_text, read_ollama_wish, ollama.unloaded_text), methods=["POST"]
        ),
        Route("/api/tags", ollama_queries.list_models),
        Route("/api/ps", ollama_queries.list_loaded),
        Route("/api/show", ollama_queries.show, methods=["POST"]),
        Route("/api/pull", ollama_queries.pull, methods=["POST"]),
        Route("/api/version", ollama_queries.version),
        *(Route(path, ollama_queries.refuse, methods=methods) for path, methods, _ in ollama_queries.REFUSALS),
    ]


def _application(api: Api, routes: Sequence[Route], keys: KeyRing | None, guarded: Collection[str] | None) -> Starlette:
    """Returns an application; by TCP, `guarded` paths need a Host header of this machine (None: all paths)."""
    settings = api.settings
    app = Starlette(
        routes=routes,
        middleware=[
            *_cors(settings.cors_origins),
            Middleware(PlainPaths, routes=routes),
            Middleware(RequestMiddleware, keys=keys, metrics=api.metrics, node=api.node),
            Middleware(OriginCheck, origins=Origins(settings.cors_origins, settings.hosts), guarded=guarded),
        ],
        exception_handlers={HTTPException: http.http_error, EdgemoeError: _edgemoe_error},
    )
    app.router.redirect_slashes = False  # a redirect would name http, and clients drop their key on the way
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


def _generating(
    prepare: Prepare, wish: Callable[[bytes], ModelWish] = read_wish, unloaded: Callable[[str], Response] | None = None
) -> Callable[[Request], Any]:
    """Returns an endpoint that prepares the body in a thread, tries its grammar, runs it and sends the answer.

    `wish` reads the model that a body asks for, where there are several; `unloaded` answers one that unloads a model.
    """

    async def endpoint(request: Request) -> ASGIApp:
        shared: Api = request.app.state.api
        principal: Principal = request.state.principal

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with contextlib.AsyncExitStack() as held:
                with shared.bodies.open(principal) as body:
                    raw = await shared.bodies.read(body, request)
                    async with http.while_connected(receive):
                        asked = NO_WISH if shared.models is None else await shared.in_thread(principal, wish, raw)
                        if shared.models is not None and asked.unloads and unloaded is not None:
                            await shared.models.release(asked.name)
                            await unloaded(asked.name or "")(scope, receive, send)
                            return
                        api = await held.enter_async_context(shared.chosen(asked))
                        async with shared.large(raw, principal):
                            context = await api.context(principal)
                            prepared = await api.in_thread(principal, prepare, context, raw)
                            if isinstance(prepared, PreparedAnswer):
                                generation = prepared.generation
                                with prepared.fields.renamed():
                                    generation.constrain(await api.grammars.first(generation.grammar, principal))
                    del raw
                if isinstance(prepared, Response):
                    await prepared(scope, receive, send)
                    return
                async with http.while_connected(receive):
                    deltas = run_generation(generation, api.backend, api.metrics, api.settings.request_timeout_s)
                    await http.reply(send, prepared, deltas)

        return answer

    return endpoint


def _edgemoe_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return http.error_response(error, request.url.path)
    log.error("a request failed", exc_info=error, extra={"path": request.url.path})
    return http.error_response(RequestError(str(error)), request.url.path)
