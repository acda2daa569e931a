"""Links from RAM to devices: their interface, and the emulated link, which moves experts in pieces at a stated rate."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from edgemoe.errors import MissingExpert
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import Transfer
from edgemoe.experts.transfer.link_stats import Clock, LinkStats

PIECE_BYTES = 256 << 10  # least size of one of several pieces; none has twice as much
EARLY = 1e-6  # of a piece: so close to its start, none has begun


def pieces_of(size_bytes: float) -> int:
    """Returns the number of pieces that so many bytes are moved in."""
    return max(1, int(size_bytes // PIECE_BYTES))


class Urgent(Protocol):
    """Is moved over a link."""

    @property
    def urgency(self) -> int:
        """Returns what it overtakes: anything of less. It may grow meanwhile."""


Load = TypeVar("Load", bound=Urgent)


class PieceSchedule(Generic[Load]):
    """Orders the transfers of a link that takes `piece_s` for each of the `pieces` of a largest expert."""

    def __init__(self, pieces: int, piece_s: float) -> None:
        self.pieces, self.piece_s = pieces, piece_s
        self._left: dict[Load, float] = {}  # pieces that are still to come, in the order of coming
        self._ended: list[Load] = []  # and not taken yet
        self._running: Load | None = None
        self._since_s = 0.0  # from when on the pieces that are left of it move

    @property
    def running(self) -> Load | None:
        """Returns what moves, or will once the piece under way has ended."""
        return self._running

    @property
    def loads(self) -> list[Load]:
        """Returns what has not arrived, in the order of coming."""
        return list(self._left)

    @property
    def end_s(self) -> float:
        """Returns when the next transfer ends if nothing comes; inf where none is under way."""
        if self._running is None:
            return math.inf
        return self._since_s + self._left[self._running] * self.piece_s

    def add(self, load: Load, now_s: float, share: float = 1.0) -> None:
        """Takes a transfer. It waits for the piece under way of a less urgent one, and for what is as urgent.

        `share` is its size among the largest experts'.
        """
        self._advance(now_s)
        self._left[load] = self.pieces * share
        if self._running is None:
            self._choose(max(now_s, self._since_s))
        elif load.urgency > self._running.urgency:
            self._interrupt(now_s)

    def drop(self, load: Load, now_s: float) -> None:
        """Forgets a transfer that is in `loads`; its piece under way still ends."""
        boundary_s = self._boundary_s(now_s)[1]
        del self._left[load]
        if load is self._running:
            self._choose(boundary_s)

    def pop_ended(self, now_s: float) -> list[Load]:
        """Returns the transfers that have ended by now, each once, in order."""
        self._advance(now_s)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, now_s: float) -> None:
        while self._running is not None and (end_s := self.end_s) <= now_s:
            self._ended.append(self._running)
            del self._left[self._running]
            self._choose(end_s)

    def _choose(self, at_s: float) -> None:
        """Begins the first of the most urgent."""
        self._running = max(self._left, key=lambda load: load.urgency, default=None)
        self._since_s = at_s

    def _interrupt(self, now_s: float) -> None:
        """Chooses anew when the piece under way has ended."""
        assert self._running is not None
        moved, at_s = self._boundary_s(now_s)
        if moved < self._left[self._running]:  # else it is its last, and it ends then anyway
            self._left[self._running] -= moved
            self._choose(at_s)

    def _boundary_s(self, now_s: float) -> tuple[int, float]:
        """Returns the pieces that will have moved once the one under way has ended, and when that is."""
        moved = max(0, math.ceil((now_s - self._since_s) / self.piece_s - EARLY)) if self.piece_s else 0
        return moved, self._since_s + moved * self.piece_s


# Links between tiers, which move experts in pieces, and the rates and costs measured on them.

Wait = Callable[[threading.Condition, float | None], object]  # until notified, or for so many seconds


class TransferListener(Protocol):
    """Receives the ends of copies, on any thread: the loader."""

    def on_arrived(self, load: Transfer) -> None:
        """Takes a copy whose bytes are in place, or ordered before all computation from them."""

    def on_released(self, load: Transfer) -> None:
        """Takes a copy that no longer reads from its source: it has arrived, or was withdrawn."""

    def on_failed(self, load: Transfer, error: Exception) -> None:
        """Takes a copy that failed and no longer reads from its source."""

    def withdraw_prefetch(self, load: Transfer) -> bool:
        """Gives a prefetch up unless it is demanded. Returns whether it did."""

    def on_woken(self, link: TierLink) -> None:
        """Answers `wake`, on the link's thread."""


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

    def wake(self) -> None:
        """Makes the link call `on_woken` soon, on a thread that may take its time."""

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
            gone = load in self._schedule.loads and self._listener.withdraw_prefetch(load)
            if gone:
                self._schedule.drop(load, self._clock())
                self._unfinished -= 1
                self.stats.abort()
                self._copied.pop(load, None)
        if gone:
            self._listener.on_released(load)

    def idle(self) -> bool:
        return not self._unfinished

    has_room = idle  # nothing is lost between two transfers

    def wake(self) -> None:
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
        for load in self._schedule.pop_ended(math.inf):
            self._refuse(load)

    def _bytes_of(self, load: Transfer) -> int:
        return self._target.layout.place(load.slot)[1]

    def _refuse(self, load: Transfer) -> None:
        self._listener.on_failed(load, MissingExpert(load.layer, load.expert, "the link to its device is closed"))

    def _run(self) -> None:
        while not self.closed:
            ended, roused = self._next()
            for load in ended:
                self._finish(load)
            if roused:
                self._listener.on_woken(self)

    def _next(self) -> tuple[list[Transfer], bool]:
        """Waits until transfers have ended or the link was roused; meanwhile copies what is under way."""
        while True:
            with self._changed:
                now_s, roused = self._clock(), self._roused
                self._roused = False
                ended = self._schedule.pop_ended(now_s)
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
            self._listener.on_arrived(load)
            self._listener.on_released(load)
        else:
            self._listener.on_failed(load, error)
