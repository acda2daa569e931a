"""Links from RAM to devices: their interface, and the emulated link, which moves experts in pieces at a stated rate."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from edgemoe.errors import MissingExpert
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotTransfer
from edgemoe.experts.transfer.link_stats import Clock, LinkStats

PIECE_BYTES = 256 << 10  # least size of one of several pieces; each is below twice that
EARLY = 1e-6  # share of a piece: this close to its start, it has not begun


def pieces_of(size_bytes: float) -> int:
    """Returns the number of pieces that `size_bytes` are moved in."""
    return max(1, int(size_bytes // PIECE_BYTES))


class LinkTransfer(Protocol):
    """A load that is moved over a link."""

    @property
    def urgency(self) -> int:
        """Its rank: a load overtakes loads of lower urgency. It may grow while the load waits."""


Load = TypeVar("Load", bound=LinkTransfer)


class PieceSchedule(Generic[Load]):
    """Orders the transfers of a link that takes `piece_s` for each of the `pieces` of a largest expert.

    A demand overtakes a prefetch, and a prefetch for the next layers overtakes one for later, between two pieces. The
    pieces that have arrived count when the load continues. The caller passes the time.
    """

    def __init__(self, pieces: int, piece_s: float) -> None:
        self.pieces, self.piece_s = pieces, piece_s
        self._left: dict[Load, float] = {}  # pieces still to move, in the order of arrival
        self._ended: list[Load] = []  # ended loads that `pop_ended` has not returned yet
        self._running: Load | None = None
        self._since_s = 0.0  # when the remaining pieces of the running load begin to move

    @property
    def running(self) -> Load | None:
        """The load that moves, or will move after the piece under way."""
        return self._running

    @property
    def loads(self) -> list[Load]:
        """The loads that have not arrived, in the order of `add`."""
        return list(self._left)

    @property
    def end_s(self) -> float:
        """When the next transfer ends if no load is added; inf if none is under way."""
        if self._running is None:
            return math.inf
        return self._since_s + self._left[self._running] * self.piece_s

    def add(self, load: Load, now_s: float, share: float = 1.0) -> None:
        """Adds a transfer. It waits for the piece under way of a less urgent load, and for loads of equal urgency.

        `share` is its size relative to the largest experts.
        """
        self._advance(now_s)
        self._left[load] = self.pieces * share
        if self._running is None:
            self._choose(max(now_s, self._since_s))
        elif load.urgency > self._running.urgency:
            self._interrupt(now_s)

    def drop(self, load: Load, now_s: float) -> None:
        """Removes a transfer that is in `loads`; its piece under way still ends."""
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
        """Begins the first of the most urgent loads."""
        self._running = max(self._left, key=lambda load: load.urgency, default=None)
        self._since_s = at_s

    def _interrupt(self, now_s: float) -> None:
        """Lets the next load begin when the piece under way has ended."""
        assert self._running is not None
        moved, at_s = self._boundary_s(now_s)
        if moved < self._left[self._running]:  # else it is its last, and it ends then anyway
            self._left[self._running] -= moved
            self._choose(at_s)

    def _boundary_s(self, now_s: float) -> tuple[int, float]:
        """Returns the pieces moved when the piece under way has ended, and the time of that end."""
        moved = max(0, math.ceil((now_s - self._since_s) / self.piece_s - EARLY)) if self.piece_s else 0
        return moved, self._since_s + moved * self.piece_s


# Links between tiers, which move experts in pieces, and the rates and costs measured on them.

Wait = Callable[[threading.Condition, float | None], object]  # waits until notified, or for the seconds given


class TransferListener(Protocol):
    """Receives the ends of copies, on any thread. The loader implements it."""

    def on_arrived(self, load: SlotTransfer) -> None:
        """Handles a copy whose bytes are in place, or ordered before all computation from them."""

    def on_released(self, load: SlotTransfer) -> None:
        """Handles a copy that no longer reads from its source: it has arrived, or was withdrawn."""

    def on_failed(self, load: SlotTransfer, error: Exception) -> None:
        """Handles a copy that failed and no longer reads from its source."""

    def withdraw_prefetch(self, load: SlotTransfer) -> bool:
        """Withdraws a prefetch unless it is demanded. Returns whether it was withdrawn."""

    def on_woken(self, link: TierLink) -> None:
        """Runs after `wake`, on the link's thread."""


