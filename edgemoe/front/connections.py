"""The HTTP server on our sockets: who may connect, for how long a client may keep us waiting, and how many can.

uvicorn speaks HTTP; accepting is ours, as asyncio's own tries again at once, 1,024 times over with a traceback each,
where the process is out of files. A connection that waits for its client (for a request's head, for its body, or
between requests) gives way to a new one once there are as many as there may be: the one that has waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from edgemoe.cluster.control.coordination.store import wait_event
from edgemoe.ticking import until_tick

log = logging.getLogger(__name__)

UCRED = struct.Struct("3i")  # pid, uid, gid
HEAD_S = 15.0  # that a client may take from connecting, or from a first byte, to the end of a request's head
IDLE_S = 75  # between requests; longer than clients keep theirs, so that they are the ones who close
UNREAD_S = 60.0  # without a byte being read of an answer that is out
LATE_S = 1.0  # that who had connected before the end has to ask, and be told
GRACE_S = 1.0  # that a connection has before it may give way to another
PAUSE_S = 0.5  # without accepting, where there is no room and none could be made
QUIET_S = 60.0  # between two lines in the log about the same trouble
TICK_S = 1.0  # between looks of uvicorn's at the date
BAD_REQUEST = "this is not HTTP/1.1 as it may be sent here (https is not: no TLS is spoken)"
TOO_SLOW = f"the head of the request did not arrive within {HEAD_S:.0f} s"


class Protocol(H11Protocol):
    """HTTP/1.1 that tells the application who has connected: `peer_uid` on a Unix socket, None by TCP."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        uid = None
        if peer.family == socket.AF_UNIX:
            _, uid, _ = UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        self.app_state = {**self.app_state, "peer_uid": uid}
        self.waiting_since = time.monotonic()
        self._unread: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self._give_up)

    @property
    def waits(self) -> bool:
        """Returns whether it is the client's turn."""
        return self._between_requests or bool(self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        between = self._between_requests
        super().data_received(data)
        if between and not self._between_requests:  # a head is complete: how long it was idle before counts no more
            self.waiting_since = time.monotonic()
        self._time_head()

    def on_response_complete(self) -> None:
        self.waiting_since = time.monotonic()
        super().on_response_complete()
        self._time_head()
        self._see_it_read()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._see_it_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:  # something has been read
            self._unread.cancel()
            self._unread = None
            self._see_it_read()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answers 400; called by uvicorn where the bytes are no request."""
        self._refuse(400, BAD_REQUEST)

    def give_way(self) -> None:
        """Closes the connection, as another needs its place."""
        self.transport.abort()

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _time_head(self) -> None:
        """Starts the clock with the first byte of a request's head, and stops it with the last one."""
        if not self._between_requests:
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None and self.conn.trailing_data[0]:
            self._head = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        self._head = None
        if self.conn.trailing_data[0]:
            self._refuse(408, TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers in the application's stead, as far as no answer has begun, and closes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": f"http_{status}"}
            body = json.dumps({"error": error}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._see_it_read()

    def _see_it_read(self) -> None:
        """Starts to watch what is left of an answer."""
        if self._unread is None and (left := self.transport.get_write_buffer_size()):
            self._unread = self.loop.call_later(UNREAD_S, self._look_again, left)

    def _look_again(self, left_bytes: int) -> None:
        """Drops the connection where nothing has been read since."""
        self._unread = None
        if self.transport.get_write_buffer_size() == left_bytes:
            self.transport.abort()
        else:
            self._see_it_read()


class Server(uvicorn.Server):
    """uvicorn's HTTP on sockets of ours, with signals left to us."""

    def __init__(self, app: ASGIApp, sockets: Sequence[socket.socket], max_connections: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=2,
            )
        )
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = min(max_connections, files // 2)
        self.servers = []  # uvicorn's, of which there are none
        self._ends = asyncio.Event()
        self._sockets = list(sockets)
        self._accepting: list[asyncio.Task[None]] = []
        self._warned: dict[str, float] = {}

    async def run_until_stopped(self) -> None:
        """Serves until `stop`, then closes the sockets and what is idle."""
        async with asyncio.TaskGroup() as tasks:
            self._accepting = [tasks.create_task(self._accept(one), name="accept") for one in self._sockets]
            await self.serve(self._sockets)

    def stop(self) -> None:
        """Has `run_until_stopped` end."""
        self.should_exit = True
        self._ends.set()

    async def main_loop(self) -> None:
        """Called by uvicorn, whose own looks at the date ten times a second."""
        while not await self.on_tick(0):
            await wait_event(self._ends, until_tick(TICK_S))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn; what there is to start has been."""
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn before it closes the sockets. Who has connected by now is answered, if only refused."""
        ends = time.monotonic() + LATE_S
        while time.monotonic() < ends and self._is_waited_for():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield

    def _is_waited_for(self) -> bool:
        """Whether somebody waits to be accepted, or has not asked anything yet."""
        knocking = select.poll()
        for one in self._sockets:
            knocking.register(one, select.POLLIN)
        connections = self.server_state.connections
        return bool(knocking.poll(0)) or any(isinstance(one, Protocol) and one.cycle is None for one in connections)

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts for as long as it runs, whatever becomes of one connection."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of files or memory
                self._warn(f"no connection can be accepted: {error.strerror}")
                await self._make_room()
                continue
            try:
                await self._admit(connection)
            except BaseException:
                connection.close()
                raise

    async def _admit(self, connection: socket.socket) -> None:
        """Serves a connection once there is room for it."""
        while len(self.server_state.connections) >= self.max_connections:
            self._warn("there are as many connections as there may be (api.max_connections)")
            await self._make_room()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it has gone already
            await loop.connect_accepted_socket(lambda: Protocol(self.config, self.server_state, {}), connection)

    async def _make_room(self) -> None:
        """Closes the connection whose client has kept us waiting longest; waits a moment where there is none."""
        latest = time.monotonic() - GRACE_S
        waiting: list[Protocol] = [
            one for one in self.server_state.connections if isinstance(one, Protocol) and one.waits
        ]
        oldest = min(waiting, key=lambda one: one.waiting_since, default=None)
        if oldest is not None and oldest.waiting_since < latest:
            oldest.give_way()
            await asyncio.sleep(0)  # its file is closed in the loop's next round
        else:
            await asyncio.sleep(PAUSE_S)

    def _warn(self, message: str) -> None:
        now = time.monotonic()
        if now - self._warned.get(message, -QUIET_S) >= QUIET_S:
            self._warned[message] = now
            log.warning(message, extra={"connections": len(self.server_state.connections)})
