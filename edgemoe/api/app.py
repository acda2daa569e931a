"""The application: which path does what, and what every request has in common."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgemoe.api import chat, completions, http, responses, tokens
from edgemoe.api.backend import Backend
from edgemoe.api.job import Format, Job, run
from edgemoe.api.metrics import CONTENT_TYPE, Metrics
from edgemoe.api.responses_format import ResponseFormat
from edgemoe.api.sampling import Span
from edgemoe.api.schema import Chat, Completion, Detokenize, Tokenize, convert, decode
from edgemoe.api.text import TextModel
from edgemoe.config import ApiSettings
from edgemoe.errors import EdgemoeError, InvalidRequest, ModelNotFound, RequestError
from edgemoe.types import ModelInfo

log = logging.getLogger(__name__)
R = TypeVar("R")

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
PREPARE_THREADS = 2  # render and tokenize beside the event loop, which has streams to serve


@dataclass(slots=True)
class Api:
    """What the endpoints share."""

    settings: ApiSettings
    backend: Backend
    text: TextModel
    metrics: Metrics = field(default_factory=Metrics)
    keys: Sequence[bytes] = ()  # asked of clients that come by TCP
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(PREPARE_THREADS, "prepare"))

    async def in_thread(self, work: Callable[..., R], *args: Any) -> R:
        """`work(*args)`, without stalling the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)


def build(api: Api) -> Starlette:
    """The ASGI application."""
    routes = [
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
        Route("/v1/chat/completions", _generating(_prepare_chat), methods=["POST"]),
        Route("/v1/completions", _generating(_prepare_completion), methods=["POST"]),
        Route("/v1/responses", _generating(_prepare_response), methods=["POST"]),
        Route("/v1/embeddings", _no_embeddings, methods=["POST"]),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/reload", _reload, methods=["POST"]),
        Route("/health", _health),
        Route("/metrics", _metrics),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Doorway, api=api)],
        exception_handlers={HTTPException: http.http_error, EdgemoeError: _edgemoe_error},
    )
    app.state.api = api
    return app


# --- generating -----------------------------------------------------------------------------------------------

Prepared = tuple[Job, Format, bool]
Prepare = Callable[[Api, bytes, ModelInfo, Span, str], Prepared]


def _generating(prepare: Prepare) -> Callable[[Request], Any]:
    """An endpoint that runs what `prepare`, called in a thread, makes of the body."""

    async def endpoint(request: Request) -> ASGIApp:
        api: Api = request.app.state.api
        body = await http.read_body(request, api.settings.max_body_bytes)
        uid = getattr(request.state, "peer_uid", None)
        user = f"uid:{uid}" if uid is not None else "tcp"

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with http.while_connected(receive):
                info, context_tokens = await api.backend.model()
                span = Span(context_tokens, info.vocab)
                job, form, stream = await api.in_thread(prepare, api, body, info, span, user)
                deltas = run(job, api.backend, api.metrics, api.settings.request_timeout_s)
                await http.reply(send, job, form, deltas, stream)

        return answer

    return endpoint


def _prepare_chat(api: Api, raw: bytes, info: ModelInfo, span: Span, user: str) -> Prepared:
    body = convert(decode(raw), Chat)
    job = chat.prepare(body, api.text, span, _served(body.model, info), _user(user, body.user))
    return job, chat.ChatFormat(job, body, api.text), bool(body.stream)


def _prepare_completion(api: Api, raw: bytes, info: ModelInfo, span: Span, user: str) -> Prepared:
    body = convert(decode(raw), Completion)
    job = completions.prepare(body, api.text, span, _served(body.model, info), _user(user, body.user))
    return job, completions.CompletionFormat(job, body, api.text), bool(body.stream)


def _prepare_response(api: Api, raw: bytes, info: ModelInfo, span: Span, user: str) -> Prepared:
    body = convert(decode(raw), responses.Create)
    plain = responses.as_chat(body)
    job = chat.prepare(plain, api.text, span, _served(body.model, info), _user(user, body.user), prefix="resp")
    return job, ResponseFormat(job, body), bool(body.stream)


