"""Sends answers: JSON bodies, server-sent events, errors in each API's form; notices when a client hangs up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgemoe.api.generate.generation import (
    ChoiceDelta,
    PreparedAnswer,
    collect_deltas,
)
from edgemoe.api.generate.held_answer import FrameHead, end_of
from edgemoe.api.http.client_answer import SERVER_SENT_EVENTS, ClientAnswer, ClientGone
from edgemoe.api.http.event_text import anthropic_error, error_body, ollama_error
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.json_object import Json

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0  # sent with every 503
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels the `with` block and raises ClientGone when the client hangs up.

    The request's body must have been read.
    """

    async def watch(scope: asyncio.Timeout) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.reschedule(0)

    try:
        async with asyncio.timeout(None) as scope:
            watcher = asyncio.ensure_future(watch(scope))
            try:
                yield
            finally:
                watcher.cancel()
                await asyncio.wait([watcher])
    except TimeoutError:
        raise ClientGone from None


async def reply(kept: ClientAnswer, prepared: PreparedAnswer, deltas: AsyncGenerator[list[ChoiceDelta], None]) -> None:
    """Sends the answer. Raises RequestError only while nothing has been sent, or where the answer is no stream."""
    generation, answer_format = prepared.generation, prepared.answer_format
    if not prepared.is_stream:
        body = msgspec.json.encode(answer_format.whole(await collect_deltas(generation, deltas)))
        await send_whole(kept.send, 200, body)
        return
    name = generation.answer
    try:
        async with aclosing(deltas):
            async for some in deltas:
                await kept.begin()
                body = b"".join(answer_format.events(some))
                await kept.part(body, head=FrameHead(shown=generation.shown(some), answer=name))
                name = None
    except RequestError as error:
        if not kept.is_begun:
            raise
        words = b"".join(answer_format.error_events(error))
        await kept.part(words, more=False, head=FrameHead(end=end_of(error)))
        return
    await kept.begin()
    await kept.part(b"".join(answer_format.closing_events()), more=False)


async def send_whole(send: Send, status: int, body: bytes) -> None:
    """Sends a body of JSON with its length."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def stream(send: Send, events: AsyncIterator[bytes]) -> None:
    """Sends server-sent events for as long as there are any."""
    answer = ClientAnswer(send, SERVER_SENT_EVENTS)
    await answer.begin()
    async for some in events:
        await answer.part(some)
    await answer.part(b"", more=False)


def error_response(error: RequestError, scope: Scope) -> Response:
    """Returns the answer to a request that failed before anything was sent, in the form of the client's API."""
    headers = {}
    if (wait_s := getattr(error, "retry_after_s", RETRY_AFTER_S if error.status == 503 else None)) is not None:
        headers["retry-after"] = str(max(1, round(wait_s)))
    if not error.again:
        headers["x-should-retry"] = "false"  # which OpenAI's and Anthropic's clients follow
    return JSONResponse(error_object(error, scope), error.status, headers)


ERROR_BODIES = {  # by the path's beginning; else Anthropic's to its clients, OpenAI's to others
    "/v1/messages": anthropic_error,
    "/v1/chat/": error_body,
    "/v1/completions": error_body,
    "/v1/responses": error_body,
    "/api/v": error_body,  # LM Studio's
    "/api/": ollama_error,
}


def error_object(error: RequestError, scope: Scope) -> Json:
    """Returns the error in the form of the API at the request's path."""
    for prefix, body in ERROR_BODIES.items():
        if scope["path"].startswith(prefix):
            return body(error)
    return anthropic_error(error) if is_anthropic(scope) else error_body(error)


def is_anthropic(scope: Scope) -> bool:
    """Returns whether a request names the version of Anthropic's API, as all of its clients do."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def http_error(request: Request, error: Exception) -> Response:
    """Returns Starlette's own errors (404, 405, 413, ...) as error objects of the API at the path."""
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if error.status_code == 404:
        detail = f"there is no {request.url.path} here; see /v1/models and the documentation"
    elif error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    elif error.status_code == 405:
        detail = f"{request.method} is not allowed for {request.url.path}"
    refusal = InvalidRequest(detail, code=f"http_{error.status_code}")
    refusal.status, refusal.kind = error.status_code, KINDS.get(error.status_code, refusal.kind)
    headers = dict(error.headers or {})
    if error.status_code in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not going to be read
    return JSONResponse(error_object(refusal, request.scope), error.status_code, headers)
