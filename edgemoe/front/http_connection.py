"""Serves one client's connection: HTTP/1.1 by h11, one request after the other.

Every wait for the client has a deadline. Heads are checked before h11 reads them, since h11 accepts bare line feeds and
folded lines, which a proxy before us may read otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

import h11
from starlette.types import ASGIApp, Scope

from edgemoe.front.http_exchange import BUFFER_BYTES, HttpExchange
from edgemoe.types.request import site_of, uid_principal

MAPPED = "::ffff:"  # begins an IPv4 address at a socket for both
UCRED = struct.Struct("3i")  # pid, uid, gid
HEAD_S = 15.0  # that a client may take from connecting, or from a first byte, to the end of a request's head
IDLE_S = 75.0  # between requests; longer than clients keep theirs, so that they are the ones who close
UNREAD_S = 60.0  # without a byte read of a sent answer
LINGER_S = 2.0  # that a client has to read its last answer while it still sends
PROBE_S = 0.25  # between checks whether a client that sends no more still reads
HEAD_BYTES = 32 << 10
MOST_HEADERS = 128
EMPTY_BYTES = 64  # of empty lines before a head
UNSENT_BYTES = 16 << 10  # of an answer that the kernel buffers beyond the client's window
TCP_NOTSENT_LOWAT = 25
ODD_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\r\n[ \t]")  # a bare line feed or carriage return, a folded line
EMPTY_LINES = re.compile(rb"(?:\r\n){1,%d}" % (EMPTY_BYTES // 2))
SCHEME = re.compile(rb"https?://", re.IGNORECASE)
BAD_REQUEST = "this is not HTTP/1.1 as it may be sent here (https is not: no TLS is spoken)"


@dataclass(slots=True)
class ConnectionHub:
    """Settings and callbacks that the connections of one server share."""

    note: Callable[..., None]  # a line in the log that a client causes: (level, line, address, fields)
    connections: set[HttpConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    requests: int = 0
    ends: bool = False
    # TCP connections by site, the oldest first: all without a key, and some that have shown one since.
    by_site: dict[str, dict[HttpConnection, None]] = field(default_factory=dict)

    def add(self, connection: HttpConnection) -> None:
        self.connections.add(connection)
        if connection.uid is None:
            self.by_site.setdefault(connection.site, {})[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Forgets a connection that is gone, or is already forgotten."""
        self.connections.discard(connection)
        self._forget_unknown(connection)

    def unknown_of(self, site: str) -> list[HttpConnection]:
        """Returns the site's connections without a key, the oldest first."""
        for known in [one for one in self.by_site.get(site, ()) if one.owner]:
            self._forget_unknown(known)
        return list(self.by_site.get(site, ()))

    def most_unknown(self) -> list[HttpConnection]:
        """Returns the connections without a key of the site that has most; empty where there are none."""
        while self.by_site:
            site = max(self.by_site, key=lambda one: len(self.by_site[one]))
            before = len(self.by_site[site])
            if len(unknown := self.unknown_of(site)) == before:
                return unknown
        return []

    def _forget_unknown(self, connection: HttpConnection) -> None:
        unknown = self.by_site.get(connection.site)
        if unknown is not None:
            unknown.pop(connection, None)
            if not unknown:
                del self.by_site[connection.site]


