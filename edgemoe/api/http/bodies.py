"""Reads request bodies within one budget of memory, which covers each from its first byte until it has been decoded.

Where all bodies exceed the budget, or one principal's bodies its share of the rest, one body is refused. It is the
largest still arriving of the principal with the most. A client of long or endless bodies hinders only itself.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from edgemoe.api.http.responding import ClientGone
from edgemoe.errors import QueueFull
from edgemoe.policy import shares
from edgemoe.types.request import Principal

STALL_S = 30.0  # without a byte of a body
BODY_S, LEAST_BYTES_PER_S = 60.0, 1024  # that a body may take to come, and more at this rate
LENGTH = re.compile(r"[0-9]+")
HELD = 8  # bodies of the greatest length that the budget holds
RETRY_S = 2.0


@dataclass(eq=False, slots=True)
class PendingBody:
    """One body that is being read or decoded."""

    principal: Principal
    bytes: int = 0
    arriving: asyncio.Timeout | None = None
    gave_way: bool = False


class BodyBudget:
    """Owns the budget, and reads bodies within it."""

    def __init__(self, max_bytes: int) -> None:
        """Allows `max_bytes` for each body, and HELD times as much for all together."""
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._bodies: set[PendingBody] = set()
        self._held = Counter[Principal]()  # bytes

    @contextmanager
    def open(self, principal: Principal) -> Iterator[PendingBody]:
        """Yields a body to read, which counts against the budget until the `with` block ends."""
        body = PendingBody(principal)
        self._bodies.add(body)
        try:
            yield body
        finally:
            self._bodies.discard(body)
            self._count(body, -body.bytes)

    async def read(self, body: PendingBody, request: Request) -> bytes:
        """Reads a body. Raises HTTPException (413, 408), QueueFull where the budget is exceeded, and ClientGone."""
        length = request.headers.get("content-length", "")
        if LENGTH.fullmatch(length) and (len(length) > 18 or int(length) > self._max_bytes):
            raise self._too_long()
        whole = bytearray()
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with asyncio.timeout(STALL_S) as body.arriving:
                async for chunk in request.stream():
                    whole += chunk
                    if not body.gave_way:
                        ends = began + BODY_S + len(whole) / LEAST_BYTES_PER_S
                        body.arriving.reschedule(min(loop.time() + STALL_S, ends))
                    if len(whole) > self._max_bytes:
                        raise self._too_long()
                    self._grow(body, len(chunk))
        except TimeoutError:
            if not body.gave_way:
                raise HTTPException(408, f"the body comes too slowly: {len(whole)} bytes so far") from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            body.arriving = None
        if body.gave_way:
            raise QueueFull("the request bodies in progress fill the memory for them; try again", retry_after_s=RETRY_S)
        return bytes(whole.removeprefix(codecs.BOM_UTF8))  # which some clients of Windows write before their JSON

    def _grow(self, body: PendingBody, size: int) -> None:
        if body.gave_way:
            return
        self._count(body, size)
        while (largest := self._surplus()) is not None:
            largest.gave_way = True
            self._count(largest, -largest.bytes)
            if largest.arriving is not None:
                largest.arriving.reschedule(0)

    def _surplus(self) -> PendingBody | None:
        """Returns the body to refuse; None while there is room."""
        free = HELD * self._max_bytes - self.held_bytes
        over = [
            one
            for one in self._bodies
            if one.arriving is not None and not one.gave_way and not shares.fits(0, self._held[one.principal], free)
        ]
        return max(over, key=lambda one: (self._held[one.principal], one.bytes), default=None)

    def _count(self, body: PendingBody, size: int) -> None:
        body.bytes += size
        self.held_bytes += size
        self._held[body.principal] += size
        if not self._held[body.principal]:
            del self._held[body.principal]

    def _too_long(self) -> HTTPException:
        return HTTPException(413, f"the body is longer than {self._max_bytes} bytes (api.max_body_bytes)")
