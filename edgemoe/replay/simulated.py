"""Simulated time, with the links and the disk that act in it.

Links go by the schedule that real ones go by, and the loader's readers run on an event loop that never waits. Nothing
happens but when the driver lets time pass.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from edgemoe.experts.tiers.slots import ResidencyWaiters, SlotTransfer
from edgemoe.experts.transfer.link_stats import LinkStats
from edgemoe.experts.transfer.links import PieceSchedule, TransferListener, pieces_of
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout


class SimulatedActor(Protocol):
    """Does something by itself."""

    @property
    def next_s(self) -> float:
        """When it does something next if nothing comes; inf where it rests."""

    def act(self) -> None:
        """Performs the next event."""


class SimulatedClock:
    """Owns the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy: list[SimulatedActor] = []

    def clock(self) -> float:
        return self.now_s

    def advance(self, until_s: float = math.inf) -> bool:
        """Lets the next thing happen. Returns False where none does by `until_s`, which it is then if it is finite."""
        next_s, first = math.inf, None
        for each in self.busy:
            if (its_s := each.next_s) < next_s:
                next_s, first = its_s, each
        if first is None or next_s > until_s:
            if until_s < math.inf:
                self.now_s = max(self.now_s, until_s)
            return False
        self.now_s = max(self.now_s, next_s)
        first.act()
        return True

    def pass_s(self, seconds: float) -> None:
        """Advances the clock by `seconds`, with all events on the way."""
        until_s = self.now_s + seconds
        while self.advance(until_s):
            pass


class TimedArrivals(SimpleQueue[SlotTransfer]):
    """Lets time pass where a queue would wait."""

    def __init__(self, world: SimulatedClock) -> None:
        self._world = world

    def get(self, block: bool = True, timeout: float | None = None) -> SlotTransfer:
        until_s = self._world.now_s + (math.inf if timeout is None else timeout)
        while self.empty():
            if not self._world.advance(until_s):
                raise Empty
        return super().get_nowait()


class SimulatedWaiters(ResidencyWaiters):
    """Lets time pass where a thread would wait."""

    def __init__(self, world: SimulatedClock) -> None:
        super().__init__()
        self._world = world

    def wait_for(self, changed: Callable[[], bool], timeout_s: float) -> bool:
        until_s = self._world.now_s + timeout_s
        while not changed():
            if not self._world.advance(until_s):
                return False
        return True


class SimulatedLink:
    """Carries experts in pieces, as `EmulatedLink` does, and copies nothing."""

    at_once = True

    def __init__(self, world: SimulatedClock, layout: SlabLayout, bytes_per_s: float) -> None:
        self._world, self._layout = world, layout
        self._largest_bytes = layout.classes.bytes[-1]
        self._expert_s, pieces = self._largest_bytes / bytes_per_s, pieces_of(self._largest_bytes)
        self._schedule = PieceSchedule[SlotTransfer](pieces, self._expert_s / pieces)
        self._roused = False
        self.stats = LinkStats(world.clock)
        world.busy.append(self)

    def attach(self, listener: TransferListener) -> None:
        self._listener = listener

    def copy(self, load: SlotTransfer) -> None:
        self._schedule.add(load, self._world.now_s, self._bytes_of(load) / self._largest_bytes)
        self.stats.begin()

    def withdraw(self, load: SlotTransfer) -> None:
        if load in self._schedule.loads and self._listener.withdraw_prefetch(load):
            self._schedule.drop(load, self._world.now_s)
            self.stats.abort()
            self._listener.on_released(load)

    def idle(self) -> bool:
        return not self._schedule.loads

    has_room = idle

    def wake(self) -> None:
        self._roused = True

    @property
    def piece_s(self) -> float:
        return self._schedule.piece_s

    def close(self) -> None:
        pass

    @property
    def next_s(self) -> float:
        return self._world.now_s if self._roused else self._schedule.end_s

    def act(self) -> None:
        for load in self._schedule.pop_ended(self._world.now_s):
            size_bytes = self._bytes_of(load)
            self.stats.end(size_bytes, self._expert_s * size_bytes / self._largest_bytes)
            self._listener.on_arrived(load)
            self._listener.on_released(load)
        if self._roused:
            self._roused = False
            self._listener.on_woken(self)

    def _bytes_of(self, load: SlotTransfer) -> int:
        return self._layout.place(load.slot)[1]


class SimulatedDisk:
    """Reads one expert after the other, for the loader's readers, which it runs."""

    def __init__(self, world: SimulatedClock, geometry: ExpertGeometry, bytes_per_s: float) -> None:
        self._world, self._geometry, self._bytes_per_s = world, geometry, bytes_per_s
        self._reads: deque[tuple[float, asyncio.Future[None]]] = deque()  # and when each ends
        self._free_s = 0.0
        self.loop = _RestingLoop()
        world.busy.append(self)

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._geometry.expert_bytes(layer)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        self._free_s = max(self._free_s, self._world.now_s) + self._geometry.stride_bytes(layer) / self._bytes_per_s
        read = self.loop.create_future()
        self._reads.append((self._free_s, read))
        await read

    @property
    def next_s(self) -> float:
        self.loop.run_forever()  # the readers that were woken
        return self._reads[0][0] if self._reads else math.inf

    def act(self) -> None:
        self._reads.popleft()[1].set_result(None)
        self.loop.run_forever()

    def close(self, running: asyncio.Task[None]) -> None:
        """Ends the loader's task, and the loop."""
        running.cancel()
        self.loop.run_until_complete(asyncio.gather(running, return_exceptions=True))
        self.loop.close()


class _Resting(selectors.SelectSelector):
    """Stops the loop where it would wait."""

    loop: asyncio.AbstractEventLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout != 0:
            self.loop.stop()
        return ready


class _RestingLoop(asyncio.SelectorEventLoop):
    """Runs until all tasks wait."""

    def __init__(self) -> None:
        selector = _Resting()
        super().__init__(selector)
        selector.loop = self


class NoMemory:
    """Stands in for the slab of RAM, into which nothing is read."""

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout

    def view(self, slot: int) -> memoryview:
        return memoryview(b"")