class HttpConnection(asyncio.Protocol):
    """Reads requests and passes them to the application. `state` has the client's "peer_uid", or None."""

    def __init__(self, hub: ConnectionHub, peer: socket.socket, app: ASGIApp) -> None:
        self._hub, self._app, self._loop = hub, app, asyncio.get_running_loop()
        self.uid, self.address = None, ""
        if peer.family == socket.AF_UNIX:
            _, self.uid, _ = UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        else:
            with contextlib.suppress(OSError):  # it has gone already
                self.address = peer.getpeername()[0].removeprefix(MAPPED)
            peer.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.site = site_of(self.address)
        self.transport: asyncio.Transport | None = None
        self.exchange: HttpExchange | None = None
        self.opened_at = self.waiting_since = time.monotonic()
        self._socket = peer
        self._owner = ""  # by the last request that had a key
        self.has_not_asked = True
        self._data = bytearray()  # of a head, or bytes behind a request
        self._half_closed = self._gone = self._lingers = False
        self._timer: asyncio.TimerHandle | None = None  # of a head, or of none
        self._unread: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        hub.add(self)

    # --- who it is --------------------------------------------------------------------------------------------

    @property
    def owner(self) -> str:
        """Returns the client's principal; "" without a key or a user of this machine."""
        state = self.exchange.scope["state"] if self.exchange is not None else {}
        if state.get("known"):
            self._owner = state["principal"]
        return uid_principal(self.uid) if self.uid is not None else self._owner

    @property
    def waits(self) -> bool:
        """Returns whether the connection waits for the client, to send or to read the end of an answer."""
        return self.exchange is None or self.exchange.more_body or self.exchange.is_answered

    def give_way(self) -> None:
        """Closes the connection to make room for another."""
        self._gone = True
        self._hub.remove(self)
        if self.transport is not None:
            self.transport.abort()

    def stop(self) -> None:
        """Closes the connection once it is idle and its last answer has been read."""
        if self.exchange is None:
            self._close()

    # --- the transport's side ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._gone:
            transport.abort()
            return
        transport.set_write_buffer_limits(BUFFER_BYTES, 0)
        self._time(HEAD_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        if self._lingers:
            return
        if self.exchange is not None and self.exchange.more_body:
            self.exchange.feed(data)
            return
        self._data += data
        if self.exchange is None:
            self._advance()
        elif len(self._data) > BUFFER_BYTES:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Goes on answering a client that closed its sending side; drops one that has hung up."""
        self._half_closed = True
        exchange = self.exchange
        if exchange is None or exchange.more_body or self._lingers or self._has_hung_up():
            return False
        if self.uid is None:
            exchange.provoke()
        self._look_for_it()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._hub.remove(self)
        for timer in (self._timer, self._unread, self._probe):
            if timer is not None:
                timer.cancel()
        if self.exchange is not None:
            self.exchange.disconnect()

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.may_write.clear()
        self._see_it_read()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self.exchange is not None:
            self.exchange.may_write.set()
            if self.exchange.is_answered:
                self._next()

    # --- requests ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begins the next request once its head is complete."""
        if (empty := EMPTY_LINES.match(self._data)) is not None:
            del self._data[: empty.end()]
        end = self._data.find(b"\r\n\r\n", 0, HEAD_BYTES)
        if ODD_LINE.search(self._data, 0, HEAD_BYTES if end < 0 else end):
            return self._refuse(400, "a head has lines that end in CR LF, and none that is folded")
        if end < 0 and len(self._data) >= HEAD_BYTES:
            return self._refuse(400, f"the head of a request is longer than {HEAD_BYTES} bytes")
        if end < 0:
            if self._half_closed:
                self._close()
            elif self._data and not self._times_head:
                self._time(HEAD_S, self._give_up)
            return None
        head, self._data = bytes(self._data[: end + 4]), self._data[end + 4 :]
        if head.count(b"\r\n") - 2 > MOST_HEADERS:
            return self._refuse(400, f"a request has at most {MOST_HEADERS} headers")
        parser = h11.Connection(h11.SERVER, HEAD_BYTES)
        try:
            parser.receive_data(head)
            event = parser.next_event()
            assert isinstance(event, h11.Request), event
            scope = self._scope(event)
        except (h11.RemoteProtocolError, ValueError) as error:
            return self._refuse(400, BAD_REQUEST, str(error))
        self._time(0.0, None)
        self.waiting_since = time.monotonic()
        self._hub.requests += 1
        self.has_not_asked = False
        self.exchange = exchange = HttpExchange(self, parser, scope)
        rest, self._data = bytes(self._data), bytearray()
        exchange.feed(rest)
        if not self._gone and not self._lingers:
            task = self._loop.create_task(exchange.run(self._app))
            self._hub.tasks.add(task)
            task.add_done_callback(self._hub.tasks.discard)
        return None

    def _scope(self, request: h11.Request) -> Scope:
        """Returns the ASGI scope. Raises ValueError for an invalid target."""
        assert self.transport is not None
        target, headers = request.target, [(name.lower(), value) for name, value in request.headers]
        if SCHEME.match(target):  # the absolute form, whose host counts
            parts = urlsplit(target)
            if not parts.netloc or b"@" in parts.netloc:
                raise ValueError("a target without a host")
            headers = [(name, value) for name, value in headers if name != b"host"] + [(b"host", parts.netloc)]
            target = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
        path, _, query = target.partition(b"?")
        if not path.startswith(b"/") and path != b"*":
            raise ValueError("a target that is neither a path nor a URL")
        server = self.transport.get_extra_info("sockname")
        client = self.transport.get_extra_info("peername")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("ascii"),
            "server": tuple(server[:2]) if isinstance(server, tuple) else (server, None),
            "client": (client[0].removeprefix(MAPPED), client[1]) if isinstance(client, tuple) else None,
            "scheme": "http",
            "method": request.method.decode("ascii"),
            "root_path": "",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": headers,
            "state": {"peer_uid": self.uid},
        }

    def keep_rest(self, data: bytes) -> None:
        """Keeps bytes that came behind a request's body."""
        self._data += data

    def answered(self, *, goes_on: bool) -> None:
        """Goes on to the next request, or closes, once the client has this answer."""
        assert self.transport is not None
        self.waiting_since = time.monotonic()
        if not goes_on or self._hub.ends:
            return self._end()
        self._see_it_read()
        if self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(0, 0)  # tells when the last byte is out
        else:
            self._next()
        return None

    def _next(self) -> None:
        """Begins the next request after the client has read the last answer."""
        assert self.transport is not None
        _ = self.owner  # of the request that ends
        self.exchange = None
        self.waiting_since = time.monotonic()
        if self._gone or self.transport.is_closing():
            return None
        if self._hub.ends:
            return self._close()
        self.transport.set_write_buffer_limits(BUFFER_BYTES, 0)
        self.transport.resume_reading()
        self._time(IDLE_S, self._give_up)
        self._times_head = False
        return self._advance()

    # --- ends -------------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Answers an invalid body, unless an answer has begun, and closes."""
        if self.exchange is not None and self.exchange.is_begun:
            self._end()
        else:
            self._refuse(400, BAD_REQUEST, why)

    def abort(self) -> None:
        """Closes without an answer, after the application failed within one."""
        if self.transport is not None:
            self.transport.abort()

    def _refuse(self, status: int, message: str, why: str = "") -> None:
        """Answers instead of the application and closes."""
        assert self.transport is not None
        self._hub.note(logging.INFO, "a request is refused", self.address, status=status, why=why or message)
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": f"http_{status}"}
        body = json.dumps({"error": error}).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        if self.exchange is not None:
            self.exchange.disconnect()
        self._end()

    def _end(self) -> None:
        """Closes once the answer is out. Reads on for a moment, else a client that still sends loses its answer."""
        assert self.transport is not None
        self._lingers = True
        self._data.clear()
        self._time(0.0, None)
        self._see_it_read()
        self.transport.resume_reading()
        if self._half_closed or self.transport.is_closing():
            return self.transport.close()
        with contextlib.suppress(OSError):
            self.transport.write_eof()
        self._time(LINGER_S, self._close)
        return None

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self._see_it_read()

    # --- time -------------------------------------------------------------------------------------------------

    _times_head = True  # whether the timer is of a head

    def _time(self, seconds: float, then: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if then is None else self._loop.call_later(seconds, then)
        self._times_head = then is not None

    def _give_up(self) -> None:
        self._timer = None
        if self._data:
            self._refuse(408, f"the head of the request did not arrive within {HEAD_S:.0f} s")
        else:
            self._close()

    def _see_it_read(self) -> None:
        """Starts to watch whether the client reads the rest of an answer."""
        if self.transport is not None and self._unread is None and (left := self.transport.get_write_buffer_size()):
            self._unread = self._loop.call_later(UNREAD_S, self._look_again, left)

    def _look_again(self, left_bytes: int) -> None:
        """Drops the connection if the client has read nothing since."""
        self._unread = None
        if self.transport is None or self.transport.get_write_buffer_size() == left_bytes:
            self.abort()
        else:
            self._see_it_read()

    def _look_for_it(self) -> None:
        """Drops a client that closed its sending side and does not read any more."""
        if self._has_hung_up():
            self.abort()
        else:
            self._probe = self._loop.call_later(PROBE_S, self._look_for_it)

    def _has_hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._socket.fileno(), 0)
        return bool(poll.poll(0))
