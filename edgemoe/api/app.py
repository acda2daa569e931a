"""Builds the ASGI application: its routes, and the way of a generating request from its body to its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgemoe.api import queries
from edgemoe.api.endpoints import anthropic, completions, responses
from edgemoe.api.endpoints import chat_completions as chat
from edgemoe.api.endpoints.event_stream import EVENTS, stream_events
from edgemoe.api.generate.generation import PreparedAnswer, RequestContext, run_generation
from edgemoe.api.http import responding as http
from edgemoe.api.http.middleware import RequestMiddleware
from edgemoe.api.http.page import PAGE, OriginCheck, Origins, page
from edgemoe.api.resources import Api
from edgemoe.errors import EdgemoeError, RequestError
from edgemoe.types.principal import Principal

log = logging.getLogger(__name__)

Prepare = Callable[[RequestContext, bytes], PreparedAnswer]  # decodes a body and prepares its generation


def build(api: Api) -> Starlette:
    """Returns the ASGI application."""
    routes = [
        Route("/v1/models", queries.list_models),
        Route("/v1/models/{name:path}", queries.describe_model),
        Route("/v1/chat/completions", _generating(chat.prepare), methods=["POST"]),
        Route("/v1/completions", _generating(completions.prepare), methods=["POST"]),
        Route("/v1/responses", _generating(responses.prepare), methods=["POST"]),
        Route("/v1/messages", _generating(anthropic.prepare), methods=["POST"]),
        Route("/v1/messages/count_tokens", queries.count_tokens, methods=["POST"]),
        Route("/v1/embeddings", queries.refuse_embeddings, methods=["POST"]),
        Route("/tokenize", queries.tokenize, methods=["POST"]),
        Route("/detokenize", queries.detokenize, methods=["POST"]),
        Route("/reload", queries.reload, methods=["POST"]),
        Route("/version", queries.version),
        Route("/tokenizer_info", queries.tokenizer_info),
        Route("/health", queries.health),
        Route("/reach", queries.reach),
        Route("/metrics", queries.metrics),
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


def _generating(prepare: Prepare) -> Callable[[Request], Any]:
    """Returns an endpoint that prepares the body in a thread, tries its grammar, runs it and sends the answer."""

    async def endpoint(request: Request) -> ASGIApp:
        api: Api = request.app.state.api
        principal: Principal = request.state.principal

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with api.bodies.open(principal) as body:
                raw = await api.bodies.read(body, request)
                async with http.while_connected(receive), api.large(raw, principal):
                    context = await api.context(principal)
                    prepared = await api.in_thread(principal, prepare, context, raw)
                    generation = prepared.generation
                    with prepared.fields.renamed():
                        generation.constrain(await api.grammars.first(generation.grammar, principal))
                del raw
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
