"""Answers HTTP requests that other boxes forward, because their clients name a model that only this box serves.

The asker fetches an answer in parts, at its client's pace. A request that is not asked for ends, as if its client had
hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from edgemoe.cluster.control.messages import ForwardedHttp, HttpPart, HttpPartQuery
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import PeerBusy, PeerRefused
from edgemoe.ticking import until_tick
from edgemoe.types.request import Principal, as_told_by

log = logging.getLogger(__name__)

MOST_HOSTED = 32  # answers of one asker at once
PART_BYTES = 64 << 10  # of an answer that are sent at once, or wait
WAIT_S = 2.0  # that a question waits for a part
UNASKED_S = 15.0  # after which an answer that nobody asks for ends
LOOK_S = 1.0
TOLD_HEADERS = ("content-type", "content-length", "cache-control", "retry-after", "x-should-retry", "x-accel-buffering")
Key = tuple[str, str, int]  # of a request: the asker, its incarnation, and its number


class HostedExchange:
    """One forwarded request and its answer, as ASGI receive and send."""

    def __init__(self, body: bytes) -> None:
        self.asked_s = time.monotonic()
        self.is_over = False  # the application has returned
        self._body: bytes | None = body
        self._status, self._headers = 0, tuple[tuple[str, str], ...]()
        self._waiting = bytearray()
        self._is_whole = self._is_gone = False
        self._changed = asyncio.Event()  # something has come, or the asker has gone
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._sending = asyncio.Lock()
        self._last = (-1, Answer(HttpPart()))  # number and part that may be asked for again

    @property
    def is_done(self) -> bool:
        """Returns whether nothing more will come."""
        return self.is_over and not self._last[1].message.more

    async def receive(self) -> Message:
        """Returns the body, then waits until the asker has gone."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while not (self._is_gone or self._is_whole):
            await self._changed.wait()
            self._changed.clear()
        self._changed.set()  # it stays so
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keeps a part of the answer; waits while many bytes are unread."""
        await self._has_room.wait()
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            told = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in message["headers"])
            self._headers = tuple((name, value) for name, value in told if name in TOLD_HEADERS)
        else:
            self._waiting += message.get("body", b"")
            self._is_whole = not message.get("more_body", False)
            if len(self._waiting) >= PART_BYTES:
                self._has_room.clear()
        self._changed.set()

    def end(self) -> None:
        """Marks that the application has returned."""
        self.is_over = True
        self._changed.set()

    def hang_up(self) -> None:
        """Tells the application that the asker has gone."""
        self._is_gone = True
        self._has_room.set()
        self._changed.set()

    async def part(self, number: int) -> Answer[HttpPart]:
        """Returns a part of the answer, once there is one or WAIT_S has passed. Raises PeerRefused."""
        self.asked_s = time.monotonic()
        async with self._sending:
            last, told = self._last
            if number == last:
                return told
            if number != last + 1:
                raise PeerRefused(f"part {number} of an answer is asked for after part {last}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    while not (self._waiting or self._is_whole or self.is_over or self._is_gone):
                        self._changed.clear()
                        await self._changed.wait()
            self.asked_s = time.monotonic()
            some = bytes(self._waiting[:PART_BYTES])
            del self._waiting[:PART_BYTES]
            if len(self._waiting) < PART_BYTES:
                self._has_room.set()
            ends = not self._waiting and (self._is_whole or self.is_over or self._is_gone)
            part = HttpPart(self._status, self._headers, more=not ends, broke_off=ends and not self._is_whole)
            self._last = (number, Answer(part, [memoryview(some)]))
            return self._last[1]


class HostedHttp:
    """Owns the forwarded HTTP requests that this box answers."""

    def __init__(self, spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]) -> None:
        self.app: ASGIApp | None = None  # None while the front starts
        self.served = 0
        self._spawn = spawn
        self._exchanges: dict[Key, HostedExchange] = {}

    def __len__(self) -> int:
        return sum(not exchange.is_done for exchange in self._exchanges.values())

    def begin(self, node: str, boot: str, asked: ForwardedHttp, body: bytes) -> None:
        """Begins to answer. Raises PeerBusy where the box has too many requests here."""
        key = (node, boot, asked.number)
        if key in self._exchanges:
            return  # sent twice
        own = sum(other[0] == node and not exchange.is_done for other, exchange in self._exchanges.items())
        if self.app is None or own >= MOST_HOSTED:
            raise PeerBusy(f"{own} requests of that box are answered here" if own else "this box is starting")
        exchange = self._exchanges[key] = HostedExchange(body)
        self.served += 1
        self._spawn(self._run(self.app, exchange, _scope(node, asked, len(body))))

    async def next_part(self, node: str, boot: str, asked: HttpPartQuery) -> Answer[Any]:
        """Returns a part of an answer. Raises PeerRefused for a request that is not here."""
        exchange = self._exchanges.get((node, boot, asked.number))
        if exchange is None:
            raise PeerRefused("there is no such request here, or not any more")
        return await exchange.part(asked.part)

    def withdraw(self, node: str, boot: str, number: int) -> None:
        """Ends a request, whose client has gone."""
        if (exchange := self._exchanges.pop((node, boot, number), None)) is not None:
            exchange.hang_up()

    async def run(self) -> None:
        """Ends answers that nobody asks for any more, until cancelled."""
        while True:
            await asyncio.sleep(until_tick(LOOK_S))
            latest = time.monotonic() - UNASKED_S
            for key, exchange in list(self._exchanges.items()):
                if exchange.asked_s < latest:
                    self.withdraw(*key)

    async def until_read(self) -> None:
        """Waits until the askers have the ends of all answers."""
        while len(self):  # noqa: ASYNC110
            await asyncio.sleep(until_tick(LOOK_S / 20))

    async def _run(self, app: ASGIApp, exchange: HostedExchange, scope: Scope) -> None:
        try:
            await app(scope, exchange.receive, exchange.send)
        except Exception as error:
            log.error("a forwarded request failed unexpectedly", exc_info=error)
        finally:
            exchange.end()


def _scope(node: str, asked: ForwardedHttp, size: int) -> Scope:
    """Returns the scope of a forwarded request. `teller` is the box that has checked its client."""
    headers = [*asked.headers, ("content-type", "application/json"), ("content-length", str(size))]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": None,
        "server": None,
        "state": {"teller": node, "told_principal": as_told_by(node, Principal(asked.principal))},
    }
