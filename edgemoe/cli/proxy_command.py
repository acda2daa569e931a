"""Runs `edgemoe proxy`: one address for the fronts of several boxes, which stays while they come and go.

It asks for streams in frames (`edgemoe.api.generate.held_answer`). If a front is gone or stands still, it hands the
part that its client holds to another one, which goes on behind it. Keys are passed on, and checked by the fronts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgemoe.api.generate.held_answer import ASKS_FRAMES, FRAMES, HELD_BYTES, AnswerName, FrameHead, HeldAnswer, Shown
from edgemoe.api.http.event_text import DONE, anthropic_error, error_body, event, json_line, ollama_error
from edgemoe.api.http.responding import error_response
from edgemoe.cli.dashboard import proxy_server
from edgemoe.errors import EngineUnavailable, QueueFull, RequestError, ServiceError
from edgemoe.front.listen import tcp_socket, unix_socket

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/", "/infill")
OURS = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect"}
MOST_BODY_BYTES = 64 << 20
MOST_HELD_BYTES = 32 << 20  # of a stream's heads; a longer stream cannot go on elsewhere
MOST_HEAD_BYTES = 32 << 20
MOST_WHOLE_BYTES = 256 << 20  # of an answer that is no stream
CONNECT_S, SILENCE_S = 2.0, 900.0
LOOK_S = 2.0  # of silence, after which a front is asked whether it lives, and within which it must answer
PATIENCE_S = 30.0  # without a byte of an answer, while no front takes the request
AGAIN_S = 0.5  # between rounds through all fronts
MEND_S = 5.0  # between questions to a front that failed; until it is ready it comes last
T = TypeVar("T")
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Returns 0. Raises ServiceError."""
    fronts = [FrontAddress.of(word) for word in args.front]
    if not args.socket and any(front.path for front in fronts):
        raise ServiceError("a front's Unix socket asks for no key, so only --socket may lead to it; name it by TCP")
    listener = unix_socket(Path(args.socket)) if args.socket else tcp_socket(args.listen, "--listen")
    print(f"edgemoe proxy: {args.socket or args.listen} leads to {', '.join(args.front)}", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(FrontProxy(fronts, args.requests), listener))
    return 0


async def serve(proxy: FrontProxy, listener: socket.socket) -> None:
    """Serves until a signal ends it."""
    try:
        await proxy_server(proxy).serve(sockets=[listener])
    finally:
        await proxy.close()


