"""One request of a connection and its answer, as ASGI receive and send."""

from __future__ import annotations

import asyncio
import logging
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import h11
from starlette.types import ASGIApp, Message, Scope

if TYPE_CHECKING:
    from edgemoe.front.http_connection import HttpConnection

log = logging.getLogger(__name__)

CHUNKS_AT_ONCE, CHUNK_PAUSE_S = 32, 0.002  # of a body, read before others have their turn, and their turn
FREE_CHUNKS, CHUNK_BYTES = 1024, 32  # of a body, and the bytes that each further chunk has on average
BUFFER_BYTES = 64 << 10  # buffered of a body, of the bytes after it, and of an answer


class HttpExchange:
    """Reads the body of one request, and writes its answer."""

    def __init__(self, connection: HttpConnection, parser: h11.Connection, scope: Scope) -> None:
        self.scope, self.more_body, self.is_begun, self.is_answered = scope, True, False, False
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._connection, self._parser = connection, parser
        self._body, self._news = bytearray(), asyncio.Event()
        self._gone = self._rests = False
        self._chunks = self._chunked_bytes = 0

    @property
    def transport(self) -> asyncio.Transport:
        assert self._connection.transport is not None
        return self._connection.transport

    def feed(self, data: bytes) -> None:
        """Adds bytes of the body. Small chunks are read a few at a time, since h11 takes 20 us for each."""
        try:
            if data:
                self._parser.receive_data(data)
            for _ in range(CHUNKS_AT_ONCE):
                event = self._parser.next_event()
                if not isinstance(event, h11.Data):
                    self._rests = False
                    break
                self._body += event.data
                self._count_chunk(event)
            else:
                self._rest()
        except h11.RemoteProtocolError as error:
            return self._connection.fail(str(error))
        if isinstance(event, h11.EndOfMessage):
            self.more_body = False
            self._connection.keep_rest(self._parser.trailing_data[0])
            self.transport.resume_reading()  # else a client that hangs up meanwhile is not noticed
        elif self._rests or len(self._body) > BUFFER_BYTES:
            self.transport.pause_reading()
        self._news.set()
        return None

    def _count_chunk(self, data: h11.Data) -> None:
        """Raises RemoteProtocolError where a body is of very many small chunks."""
        self._chunks += data.chunk_end
        self._chunked_bytes += len(data.data)
        if self._chunks > FREE_CHUNKS + self._chunked_bytes // CHUNK_BYTES:
            raise h11.RemoteProtocolError("its body is of too many small chunks")

    def _rest(self) -> None:
        """Lets others have their turn before more of the body is read."""
        self._rests = True
        asyncio.get_running_loop().call_later(CHUNK_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._rests and not self._gone and not self.is_answered:
            self.feed(b"")

    def disconnect(self) -> None:
        """Tells the application that the client has gone."""
        self._gone = True
        self._news.set()
        self.may_write.set()

    def provoke(self) -> None:
        """Sends a byte that the system of a client that has hung up rejects."""
        if not self.is_begun and self.scope["http_version"] == "1.1":
            self.transport.write(self._parser.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")

    async def run(self, app: ASGIApp) -> None:
        """Runs the application for this request."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:
            log.error("a request failed unexpectedly", exc_info=error)
        if not self.is_answered and not self._gone:
            if not self.is_begun:
                await self.send({"type": "http.response.start", "status": 500, "headers": [(b"connection", b"close")]})
                await self.send({"type": "http.response.body"})
            else:
                self._connection.abort()

    async def receive(self) -> Message:
        if self._parser.they_are_waiting_for_100_continue and not self._gone and not self.is_begun:
            self.transport.write(self._parser.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        if not self._gone and not self.is_answered:
            if len(self._body) <= BUFFER_BYTES and self.more_body and not self._rests:
                self.transport.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._gone or self.is_answered:
            self._news.set()  # it stays so
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        await self.may_write.wait()
        if self._gone:
            return
        if not self.is_begun:
            self._begin(message)
        elif not self.is_answered:
            body, more = message.get("body", b""), message.get("more_body", False)
            self._write(h11.Data(data=b"" if self.scope["method"] == "HEAD" else body))
            if not more:
                self._write(h11.EndOfMessage())
                self.is_answered = True
                self._news.set()
                self._connection.answered(goes_on=self._parser.our_state is h11.DONE and not self.more_body)

    def _begin(self, message: Message) -> None:
        headers = [(b"date", formatdate(usegmt=True).encode()), *message.get("headers", [])]
        if self.more_body and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))  # the rest of the body will not be read
        status = message["status"]
        self.is_begun = True
        self._write(h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()))

    def _write(self, event: Any) -> None:
        self.transport.write(self._parser.send(event) or b"")
