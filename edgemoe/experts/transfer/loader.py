"""Loads experts into the slots that residency grants: demanded ones first, prefetch requests when links are idle.

NVMe reads run on the engine's asyncio loop, several at a time, directly into RAM slots. Copies to a device go through
its link, started by any thread. Methods are thread-safe. The compute thread calls `start` and `prefetch`, and never
waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import numpy as np

from edgemoe.errors import MissingExpert, StoreError
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotTransfer
from edgemoe.experts.transfer.link_prefetch import IdleWindow, LinkPrefetcher, ReadGap
from edgemoe.experts.transfer.link_stats import Clock, LinkStats
from edgemoe.experts.transfer.links import TierLink
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.experts import ExpertId, ExpertReader, Move, Tier

READERS, IDLE_READERS = 8, 2  # readers, and how many of them may serve prefetch requests
HELD_HERE_TOO = (PrefetchPriority.HOME, PrefetchPriority.USED, PrefetchPriority.FILL)  # whether or not peers have them
FILL_READERS = 4  # readers that may fill free slots while no layer runs: two read 1.0 of a disk's 1.5 GB/s


class ExpertLoader:
    """Loads experts from NVMe to RAM and from RAM to devices."""

    def __init__(
        self,
        residency: Residency,
        store: ExpertReader,
        ram: HostSlab,
        links: Sequence[TierLink] = (),
        *,
        on_disk: BoolArray | None = None,
        clock: Clock = time.monotonic,
        arrivals: Callable[[], SimpleQueue[SlotTransfer]] = SimpleQueue,
    ) -> None:
        """Takes `links` in the order of the devices.

        `on_disk` [L, E] marks experts that the store reads from the disk; None marks all. The others come from peers.
        Simulations replace `clock`, and `arrivals`, which makes the queues of waiting layer-steps.
        """
        self.residency, self.links = residency, tuple(links)
        self.clock, self.arrivals = clock, arrivals
        self.stats = LinkStats(clock)  # of the disk
        self._on_disk = on_disk
        self.gap = IdleWindow(len(residency.device_of), clock)  # when links serve prefetch requests
        self._read_gap = ReadGap(clock)  # when the disk does
        # returns a mask of experts of a layer [n] that another box has or would have to send: they are not prefetched
        self.elsewhere: Callable[[int, IntArray], BoolArray] | None = None
        self._store, self._ram = store, ram
        self._lock = threading.Lock()  # of all that follows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # of the loop
        self._to_wake = 0  # readers that the loop has been asked to wake
        self._closed = False
        self._demanded: deque[SlotTransfer] = deque()  # reads, waiting
        self._reading: list[SlotTransfer] = []  # reads under way; changed on the loop only
        self._stages: tuple[deque[Move], ...] = tuple(deque() for _ in PrefetchPriority)  # requests for NVMe -> RAM
        self._copies = [
            LinkPrefetcher(link, i, residency, self.gap) for i, link in enumerate(self.links)
        ]  # RAM -> device
        self._onward: dict[ExpertId, tuple[Move, PrefetchPriority]] = {}  # requests to copy on once they are in RAM
        self._sleepers: deque[asyncio.Future[None]] = deque()  # readers without work; touched on the loop only
        for link in self.links:
            link.attach(self)

    # --- any thread -----------------------------------------------------------------------------------------

    def start(self, loads: Iterable[SlotTransfer]) -> None:
        """Starts demanded loads, in order."""
        reads = []
        for load in loads:
            if load.source >= 0:
                self.links[load.pool.index - 1].copy(load)
            else:
                reads.append(load)
        if reads:
            self._queue_reads(reads)

    def prefetch(self, moves: Iterable[Move], priority: PrefetchPriority = PrefetchPriority.FAR) -> None:
        """Replaces the requests of one priority, best first. Earlier ones that have not started are cancelled.

        A request from NVMe to VRAM goes through RAM; one from RAM is dropped if the expert is not there. Loads of an
        earlier plan that are not in the new one are withdrawn.
        """
        moves = list(moves)
        with self._lock:
            if self._onward:
                self._onward = {expert: asked for expert, asked in self._onward.items() if asked[1] != priority}
            self._replace(moves, priority)
        if priority is PrefetchPriority.FAR:
            for copies in self._copies:
                copies.replan([move.expert for move in moves])
        self.start_prefetches()

    def start_prefetches(self) -> None:
        """Starts prefetch requests on idle links and readers; gives up prefetches for layers that ran without them."""
        for copies in self._copies:
            copies.start()
        if any(self._stages) and self._any_read_pays():
            self._wake(FILL_READERS)

    def miss_costs(self, tier: Tier) -> list[tuple[float, float]]:
        """Returns the seconds per load and per byte into RAM, or into each device; 0 until measured."""
        return [each.cost() for each in ([link.stats for link in self.links] if tier is Tier.VRAM else [self.stats])]

    @property
    def prefetch_requests(self) -> int:
        """Counts the prefetch requests that have not started."""
        return sum(map(len, self._stages)) + sum(map(len, self._copies))

    # --- the loop ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reads experts until cancelled; queued loads then fail."""
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(READERS):
                    group.create_task(self._reader())
        finally:
            self._close()

    async def _reader(self) -> None:
        while True:
            load = self._next_read()
            if load is None:
                sleeper = asyncio.get_running_loop().create_future()
                self._sleepers.append(sleeper)
                await sleeper
            else:
                await self._read(load)

    async def _read(self, load: SlotTransfer) -> None:
        self._reading.append(load)
        on_disk = self._on_disk is None or self._on_disk[load.layer, load.expert]
        stats = self.stats if on_disk else LinkStats(self.clock)
        stats.begin()
        try:
            await self._store.read(load.layer, load.expert, self._ram.view(load.slot))
        except BaseException as error:  # waiting layer-steps must get an answer in any case
            stats.abort()
            self.residency.fail_load(load, _as_failure(load, error))
            if not isinstance(error, Exception):
                raise
        else:
            stats.end(self._ram.layout.place(load.slot)[1])
            self.start(self.residency.complete_load(load))
        finally:
            self._reading.remove(load)
            if load.demand and not self._demanded and not any(other.demand for other in self._reading):
                self._read_gap.begin()
            self._pass_on(ExpertId(load.layer, load.expert))
        self.start_prefetches()

    def _next_read(self) -> SlotTransfer | None:
        """Returns the next demanded read; a prefetch if none waits or runs."""
        with self._lock:
            if self._demanded:
                return self._demanded.popleft()
            for priority, queue in zip(PrefetchPriority, self._stages, strict=True):
                while queue and self._may_read_ahead(priority) and self._read_pays(queue[0].chance, priority):
                    if (load := self._stage(queue.popleft(), priority)) is not None:
                        return load
        return None

    def _read_pays(self, chance: float, priority: PrefetchPriority) -> bool:
        """Whether a read ahead is worth its delay of demanded reads.

        A read for the next layers delays none if its expert is demanded first; a read for later delays earlier ones.
        """
        read_s, left_s = self.stats.seconds, self.gap.left_s()
        if left_s == math.inf or chance == 1:
            return True
        delay_s = self._read_gap.delay_s(read_s)
        if priority.for_one_layer:
            return chance * min(read_s, left_s) >= (1 - chance) * delay_s
        return chance * read_s >= delay_s

    def _stage(self, move: Move, priority: PrefetchPriority) -> SlotTransfer | None:
        """Reserves the read that a prefetch request starts with. Returns None if it needs none or there is no room."""
        away = self.elsewhere if priority not in HELD_HERE_TOO else None
        if away is not None and away(move.expert.layer, np.array([move.expert.expert]))[0]:
            return None
        load = self.residency.reserve(move._replace(target=Tier.RAM), priority)
        if move.target is Tier.VRAM and self.links:
            if load is None:
                self._copies[self.residency.device_of[move.expert]].append(move, priority)
            else:
                self._onward[move.expert] = move, priority
        return load

    def _pass_on(self, expert: ExpertId) -> None:
        with self._lock:
            if prefetch_request := self._onward.pop(expert, None):
                self._copies[self.residency.device_of[expert]].append(*prefetch_request)

    def _rouse(self) -> None:
        with self._lock:
            n, self._to_wake = self._to_wake, 0
        while n and self._sleepers:
            sleeper = self._sleepers.popleft()
            if not sleeper.done():
                sleeper.set_result(None)
                n -= 1

    # --- the links' side --------------------------------------------------------------------------------------

    def on_arrived(self, load: SlotTransfer) -> None:
        """Makes a copy's expert resident: its bytes are in place, or ordered before computation."""
        self.residency.complete_load(load)

    def on_released(self, load: SlotTransfer) -> None:
        """Unpins the source of a copy that has ended."""
        self._copies[load.pool.index - 1].on_ended(load)
        self.residency.unpin(load.source)
        self.start_prefetches()

    def on_failed(self, load: SlotTransfer, error: Exception) -> None:
        """Fails a copy with its error: not the expert is missing, but the device or the step failed."""
        self._copies[load.pool.index - 1].on_ended(load)
        self.residency.fail_load(load, error)
        self.residency.unpin(load.source)

    def withdraw_prefetch(self, load: SlotTransfer) -> bool:
        """Withdraws a prefetch unless it is demanded by now."""
        return self.residency.withdraw_load(load)

    def on_woken(self, link: TierLink) -> None:
        """Withdraws useless prefetches, and starts requests if the link is idle."""
        self._copies[self.links.index(link)].on_woken()

    # --- inside -------------------------------------------------------------------------------------------------

    def _replace(self, moves: Sequence[Move], priority: PrefetchPriority) -> None:
        """Replaces the waiting requests of one priority, for the disk and each link."""
        reads = [move for move in moves if move.source is Tier.NVME] if self.links else moves
        ready = [move for move in moves if move.source is not Tier.NVME] if reads else moves
        self._stages[priority].clear()
        self._stages[priority].extend(reads)
        device_of = self.residency.device_of
        for index, copies in enumerate(self._copies):
            its = ready if len(self._copies) == 1 else [move for move in ready if device_of[move.expert] == index]
            copies.replace(its, priority)

    def _may_read_ahead(self, priority: PrefetchPriority) -> bool:
        """Whether another reader may serve prefetch requests: no read under way is demanded by now."""
        reading = tuple(self._reading)
        fills = priority is PrefetchPriority.FILL and self.gap.left_s() == math.inf
        most = FILL_READERS if fills else IDLE_READERS
        return len(reading) < most and not any(load.demand for load in reading)

    def _queue_reads(self, reads: Sequence[SlotTransfer]) -> None:
        with self._lock:
            if not (closed := self._closed):  # else `_close` fails them, and nobody does so twice
                self._read_gap.demand()
                self._demanded.extend(reads)
        if closed:
            self._fail_all(reads)
        self._wake(len(reads))

    def _wake(self, n: int) -> None:
        """Wakes `n` readers. Calls before the loop runs share one request, because each takes a system call."""
        loop = self._loop
        if loop is None or self._closed:
            return
        with self._lock:
            asked, self._to_wake = self._to_wake > 0, self._to_wake + n
        if not asked:
            ask = loop.call_soon if threading.get_ident() == self._thread else loop.call_soon_threadsafe
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile; _close has failed the reads
                ask(self._rouse)

    def _any_read_pays(self) -> bool:
        queues = zip(PrefetchPriority, self._stages, strict=True)
        with self._lock:
            return any(
                self._may_read_ahead(priority) and self._read_pays(queue[0].chance, priority)
                for priority, queue in queues
                if queue
            )

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            left = list(self._demanded)
            self._demanded.clear()
        for priority in PrefetchPriority:
            self.prefetch((), priority)
        self._fail_all(left)

    def _fail_all(self, loads: Iterable[SlotTransfer]) -> None:
        for load in loads:
            self.residency.fail_load(load, _as_failure(load, asyncio.CancelledError()))


def _as_failure(load: SlotTransfer, error: BaseException) -> Exception:
    """Returns the error for the forward pass that waits for the load."""
    if isinstance(error, StoreError):
        return error
    why = "the engine is stopping" if isinstance(error, asyncio.CancelledError) else f"loading it failed: {error!r}"
    failure = MissingExpert(load.layer, load.expert, why)
    failure.__cause__ = error
    return failure
