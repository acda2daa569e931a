"""Sends answers: JSON bodies, server-sent events, errors in each API's form; notices when a client hangs up.

Clients and proxies give up on silence: httpx after 5 s, many proxies after 60 s, Node's fetch after 300 s. So the head
goes out in time, and something is sent whenever all else is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from edgemoe.api.generate.generation import (
    ChoiceDelta,
    PreparedAnswer,
    collect_deltas,
)
from edgemoe.api.generate.held_answer import FRAMES, FrameHead, end_of, frame
from edgemoe.api.http.event_text import anthropic_error, error_body, ollama_error
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.json_object import Json

QUIET_S = 4.0  # that a stream may be silent
WHOLE_QUIET_S = 30.0  # that any other answer may be: from then on no status can tell its failure
SEND_S = 60.0  # longest that a client may leave a part of its answer unread
STREAMED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
WAITING = "waiting"
NO_TOKENS = FrameHead()


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The content type of an answer, and the bytes that it sends while nothing else comes."""

    content_type: bytes
    waiting: Callable[[str], bytes]  # of the words that say why


SERVER_SENT_EVENTS = StreamForm(  # a comment, which clients skip
    b"text/event-stream; charset=utf-8", lambda words: f": {words}\n\n".encode()
)
WHOLE = StreamForm(b"application/json", lambda _: b"\n")  # white space before the JSON


class ClientGone(Exception):
    """Raised where the client hung up, or stopped reading."""


class ClientAnswer:
    """The answer to one request. After a while without a word it says `form.waiting`, and begins if it must."""

    def __init__(
        self, send: Send, form: StreamForm, progress: Callable[[], str] = lambda: "", *, in_frames: bool = False
    ) -> None:
        """Takes `progress`, which describes how the model's loading goes; "" where it is loaded.

        A stream `in_frames` names the tokens that its parts show.
        """
        self._in_frames = in_frames
        self.is_begun = False
        self._send, self._form, self._progress = send, form, progress
        self._quiet_s = WHOLE_QUIET_S if form is WHOLE else QUIET_S
        self._is_over = self._is_first = False
        self._sending = asyncio.Lock()
        self._sent_s = asyncio.get_running_loop().time()

    async def send(self, message: Message) -> None:
        """Sends a message of ASGI. The head is left out where it has been sent already. Raises ClientGone."""
        async with self._sending:
            await self._pass(message)

    async def begin(self) -> None:
        """Sends the head of a stream, if there is none yet."""
        await self.send(self._head())

    async def part(self, body: bytes, *, more: bool = True, head: FrameHead = NO_TOKENS) -> None:
        """Sends a part of the body, with that head where it is a frame. Raises ClientGone."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more, "frame": head})

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Tells the client that it has to wait, as often as needed while the block runs."""
        talking = asyncio.ensure_future(self._talk())
        try:
            yield
        finally:
            talking.cancel()
            await asyncio.wait([talking])

    async def _talk(self) -> None:
        clock = asyncio.get_running_loop().time
        with suppress(ClientGone):  # the next part notices it, too
            while not self._is_over:
                await asyncio.sleep(self._sent_s + self._quiet_s - clock())
                async with self._sending:
                    if not self._is_over and clock() - self._sent_s >= self._quiet_s:
                        await self._pass(self._head())
                        words = self._form.waiting(self._progress() or WAITING)
                        await self._pass({"type": "http.response.body", "body": words, "more_body": True})

    def _head(self) -> dict[str, Any]:
        content_type = FRAMES.encode() if self._in_frames else self._form.content_type
        headers = [(b"content-type", content_type), *STREAMED]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _framed(self, message: Message) -> dict[str, Any]:
        """Returns the message with its body as a frame, where these are sent."""
        plain = {name: value for name, value in message.items() if name != "frame"}
        if not self._in_frames:
            return plain
        head = message.get("frame", NO_TOKENS)
        content_type = self._form.content_type.decode() if self._is_first else ""
        end = head.end or ("complete" if self._is_over else "")
        self._is_first = False
        head = structs.replace(head, content_type=content_type, end=end)
        return plain | {"body": frame(head, message.get("body", b""))}

    async def _pass(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.is_begun:
                return
            self.is_begun, self._is_first = True, True
            self._in_frames = self._in_frames and (b"content-type", FRAMES.encode()) in message["headers"]
        elif message["type"] == "http.response.body":
            self._is_over = not message.get("more_body", False)
            message = self._framed(message)
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None
        self._sent_s = asyncio.get_running_loop().time()


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
