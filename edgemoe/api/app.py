"""Builds the ASGI applications: their routes and middleware."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgemoe.api import lm_studio_queries, ollama_queries, peer_queries, queries
from edgemoe.api.api_keys import KeyRing
from edgemoe.api.endpoints import anthropic, completions, llama_infill, lm_studio, ollama, responses
from edgemoe.api.endpoints import chat_completions as chat
from edgemoe.api.endpoints.event_stream import EVENTS, stream_events
from edgemoe.api.endpoints.ollama_format import ChatLines, TextLines
from edgemoe.api.endpoints.openai_format import late_error
from edgemoe.api.generating import Generating, OllamaGenerating
from edgemoe.api.http import responding as http
from edgemoe.api.http.middleware import OriginCheck, Origins, PlainPaths, RequestMiddleware
from edgemoe.api.http.page import PAGE, page
from edgemoe.api.llama_bodies import Infill, LlamaCompletion
from edgemoe.api.resources import Api
from edgemoe.api.schema import Chat, Completion
from edgemoe.errors import EdgemoeError, RequestError

log = logging.getLogger(__name__)


def build(api: Api) -> Starlette:
    """Returns the ASGI application of the Unix socket and of `api.tcp`."""
    routes = [
        *_openai_routes(),
        *_ollama_routes(),
        *_llama_routes(),
        *_lm_studio_routes(),
        *_peer_routes(),
        Route("/reload", queries.reload, methods=["POST"]),
        Route("/cluster", queries.members),
        Route("/cluster", queries.change_members, methods=["POST"]),
        Route("/version", queries.version),
        Route("/tokenizer_info", queries.tokenizer_info),
        Route("/health", queries.health),
        Route("/v1/health", queries.health),
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


def build_forwarded(api: Api) -> Starlette:
    """Returns the ASGI application for requests that other boxes forward, which have checked their clients."""
    routes = [*_openai_routes(), *_ollama_routes(), *_llama_routes(), *_lm_studio_routes()]
    return _application(api, routes, None, guarded=())


def _llama_routes() -> list[Route]:
    return [
        _post("/completion", Generating(llama_infill.prepare_completion, LlamaCompletion, llama_infill.late_error)),
        _post("/infill", Generating(llama_infill.prepare, Infill, llama_infill.late_error)),
        _post("/models/load", Generating(lm_studio.prepare_load, lm_studio.LmStudioModel, late_error)),
        Route("/models/unload", lm_studio_queries.unload, methods=["POST"]),
        Route("/apply-template", queries.apply_template, methods=["POST"]),
        Route("/v1/chat/completions/input_tokens", queries.count_chat_tokens, methods=["POST"]),
        Route("/tokenize", queries.tokenize, methods=["POST"]),
        Route("/detokenize", queries.detokenize, methods=["POST"]),
    ]


def _peer_routes() -> list[Route]:
    return [
        Route("/props", peer_queries.props),
        Route("/slots", peer_queries.slots),
        *(Route(path, peer_queries.refuse, methods=["POST"]) for path, _ in peer_queries.REFUSALS),
        Route("/lora-adapters", peer_queries.adapters),
        Route("/ping", peer_queries.ping, methods=["GET", "POST"]),
        Route("/load", peer_queries.load),
        Route("/is_sleeping", peer_queries.is_sleeping),
        Route("/get_model_info", peer_queries.model_info),
        Route("/model_info", peer_queries.model_info),
        Route("/info", peer_queries.model_info),
        Route("/lmstudio-greeting", peer_queries.greet),
    ]


def _lm_studio_routes() -> list[Route]:
    return [
        _post("/api/v1/chat", Generating(lm_studio.prepare, lm_studio.LmStudioChat, lm_studio.late_error)),
        _post("/api/v1/models/load", Generating(lm_studio.prepare_load, lm_studio.LmStudioModel, lm_studio.late_error)),
        Route("/api/v1/models", lm_studio_queries.list_models),
        Route("/api/v1/models/unload", lm_studio_queries.unload, methods=["POST"]),
        Route("/api/v0/models/{name:path}", queries.describe_model),
        *(Route(path, lm_studio_queries.refuse, methods=methods) for path, methods, _ in lm_studio_queries.REFUSALS),
    ]


def _openai_routes() -> list[Route]:
    return [
        Route("/v1/models", queries.list_models),
        Route("/v1/models/{name:path}", queries.describe_model),
        _post("/v1/chat/completions", Generating(chat.prepare, Chat, late_error)),
        _post("/v1/completions", Generating(completions.prepare, Completion, late_error)),
        _post("/v1/responses", Generating(responses.prepare, responses.ResponsesBody, responses.late_error)),
        _post("/v1/messages", Generating(anthropic.prepare, anthropic.MessagesBody, anthropic.late_error)),
        Route("/v1/responses/input_tokens", queries.count_input_tokens, methods=["POST"]),
        Route("/v1/messages/count_tokens", queries.count_tokens, methods=["POST"]),
        *(Route(path, queries.refuse_embeddings, methods=["POST"]) for path in queries.EMBEDDINGS),
    ]


def _ollama_routes() -> list[Route]:
    return [
        _post("/api/chat", OllamaGenerating(ollama.prepare_chat, ollama.OllamaChat, ChatLines)),
        _post("/api/generate", OllamaGenerating(ollama.prepare_text, ollama.OllamaPrompt, TextLines)),
        Route("/api/tags", ollama_queries.list_models),
        Route("/api/ps", ollama_queries.list_loaded),
        Route("/api/show", ollama_queries.show, methods=["POST"]),
        Route("/api/pull", ollama_queries.pull, methods=["POST"]),
        Route("/api/version", ollama_queries.version),
        *(Route(path, ollama_queries.refuse, methods=methods) for path, methods, _ in ollama_queries.REFUSALS),
    ]


def _post(path: str, endpoint: Generating) -> Route:
    return Route(path, endpoint.run, methods=["POST"])


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
            allow_private_network=True,  # the owner has listed the page: it may be of another network
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
    ]


def _edgemoe_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return http.error_response(error, request.scope)
    log.error("a request failed", exc_info=error, extra={"path": request.url.path})
    return http.error_response(RequestError(str(error)), request.scope)