@dataclass(slots=True, eq=False)
class FrontAddress:
    """The address of a front, and its connections."""

    name: str
    url: str
    path: str = ""  # of its Unix socket
    failed_s: float = float("-inf")  # when it last was gone or stood still
    http: httpx.AsyncClient = field(init=False)

    @classmethod
    def of(cls, word: str) -> FrontAddress:
        """Reads `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`. Raises ServiceError."""
        if word.startswith("unix:"):
            return cls(word, "http://edgemoe", word.removeprefix("unix:"))
        try:
            url = httpx.URL(word)
        except httpx.InvalidURL as error:
            raise ServiceError(f"{word!r} is no address: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or url.path not in ("", "/"):
            raise ServiceError(f"{word!r} is no front's address: give http://HOST:PORT or unix:PATH")
        return cls(word, word.rstrip("/"))

    def open(self) -> None:
        """Makes the client; must be called on the event loop."""
        transport = httpx.AsyncHTTPTransport(uds=self.path or None, limits=LIMITS)
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        self.http = httpx.AsyncClient(transport=transport, base_url=self.url, timeout=timeout)

    async def lives(self, *, ready: bool = False) -> bool:
        """Returns whether it answers at all, or is `ready` for requests."""
        try:
            async with asyncio.timeout(LOOK_S):
                answer = await self.http.get("/health")
        except (TimeoutError, httpx.HTTPError):
            return False
        return answer.is_success or not ready


class FrontLost(Exception):
    """A front is gone, stands still, or takes no requests at the moment."""


@dataclass(slots=True)
class ClientRequest:
    """A request of a client: its parts for a front, and the part of its answer that the client holds."""

    method: str
    target: httpx.URL
    headers: list[tuple[bytes, bytes]]
    body: bytes
    generates: bool
    answer: AnswerName | None = None
    shown: list[Shown] = field(default_factory=list)
    held_bytes: int = 0  # of `shown`, as they came
    is_begun: bool = False  # the client has some of the answer
    content_type: str = ""
    moved_s: float = field(default_factory=time.monotonic)  # when a byte of the answer came last

    @property
    def can_move(self) -> bool:
        """Whether another front can go on with the answer."""
        return not self.is_begun or (self.answer is not None and self.held_bytes <= MOST_HELD_BYTES)

    def parts(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Returns the headers and the body for the next front."""
        headers, body = list(self.headers), self.body
        if self.generates:
            headers.append((ASKS_FRAMES.encode(), b"1"))
        if self.is_begun and self.answer is not None:
            held = msgspec.json.encode(HeldAnswer(answer=self.answer, frames=tuple(self.shown)))
            headers.append((HELD_BYTES.encode(), b"%d" % len(held)))
            body = held + body
        return headers, body

    def note(self, head: FrameHead, size: int) -> None:
        """Notes a frame whose bytes go to the client now, with a head of `size` bytes."""
        if not self.is_begun:  # nothing of an earlier attempt has been shown
            self.answer = head.answer or self.answer
        if head.shown:
            self.shown.append(head.shown)
            self.held_bytes += size
            self.is_begun = True


class FrontProxy:
    """The application between clients and fronts."""

    def __init__(self, fronts: Sequence[FrontAddress], most_requests: int) -> None:
        self._fronts, self._most, self._live = list(fronts), most_requests, 0
        self._is_open = False
        self._mending: dict[FrontAddress, asyncio.Task[None]] = {}
        self.moved = 0  # attempts that were left while their client had a part of the answer

    async def close(self) -> None:
        """Closes the connections to the fronts."""
        for task in self._mending.values():
            task.cancel()
        await asyncio.gather(*self._mending.values(), return_exceptions=True)
        for front in self._fronts if self._is_open else ():
            await front.http.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if not self._is_open:
            self._is_open = True
            for front in self._fronts:
                front.open()
        if self._live >= self._most:
            full = QueueFull(f"{self._most} requests are under way (--requests)", retry_after_s=1.0)
            await error_response(full, scope)(scope, receive, send)
            return
        self._live += 1
        try:
            await self._answer(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._live -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                await Response(f"a body has at most {MOST_BODY_BYTES} bytes", 413)(scope, receive, send)
                return
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        generates = request.method == "POST" and request.url.path.startswith(GENERATING)
        asked = ClientRequest(request.method, target, list(passed_on(request)), bytes(body), generates)
        working = asyncio.ensure_future(self._try_fronts(asked, send))
        watching = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (error := working.result()) is not None:
                await _fail(asked, request.url.path, error, scope, receive, send)
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _try_fronts(self, asked: ClientRequest, send: Send) -> RequestError | None:
        """Answers by one front after the other. Returns an error where none can."""
        while True:
            for front in sorted(self._fronts, key=lambda front: front.failed_s):
                try:
                    await self._ask(front, asked, send)
                    return None
                except RequestError as error:
                    return error
                except FrontLost as lost:
                    why = f"{front.name}: {lost}"
                self._avoid(front, why)
                self.moved += asked.is_begun
                if not asked.can_move:
                    return EngineUnavailable(f"{why}; this answer cannot go on elsewhere")
            if time.monotonic() - asked.moved_s > PATIENCE_S:
                return EngineUnavailable(f"no front takes the request; the last one, {why}")
            await asyncio.sleep(AGAIN_S)

    def _avoid(self, front: FrontAddress, why: str) -> None:
        """Puts a front behind the others until it is ready again."""
        print(f"edgemoe proxy: {why}", file=sys.stderr, flush=True)
        front.failed_s = time.monotonic()

        async def mend() -> None:
            is_ready = False
            while not is_ready:
                await asyncio.sleep(MEND_S)
                is_ready = await front.lives(ready=True)
            front.failed_s = float("-inf")
            del self._mending[front]

        if front not in self._mending:
            self._mending[front] = asyncio.ensure_future(mend())

    async def _ask(self, front: FrontAddress, asked: ClientRequest, send: Send) -> None:
        """Passes a front's answer on. Raises FrontLost."""
        headers, body = asked.parts()
        question = front.http.build_request(asked.method, asked.target, headers=headers, content=body)
        try:
            answer = await _while_living(front, front.http.send(question, stream=True))
        except httpx.ConnectError as error:
            raise FrontLost(str(error) or "no connection") from error
        except httpx.HTTPError as error:
            if asked.generates or asked.method == "GET":
                raise FrontLost(str(error) or type(error).__name__) from error
            raise EngineUnavailable(f"{front.name} broke off, and may have carried the request out") from error
        try:
            await self._pass_on(front, asked, answer, send)
        except httpx.HTTPError as error:
            raise FrontLost(str(error) or type(error).__name__) from error
        finally:
            await answer.aclose()

    async def _pass_on(self, front: FrontAddress, asked: ClientRequest, answer: httpx.Response, send: Send) -> None:
        kind = answer.headers.get("content-type", "")
        if answer.status_code in (502, 503) and asked.generates:
            raise FrontLost(f"it answers {answer.status_code}")
        if kind == FRAMES:
            await self._pass_frames(front, asked, answer, send)
        elif asked.is_begun or asked.content_type:
            why = (await _whole(front, answer))[:300].decode(errors="replace")
            raise FrontLost(f"it does not go on with the answer: {answer.status_code} {why}")
        elif kind.startswith(("text/event-stream", "application/x-ndjson")):
            await _start(send, answer)
            asked.is_begun = True
            async for some in answer.aiter_raw():
                await _send(send, some)
            await _send(send, b"", more=False)
        else:
            whole = await _whole(front, answer)
            await _start(send, answer)
            await _send(send, whole, more=False)

    async def _pass_frames(self, front: FrontAddress, asked: ClientRequest, answer: httpx.Response, send: Send) -> None:
        """Passes on the bytes of whole frames. Raises FrontLost at an end that is not the answer's."""
        frames = FrameReader(answer.aiter_raw())
        while True:
            head, body, size = await _while_living(front, frames.read())
            if head.end == "unavailable":
                raise FrontLost("it ends")
            if not asked.content_type and head.content_type:
                asked.content_type = head.content_type
                await _start(send, answer, head.content_type)
            asked.note(head, size)
            asked.moved_s = time.monotonic()
            await _send(send, body, more=not head.end)
            if head.end:
                return


class FrameReader:
    """Reads frames from the bytes of a stream."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source, self._buffer = source, bytearray()

    async def read(self) -> tuple[FrameHead, bytes, int]:
        """Returns a whole frame, and the size of its head. Raises FrontLost where the stream ends or is none."""
        while (end := self._buffer.find(b"\n")) < 0:
            await self._more(MOST_HEAD_BYTES)
        try:
            head = msgspec.json.decode(self._buffer[:end], type=FrameHead)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrontLost(f"its stream is damaged: {error}") from error
        whole = end + 1 + head.bytes
        while len(self._buffer) < whole:
            await self._more(whole)
        body = bytes(self._buffer[end + 1 : whole])
        del self._buffer[:whole]
        return head, body, end + 1

    async def _more(self, most_bytes: int) -> None:
        if len(self._buffer) > most_bytes:
            raise FrontLost("its stream is damaged: a head without an end")
        try:
            self._buffer += await anext(self._source)
        except StopAsyncIteration:
            raise FrontLost("its stream broke off") from None


def passed_on(request: Request) -> Iterator[tuple[bytes, bytes]]:
    """Yields the client's headers that fronts get, with a name for the request where it has none."""
    names = set()
    for name, value in request.headers.raw:
        names.add(name.lower())
        if name.lower() not in OURS and not name.lower().startswith(b"x-edgemoe-"):
            yield name, value
    if b"x-request-id" not in names:
        yield b"x-request-id", f"req_{secrets.token_hex(12)}".encode()


async def _while_living(front: FrontAddress, work: Awaitable[T]) -> T:
    """Waits for some work of a front. Raises FrontLost where the front stands still meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
            if not await front.lives() and not task.done():
                raise FrontLost("it stands still")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _whole(front: FrontAddress, answer: httpx.Response) -> bytes:
    """Returns the body of an answer, which the client gets at once. Raises FrontLost."""

    async def read() -> bytes:
        whole = bytearray()
        async for some in answer.aiter_raw():
            whole += some
            if len(whole) > MOST_WHOLE_BYTES:
                raise FrontLost(f"its answer has more than {MOST_WHOLE_BYTES} bytes")
        return bytes(whole)

    return await _while_living(front, read())


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, answer: httpx.Response, content_type: str = "") -> None:
    headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in OURS]
    if content_type:
        headers = [(name, value) for name, value in headers if name != b"content-type"]
        headers.append((b"content-type", content_type.encode()))
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _fail(
    asked: ClientRequest, path: str, error: RequestError, scope: Scope, receive: Receive, send: Send
) -> None:
    """Tells the client that no front goes on, in the form of the API at the path."""
    if asked.content_type.startswith("text/event-stream"):
        told = event(anthropic_error(error), "error") if path == "/v1/messages" else event(error_body(error)) + DONE
        await _send(send, told, more=False)
    elif asked.content_type:
        await _send(send, json_line(ollama_error(error)), more=False)
    elif asked.is_begun:
        raise ServiceError(str(error))  # closes the connection: only that can show the failure
    else:
        await error_response(error, scope)(scope, receive, send)
