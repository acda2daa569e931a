"""Shares few places among principals: next comes the one that has had the least time, with few places at once each.

Start-time fair queueing (Goyal, Vin and Cheng 1996), by the time that work took. A principal with long work comes
later; a newcomer starts level with the principal served last.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job")


@dataclass(slots=True)
class WaitingPrincipal(Generic[Job]):
    """One principal's waiting work and the time that it has had."""

    used_s: float
    running: int = 0
    waiting: deque[Job] = field(default_factory=deque)


class FairTurns(Generic[Job]):
    """Decides whose work comes next. Neither threads nor tasks: the caller sees to these."""

    def __init__(self, places: int, each: int) -> None:
        """Lets `places` run at once, `each` of one principal at most."""
        self._free, self._each = places, each
        self._principals: dict[str, WaitingPrincipal[Job]] = {}
        self._level_s = 0.0  # the time used by the principal served last

    def __len__(self) -> int:
        """Counts the work that waits."""
        return sum(len(one.waiting) for one in self._principals.values())

    def put(self, principal: str, job: Job) -> None:
        """Queues a principal's work."""
        one = self._principals.setdefault(principal, WaitingPrincipal(self._level_s))
        if not one.running and not one.waiting:
            one.used_s = max(one.used_s, self._level_s)
        one.waiting.append(job)

    def next_job(self) -> tuple[str, Job] | None:
        """Removes and returns the next work to begin, with its principal; None without a place or work."""
        ready = [name for name, one in self._principals.items() if one.waiting and one.running < self._each]
        if not self._free or not ready:
            return None
        name = min(ready, key=lambda name: self._principals[name].used_s)
        one = self._principals[name]
        self._free -= 1
        one.running += 1
        self._level_s = max(self._level_s, one.used_s)
        return name, one.waiting.popleft()

    def give_back(self, principal: str, took_s: float) -> None:
        """Gives a place back, and charges `took_s` to its principal."""
        one = self._principals[principal]
        self._free += 1
        one.running -= 1
        one.used_s += took_s
        idle = [name for name, it in self._principals.items() if not it.running and not it.waiting]
        for name in idle:
            if self._principals[name].used_s <= self._level_s:  # it would start level anyway
                del self._principals[name]

    def drop(self, principal: str, job: Job) -> bool:
        """Forgets work that waits; returns False where it does not."""
        one = self._principals.get(principal)
        if one is None or job not in one.waiting:
            return False
        one.waiting.remove(job)
        return True


class TakenPlace(NamedTuple):
    """A place that is taken."""

    give_back: Callable[[], None]  # called once


class TaskTurns:
    """FairTurns of asyncio's tasks. One event loop."""

    def __init__(self, places: int, each: int) -> None:
        """Lets `places` run at once, `each` of one principal at most."""
        self._turns: FairTurns[asyncio.Future[None]] = FairTurns(places, each)

    def __len__(self) -> int:
        """Counts the tasks that wait."""
        return len(self._turns)

    async def begin(self, principal: str) -> TakenPlace:
        """Waits for the principal's turn. Returns its place, which is its own until `give_back`."""
        waiter = asyncio.get_running_loop().create_future()
        self._turns.put(principal, waiter)
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if not self._turns.drop(principal, waiter):  # it has its turn already
                self._turns.give_back(principal, 0.0)
                self._grant()
            raise
        began_s = time.monotonic()

        def give_back() -> None:
            self._turns.give_back(principal, time.monotonic() - began_s)
            self._grant()

        return TakenPlace(give_back)

    @contextlib.asynccontextmanager
    async def turn(self, principal: str) -> AsyncIterator[None]:
        """Waits for the principal's turn; the place is its own until the block is left."""
        place = await self.begin(principal)
        try:
            yield
        finally:
            place.give_back()

    def _grant(self) -> None:
        while (granted := self._turns.next_job()) is not None:
            waiter = granted[1]
            if waiter.cancelled():  # its task has not run since
                self._turns.give_back(granted[0], 0.0)
            else:
                waiter.set_result(None)
