"""Links between tiers, which move experts in pieces, and the rates and costs measured on them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from edgemoe.errors import MissingExpert
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import Transfer
from edgemoe.experts.transfer.pieces import PIECE_BYTES, PieceSchedule, pieces_of

Clock = Callable[[], float]
Wait = Callable[[threading.Condition, float | None], object]  # until notified, or for so many seconds
RECENT, KEPT = 32, 8.0  # transfers: whose single rates are remembered; that an earlier start's record weighs as much as


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

    @property
    def record(self) -> list[float]:
        """Returns what rate and cost are worked out from, for `restore`."""
        return self._sums.copy()

    def restore(self, record: Sequence[float]) -> None:
        """Goes on from an earlier record, that of one transfer at least."""
        share = min(1.0, KEPT / record[0])
        self._sums = [share * each for each in record]
        self._rates.append(self.bytes_per_s)


class TransferListener(Protocol):
    """Receives the ends of copies, on any thread: the loader."""

    def arrived(self, load: Transfer) -> None:
        """Takes a copy whose bytes are in place, or ordered before all computation from them."""

    def released(self, load: Transfer) -> None:
        """Takes a copy that no longer reads from its source: it has arrived, or was withdrawn."""

    def failed(self, load: Transfer, error: Exception) -> None:
        """Takes a copy that failed and no longer reads from its source."""

    def withdraws(self, load: Transfer) -> bool:
        """Gives a prefetch up unless it is demanded. Returns whether it did."""

    def roused(self, link: TierLink) -> None:
        """Answers `rouse`, on the link's thread."""


class TierLink(Protocol):
    """Copies experts from RAM to one device; a demand waits for one piece of a prefetch at most.

    A piece is a part of an expert where the link is emulated, and an expert on a GPU.

    A prefetch that is demanded while it is queued or under way is a demand from then on.
    """

    stats: LinkStats
    at_once: bool  # to begin a copy takes so little time that any thread may do it

    def attach(self, listener: TransferListener) -> None:
        """Sets the listener for the ends of copies. Called once, before the first copy."""

    def copy(self, load: Transfer) -> None:
        """Queues one copy from `load.source` of RAM to `load.slot`; demanded ones overtake the others."""

    def withdraw(self, load: Transfer) -> None:
        """Ends a prefetch that has not arrived, if the listener gives it up. On the link's thread."""

    def idle(self) -> bool:
        """Returns whether no copy is queued or under way."""

    def has_room(self) -> bool:
        """Returns whether another prefetch is begun before those under way have ended, so that the link stays busy."""

    def rouse(self) -> None:
        """Makes the link call `roused` soon, on a thread that may take its time."""

    @property
    def piece_s(self) -> float:
        """Returns the seconds of a piece, which is what a prefetch delays a demand by at most; 0 until measured."""

    def close(self) -> None:
        """Ends the link; what has not arrived fails."""


class EmulatedLink:
    """Copies between two host slabs on a thread, as slowly as a link of the stated rate."""

    at_once = True

    def __init__(
        self,
        source: HostSlab,
        target: HostSlab,
        bytes_per_s: float,
        expert_bytes: float = 0.0,
        *,
        clock: Clock = time.monotonic,
        wait: Wait = threading.Condition.wait,
    ) -> None:
        """Emulates largest experts of `expert_bytes`, where that is not what is really copied."""
        self.stats = LinkStats(clock)
        self._source, self._target = source, target
        self._largest_bytes = target.layout.classes.bytes[-1]
        size_bytes = expert_bytes or self._largest_bytes
        self._expert_s, pieces = size_bytes / bytes_per_s, pieces_of(size_bytes)
        self._schedule = PieceSchedule[Transfer](pieces, self._expert_s / pieces)
        self._copied: dict[Transfer, int] = {}  # bytes that lie in the target; on the thread, as what follows
        self._errors: dict[Transfer, Exception] = {}
        self._clock, self._wait = clock, wait
        self._changed = threading.Condition()  # the lock of schedule and counts
        self._unfinished = 0  # the listener has not been told their end
        self._roused = False
        self.closed = False
        self._thread = threading.Thread(target=self._run, name="edgemoe-link", daemon=True)

    def attach(self, listener: TransferListener) -> None:
        self._listener = listener
        self._thread.start()

    def copy(self, load: Transfer) -> None:
        with self._changed:
            if not self.closed:
                self._schedule.add(load, self._clock(), self._bytes_of(load) / self._largest_bytes)
                self._unfinished += 1
                self.stats.begin()
                self._changed.notify()
                return
        self._refuse(load)

    def withdraw(self, load: Transfer) -> None:
        with self._changed:
            gone = load in self._schedule.loads and self._listener.withdraws(load)
            if gone:
                self._schedule.drop(load, self._clock())
                self._unfinished -= 1
                self.stats.abort()
                self._copied.pop(load, None)
        if gone:
            self._listener.released(load)

    def idle(self) -> bool:
        return not self._unfinished

    has_room = idle  # nothing is lost between two transfers

    def rouse(self) -> None:
        with self._changed:
            self._roused = True
            self._changed.notify()

    @property
    def piece_s(self) -> float:
        return self._schedule.piece_s

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join(timeout=10)
        for load in self._schedule.take_ended(math.inf):
            self._refuse(load)

    def _bytes_of(self, load: Transfer) -> int:
        return self._target.layout.place(load.slot)[1]

    def _refuse(self, load: Transfer) -> None:
        self._listener.failed(load, MissingExpert(load.layer, load.expert, "the link to its device is closed"))

    def _run(self) -> None:
        while not self.closed:
            ended, roused = self._next()
            for load in ended:
                self._finish(load)
            if roused:
                self._listener.roused(self)

    def _next(self) -> tuple[list[Transfer], bool]:
        """Waits until transfers have ended or the link was roused; meanwhile copies what is under way."""
        while True:
            with self._changed:
                now_s, roused = self._clock(), self._roused
                self._roused = False
                ended = self._schedule.take_ended(now_s)
                if ended or roused or self.closed:
                    return ended, roused
                load = self._schedule.running
                if load is None or self._copied.get(load, 0) >= self._bytes_of(load):
                    end_s = self._schedule.end_s
                    self._wait(self._changed, end_s - now_s if load is not None else None)
                    continue
            self._copy_some(load)  # without the lock, and little enough to see soon what has come

    def _copy_some(self, load: Transfer) -> None:
        first = self._copied.get(load, 0)
        part = slice(first, first + 2 * PIECE_BYTES)
        try:
            self._target.slot(load.slot)[part] = self._source.slot(load.source)[part]
        except Exception as error:  # those who wait must get an answer in any case
            self._errors[load] = error
        self._copied[load] = first + 2 * PIECE_BYTES

    def _finish(self, load: Transfer) -> None:
        size_bytes = self._bytes_of(load)
        while self._copied.get(load, 0) < size_bytes:
            self._copy_some(load)
        del self._copied[load]
        error = self._errors.pop(load, None)
        with self._changed:
            self._unfinished -= 1
            if error is None:
                self.stats.end(size_bytes, self._expert_s * size_bytes / self._largest_bytes)
            else:
                self.stats.abort()
        if error is None:
            self._listener.arrived(load)
            self._listener.released(load)
        else:
            self._listener.failed(load, error)
