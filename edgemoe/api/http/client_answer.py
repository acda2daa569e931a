"""Keeps the client of one answer: its head goes out in time, and something is sent whenever all else is silent.

Clients and proxies give up on silence: httpx after 5 s, many proxies after 60 s, Node's fetch after 300 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from msgspec import structs
from starlette.types import Message, Send

from edgemoe.api.generate.held_answer import FRAMES, FrameHead, frame

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
