"""Accepts connections on the front's sockets, and chooses the connection that gives way when there is no room.

asyncio's own accept loop retries 1,024 times with a traceback each when the process is out of files. A client without a
key is counted by address and gives way first. Next is the slowest client of the key or user with most connections.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp

from edgemoe.front.http_connection import ConnectionHub, HttpConnection
from edgemoe.telemetry.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)

MOST_UNKNOWN = 64  # connections without a key of one address; one more takes the oldest one's place
AT_ONCE, ROUNDS = 16, 4  # accepted before others run, and rounds of the loop until their bytes are read
LATE_S = 1.0  # for requests of clients that connected before the end
END_S = 2.0  # for answers to go out at the end
LAST_S = 0.5  # for the words to go out that an answer was cut off
GRACE_S = 1.0  # before a connection with a key may give way
PAUSE_S = 0.5  # without accepting, if there is no room and none could be made


class Server:
    """Serves HTTP on given sockets, each with its application; installs no signal handlers."""

    def __init__(self, apps: Mapping[socket.socket, ASGIApp], max_connections: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = min(max_connections, files // 2)
        self._note = RateLimitedLog(log)
        self._hub = ConnectionHub(self._note)
        self._ends = asyncio.Event()
        self._apps = dict(apps)
        self._arriving = set[asyncio.Task[None]]()

    @property
    def connections(self) -> set[HttpConnection]:
        return self._hub.connections

    @property
    def requests(self) -> int:
        """Counts the requests that have begun."""
        return self._hub.requests

    async def run_until_stopped(self) -> None:
        """Serves until `stop`, then closes the sockets and the idle connections."""
        accepting = [asyncio.ensure_future(self._accept(*one)) for one in self._apps.items()]
        try:
            await self._first_end(accepting)
            ends = time.monotonic() + LATE_S
            while time.monotonic() < ends and self._is_waited_for():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        finally:
            for task in accepting:
                task.cancel()
            await asyncio.gather(*accepting, return_exceptions=True)
            for one in self._apps:
                one.close()
            await self._shut()

    def stop(self) -> None:
        """Stops the server: `run_until_stopped` returns."""
        self._ends.set()

    async def _first_end(self, accepting: Sequence[asyncio.Future[None]]) -> None:
        """Waits for `stop`. Raises the error of an accepting task that ends before."""
        stopped: asyncio.Future[bool] = asyncio.ensure_future(self._ends.wait())
        try:
            waits: list[asyncio.Future[Any]] = [stopped, *accepting]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in accepting:
                if task.done():
                    task.result()
        finally:
            stopped.cancel()

    async def _shut(self) -> None:
        self._hub.ends = True
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for connection in tuple(self.connections):
            connection.stop()
        await self._all_gone(END_S)
        for task in tuple(self._hub.tasks):
            task.cancel()  # it answers that the daemon ends, if it has not begun to answer
        await asyncio.gather(*self._hub.tasks, return_exceptions=True)
        await self._all_gone(LAST_S)
        for connection in tuple(self.connections):
            connection.give_way()

    async def _all_gone(self, most_s: float) -> None:
        """Waits until no connection is open, but at most so long."""
        ends = time.monotonic() + most_s
        while self.connections and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _is_waited_for(self) -> bool:
        """Returns whether a client waits to be accepted, or has not sent a request yet."""
        knocking = select.poll()
        for one in self._apps:
            knocking.register(one, select.POLLIN)
        return bool(knocking.poll(0)) or any(one.has_not_asked for one in self.connections)

    async def _accept(self, listener: socket.socket, app: ASGIApp) -> None:
        """Accepts connections until cancelled; a failed connection ends nothing else."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        accepted = 0
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of files or memory
                self._note(logging.WARNING, f"no connection can be accepted: {error.strerror}")
                if not self._make_room():
                    await asyncio.sleep(PAUSE_S)
                continue
            try:
                while len(self.connections) >= self.max_connections and not self._make_room():
                    self._note(logging.WARNING, "there are as many connections as there may be (api.max_connections)")
                    await asyncio.sleep(PAUSE_S)
                self._admit(connection, app)
            except BaseException:
                connection.close()
                raise
            accepted = (accepted + 1) % AT_ONCE
            for _ in range(0 if accepted else ROUNDS):
                await asyncio.sleep(0)

    def _admit(self, connection: socket.socket, app: ASGIApp) -> None:
        """Serves a connection. The oldest one without a key gives way if its address has too many."""
        connection.setblocking(False)
        arrived = HttpConnection(self._hub, connection, app)
        if arrived.uid is None:
            unknown = self._hub.unknown_of(arrived.site)
            if len(unknown) > MOST_UNKNOWN:
                self._note(logging.WARNING, "many connections without a key give way", arrived.address)
                unknown[0].give_way()
        task = asyncio.ensure_future(self._connect(arrived, connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _connect(self, arrived: HttpConnection, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: arrived, connection)
        except OSError:  # it has gone already
            connection.close()
            self._hub.remove(arrived)

    def _make_room(self) -> bool:
        """Closes the connection that gives way. Returns False if there is none."""
        if unknown := self._hub.most_unknown():
            oldest = unknown[0]
        else:
            latest = time.monotonic() - GRACE_S
            waiting = [one for one in self.connections if one.waits and one.waiting_since < latest]
            if not waiting:
                return False
            counts = Counter(one.owner for one in self.connections)
            oldest = min(waiting, key=lambda one: (-counts[one.owner], one.waiting_since))
        oldest.give_way()
        return True