def _served(name: str | None, info: ModelInfo) -> str:
    """The model's name. Raises ModelNotFound for another's; none given is this one."""
    if name is not None and name != info.id:
        raise ModelNotFound(f"the model {name!r} is not served here; {info.id!r} is", param="model")
    return info.id


def _user(peer: str, named: str | None) -> str:
    """Whom fairness is about: the peer, and within it the user that an app names."""
    return f"{peer}/{named}" if named else peer


# --- the rest ---------------------------------------------------------------------------------------------------


async def _models(request: Request) -> Response:
    info, context_tokens = await request.app.state.api.backend.model()
    return JSONResponse({"object": "list", "data": [tokens.model_card(info, context_tokens)]})


async def _model(request: Request) -> Response:
    info, context_tokens = await request.app.state.api.backend.model()
    _served(request.path_params["name"], info)
    return JSONResponse(tokens.model_card(info, context_tokens))


async def _no_embeddings(request: Request) -> Response:
    raise ModelNotFound("the model served here has no embeddings", code="no_embeddings")


async def _tokenize(request: Request) -> Response:
    return await _quick(request, Tokenize, tokens.tokenize)


async def _detokenize(request: Request) -> Response:
    return await _quick(request, Detokenize, tokens.detokenize)


async def _quick(request: Request, kind: type[R], work: Callable[[R, TextModel, Span], Any]) -> Response:
    api: Api = request.app.state.api
    raw = await http.read_body(request, api.settings.max_body_bytes)
    info, context_tokens = await api.backend.model()

    def in_thread() -> Any:
        body = convert(decode(raw), kind)
        _served(getattr(body, "model", None), info)
        return work(body, api.text, Span(context_tokens, info.vocab))

    return JSONResponse(await api.in_thread(in_thread))


async def _health(request: Request) -> Response:
    backend = request.app.state.api.backend
    return JSONResponse(backend.describe(), 200 if backend.state == "ready" else 503)


async def _reload(request: Request) -> Response:
    if getattr(request.state, "peer_uid", None) is None:
        raise HTTPException(404, "this is for clients of the Unix socket")
    return JSONResponse({"message": await request.app.state.api.backend.reload()})


async def _metrics(request: Request) -> Response:
    api: Api = request.app.state.api
    return Response(api.metrics.render(api.backend.values), media_type=CONTENT_TYPE)


def _edgemoe_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return http.error_response(error)
    log.error("a request failed", exc_info=error, extra={"path": request.url.path})
    return http.error_response(RequestError(str(error)))


class Doorway:
    """What happens to every request: an id, the key where one is needed, and a count of how it ended."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        status = 499  # the client hung up before it was told anything

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            if refusal := self._refusal(scope, headers):
                await refusal(scope, receive, numbered)
            else:
                await self._app(scope, receive, numbered)
        except http.ClientGone:
            log.debug("a client hung up", extra={"request": name})
        except Exception as error:
            log.error("a request failed unexpectedly", exc_info=error, extra={"request": name})
            if status != 499:
                raise  # part of the answer is out: only closing the connection can tell
            await http.error_response(RequestError("an internal error; the log has more"))(scope, receive, numbered)
        finally:
            route = scope.get("route")
            self._api.metrics.answered(getattr(route, "path", "other"), status)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope.get("state", {}).get("peer_uid") is not None or not self._api.keys:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        if any([hmac.compare_digest(given, known) for known in self._api.keys]):  # noqa: C419 (every key, always)
            return None
        error = InvalidRequest("this listener needs `Authorization: Bearer KEY`", code="invalid_api_key")
        error.status, error.kind = 401, http.KINDS[401]
        response = http.error_response(error)
        response.headers["www-authenticate"] = "Bearer"
        return response