class TierLink(Protocol):
    """Copies experts from RAM to one device; a demand waits for one piece of a prefetch at most.

    A piece is a part of an expert on the emulated link, and an expert on a GPU. A prefetch that is demanded while
    queued or under way is a demand from then on.
    """

    stats: LinkStats
    at_once: bool  # beginning a copy is fast enough for any thread

    def attach(self, listener: TransferListener) -> None:
        """Sets the listener for the ends of copies. Called once, before the first copy."""

    def copy(self, load: SlotTransfer) -> None:
        """Queues one copy from `load.source` of RAM to `load.slot`; demanded ones overtake the others."""

    def withdraw(self, load: SlotTransfer) -> None:
        """Ends a prefetch that has not arrived, if the listener withdraws it. On the link's thread."""

    def idle(self) -> bool:
        """Whether no copy is queued or under way."""

    def has_room(self) -> bool:
        """Whether another prefetch may begin before the ones under way end, to keep the link busy."""

    def wake(self) -> None:
        """Makes the link call `on_woken` soon, on a thread that may block."""

    @property
    def piece_s(self) -> float:
        """The seconds of a piece, the most that a prefetch delays a demand; 0 until measured."""

    def close(self) -> None:
        """Ends the link; copies that have not arrived fail."""


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
        """Emulates largest experts of `expert_bytes` if given, independent of the bytes really copied."""
        self.stats = LinkStats(clock)
        self._source, self._target = source, target
        self._largest_bytes = target.layout.classes.bytes[-1]
        size_bytes = expert_bytes or self._largest_bytes
        self._expert_s, pieces = size_bytes / bytes_per_s, pieces_of(size_bytes)
        self._schedule = PieceSchedule[SlotTransfer](pieces, self._expert_s / pieces)
        self._copied: dict[SlotTransfer, int] = {}  # bytes in the target; like `_errors`, for the link's thread only
        self._errors: dict[SlotTransfer, Exception] = {}
        self._clock, self._wait = clock, wait
        self._changed = threading.Condition()  # the lock of schedule and counts
        self._unfinished = 0  # copies whose end the listener has not received
        self._roused = False
        self.closed = False
        self._thread = threading.Thread(target=self._run, name="edgemoe-link", daemon=True)

    def attach(self, listener: TransferListener) -> None:
        self._listener = listener
        self._thread.start()

    def copy(self, load: SlotTransfer) -> None:
        with self._changed:
            if not self.closed:
                self._schedule.add(load, self._clock(), self._bytes_of(load) / self._largest_bytes)
                self._unfinished += 1
                self.stats.begin()
                self._changed.notify()
                return
        self._refuse(load)

    def withdraw(self, load: SlotTransfer) -> None:
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

    def _bytes_of(self, load: SlotTransfer) -> int:
        return self._target.layout.place(load.slot)[1]

    def _refuse(self, load: SlotTransfer) -> None:
        self._listener.on_failed(load, MissingExpert(load.layer, load.expert, "the link to its device is closed"))

    def _run(self) -> None:
        while not self.closed:
            ended, roused = self._next()
            for load in ended:
                self._finish(load)
            if roused:
                self._listener.on_woken(self)

    def _next(self) -> tuple[list[SlotTransfer], bool]:
        """Waits until transfers have ended or `wake` was called; meanwhile copies the bytes of the running load."""
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
            self._copy_some(load)  # without the lock, and few bytes, so that new loads are seen soon

    def _copy_some(self, load: SlotTransfer) -> None:
        first = self._copied.get(load, 0)
        part = slice(first, first + 2 * PIECE_BYTES)
        try:
            self._target.slot(load.slot)[part] = self._source.slot(load.source)[part]
        except Exception as error:  # waiting layer-steps must get an answer in any case
            self._errors[load] = error
        self._copied[load] = first + 2 * PIECE_BYTES

    def _finish(self, load: SlotTransfer) -> None:
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
