"""Links between tiers, and the rates and costs measured on them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from edgemoe.errors import MissingExpert
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import Transfer

Clock = Callable[[], float]
RECENT = 32  # transfers whose single rates are remembered


class LinkStats:
    """Measures rate, cost and idle share of one link by its transfers; recent ones count most.

    Transfers may overlap: each is charged the time since the one before it ended, so that the sum is the time
    that the link was busy.
    """

    decay = 0.98  # weight of all earlier transfers against the next one
    memory_s = 1.0  # how far back `idle_share` looks

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._active = 0
        self._mark_s = clock()  # up to here busy time is accounted for
        self._busy_share = 0.0  # at _busy_at_s
        self._busy_at_s = self._mark_s
        self._sums = [0.0] * 5  # decayed n, bytes, seconds, bytes^2, bytes * seconds
        self._rates: deque[float] = deque(maxlen=RECENT)  # bytes/s

    def begin(self) -> None:
        """Notes the start of a transfer."""
        if not self._active:
            self._mark_s = self._clock()
        self._active += 1

    def end(self, size_bytes: int, seconds: float | None = None) -> None:
        """Adds a transfer that ended; `seconds` is its time where the link has a clock of its own."""
        now = self._clock()
        self._active -= 1
        self.observe(size_bytes, now - self._mark_s if seconds is None else seconds)
        self._mark_s = now

    def abort(self) -> None:
        """Drops a transfer that failed."""
        self._active -= 1
        self._mark_s = self._clock()

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Adds a transfer of known duration that ends now."""
        self._rates.append(size_bytes / max(seconds, 1e-9))
        new = (1.0, size_bytes, seconds, size_bytes * size_bytes, size_bytes * seconds)
        self._sums = [self.decay * old + x for old, x in zip(self._sums, new, strict=True)]
        now = self._clock()
        kept = math.exp(-(now - self._busy_at_s) / self.memory_s)
        self._busy_share = min(1.0, kept * self._busy_share + 1.0 - math.exp(-seconds / self.memory_s))
        self._busy_at_s = now

    @property
    def bytes_per_s(self) -> float:
        """Returns bytes over busy time; 0 before the first transfer."""
        return self._sums[1] / self._sums[2] if self._sums[2] > 0 else 0.0

    @property
    def unhindered_bytes_per_s(self) -> float:
        """Returns the rate that a quarter of the last transfers exceeded; 0 before the first.

        Slower transfers mostly ended on time, but the thread that notices their end had to wait for the processor.
        """
        rates = sorted(self._rates)
        return rates[-(len(rates) // 4) - 1] if rates else 0.0

    @property
    def seconds(self) -> float:
        """Returns the mean busy time of a transfer; 0 before the first."""
        return self._sums[2] / self._sums[0] if self._sums[0] > 0 else 0.0

    @property
    def idle_share(self) -> float:
        """Returns the share of about the last second in which the link was idle."""
        if self._active:
            return 0.0
        return 1.0 - self._busy_share * math.exp(-(self._clock() - self._busy_at_s) / self.memory_s)

    def cost(self) -> tuple[float, float]:
        """Returns (seconds per transfer, seconds per byte) by least squares. The first is 0 if all sizes are equal."""
        n, x, y, xx, xy = self._sums
        if not n or not x:
            return 0.0, 0.0
        spread = n * xx - x * x
        if spread <= 1e-9 * n * xx:
            return 0.0, y / x
        slope = max(0.0, (n * xy - x * y) / spread)
        return max(0.0, (y - slope * x) / n), slope


class TransferListener(Protocol):
    """Receives the ends of copies, on any thread: the loader."""

    def arrived(self, load: Transfer) -> None:
        """Takes a copy whose bytes are in place, or ordered before all computation from them."""

    def released(self, load: Transfer) -> None:
        """Takes a copy that no longer reads from its source."""

    def failed(self, load: Transfer, error: Exception) -> None:
        """Takes a copy that failed and no longer reads from its source."""

    def roused(self, link: TierLink) -> None:
        """Answers `rouse`, on the link's thread."""


class TierLink(Protocol):
    """Copies experts from RAM to one device."""

    stats: LinkStats

    def attach(self, listener: TransferListener) -> None:
        """Sets the listener for the ends of copies. Called once, before the first copy."""

    def copy(self, load: Transfer) -> None:
        """Queues one copy from `load.source` of RAM to `load.slot`; demanded ones overtake the others."""

    def idle(self) -> bool:
        """Returns whether no copy is queued or under way."""

    def rouse(self) -> None:
        """Makes the link call `roused` soon, on a thread that may take its time."""

    def close(self) -> None:
        """Ends the link after the copy under way; what is queued fails."""


class EmulatedLink:
    """Copies between two host slabs on a thread, as slowly as a link of the stated rate."""

    def __init__(
        self,
        source: HostSlab,
        target: HostSlab,
        bytes_per_s: float,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.stats = LinkStats(clock)
        self._source, self._target, self._rate = source, target, bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._queues: tuple[deque[tuple[Transfer, float]], ...] = (deque(), deque())  # demand, prefetch
        self._changed = threading.Condition()
        self._waiting = 0  # queued or under way
        self._roused = False
        self._free_at_s = 0.0
        self.closed = False
        self._thread = threading.Thread(target=self._run, name="edgemoe-link", daemon=True)

    def attach(self, listener: TransferListener) -> None:
        self._listener = listener
        self._thread.start()

    def copy(self, load: Transfer) -> None:
        with self._changed:
            if not self.closed:
                self._queues[0 if load.demand else 1].append((load, self._clock()))
                self._waiting += 1
                self.stats.begin()
                self._changed.notify()
                return
        self._refuse(load)

    def idle(self) -> bool:
        return not self._waiting

    def rouse(self) -> None:
        with self._changed:
            self._roused = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join(timeout=10)
        for load, _ in (*self._queues[0], *self._queues[1]):
            self._refuse(load)

    def _refuse(self, load: Transfer) -> None:
        self._listener.failed(load, MissingExpert(load.layer, load.expert, "the link to its device is closed"))

    def _run(self) -> None:
        while not self.closed:
            job = self._next()
            if job is None:
                self._listener.roused(self)
            else:
                self._serve(*job)

    def _serve(self, load: Transfer, queued_s: float) -> None:
        error: Exception | None = None
        try:
            self._transfer(load, queued_s)
        except Exception as raised:  # those who wait must get an answer in any case
            error = raised
        with self._changed:
            self._waiting -= 1
            if error is None:
                self.stats.end(self._target.stride_bytes)
            else:
                self.stats.abort()
        if error is None:
            self._listener.arrived(load)
            self._listener.released(load)
        else:
            self._listener.failed(load, error)

    def _next(self) -> tuple[Transfer, float] | None:
        """Waits for the next copy and returns it; None when roused or closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._roused or any(self._queues))
            if self.closed or not any(self._queues):
                self._roused = False
                return None
            return next(queue for queue in self._queues if queue).popleft()

    def _transfer(self, load: Transfer, queued_s: float) -> None:
        """Copies an expert and sleeps to hold the rate; queued copies follow without a gap."""
        self._free_at_s = max(self._free_at_s, queued_s) + self._target.stride_bytes / self._rate
        self._target.slab[load.slot] = self._source.slab[load.source]
        remaining_s = self._free_at_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
