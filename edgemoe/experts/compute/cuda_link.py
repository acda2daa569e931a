"""Copies experts to an NVIDIA GPU, in pieces, in an order that computations on it keep to.

Whatever computes from a slot first waits, on the GPU, for the last piece of its copy and for no other. So a copy counts
as arrived when that piece is issued. A slot's next copy waits likewise for the last computation that read the old
expert, and for what was copied into the slot before. How long copies took is read off the GPU's own clock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import torch

from edgemoe.errors import MissingExpert
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import Transfer
from edgemoe.experts.transfer.links import LinkStats, TransferListener
from edgemoe.experts.transfer.pieces import pieces_of
from edgemoe.types.size_classes import SlabLayout

log = logging.getLogger(__name__)

ROUSE, CLOSE = "rouse", "close"  # messages to the link's thread besides pieces
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
MARKS = 64  # computations remembered; instead of an older one, the oldest remembered is waited for
AHEAD = 2  # pieces of prefetches in flight: while one moves, the thread issues the next


class Order:
    """Orders copies and computations on the GPU by slot. The compute thread computes, any thread copies."""

    def __init__(self, slots: int) -> None:
        self._copies: dict[int, torch.cuda.Event] = {}  # slot -> a copy that no computation has waited for
        self._readers = [0] * slots  # number of the last computation that read each slot
        self._computed = 0
        self._marks = [torch.cuda.Event() for _ in range(MARKS)]  # type: ignore[no-untyped-call]

    def before_copy(self, slot: int, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait for the last copy into the slot and for the last computation that reads it."""
        if (copy := self._copies.get(slot)) is not None:
            stream.wait_event(copy)
        if reader := self._readers[slot]:
            stream.wait_event(self._marks[reader % MARKS])  # of that computation or a later one

    def copied(self, slot: int, copy: torch.cuda.Event) -> None:
        self._copies[slot] = copy

    def before_compute(self, slots: list[int], stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """Makes `stream` wait for the copies into the slots.

        Returns the event at which the wait begins; None where there is nothing to wait for.
        """
        began = None
        if self._copies:
            for slot in slots:
                if (copy := self._copies.get(slot)) is not None:
                    began = began or moment(stream)
                    stream.wait_event(copy)
                    self._copies.pop(slot, None)  # after waiting, because another thread then skips the wait
        return began

    def computed(self, slots: list[int], stream: torch.cuda.Stream) -> None:
        number = self._computed + 1
        self._marks[number % MARKS].record(stream)
        for slot in slots:
            self._readers[slot] = number
        self._computed = number


@dataclass(slots=True, eq=False)
class CopyFlight:
    """A copy on its way."""

    load: Transfer
    urgent: bool = False  # was demanded when its last piece was issued
    issued_bytes: int = 0
    flying: int = 0  # pieces that are issued and have not ended
    seconds: float = 0.0  # of the pieces that have
    over: bool = False  # nothing more will be issued
    given_up: bool = False
    error: Exception | None = None


class IssuedPiece(NamedTuple):
    """A part of a copy, between two moments on the GPU."""

    flight: CopyFlight
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaLink:
    """Copies experts from RAM to one GPU. Implements `TierLink`; a thread of its own notices when pieces end.

    Of prefetches at most `AHEAD` pieces are in flight, and none is issued while a demand is. What is demanded is issued
    as one last piece, however much is left of it: nothing overtakes it, and the link need not wait for the thread.
    """

    at_once = False

    def __init__(self, source: HostSlab, slab: torch.Tensor, layout: SlabLayout, order: Order) -> None:
        """Copies into `slab`, uint8, cut as `layout` says."""
        self.stats = LinkStats()
        self._source, self._slab, self._layout, self._order = source, slab, layout, order
        largest_bytes = layout.classes.bytes[-1]
        pieces = pieces_of(largest_bytes)
        self._pieces, self._piece_bytes = pieces, -(-largest_bytes // pieces)
        _pin(source)
        self._host = torch.from_numpy(source.bytes)
        self._streams = tuple(torch.cuda.Stream(slab.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # of all that follows
        self._flights: list[CopyFlight] = []
        self._closed = False
        self._last: torch.cuda.Event | None = None  # the end of the last piece that ended
        self._ends: SimpleQueue[IssuedPiece | str] = SimpleQueue()
        self._thread = threading.Thread(target=self._reap, name="edgemoe-copies", daemon=True)

    def attach(self, listener: TransferListener) -> None:
        self._listener = listener
        self._thread.start()

    def copy(self, load: Transfer) -> None:
        with self._lock:
            self._flights.append(CopyFlight(load))
            self.stats.begin()
        self._go_on()

    def withdraw(self, load: Transfer) -> None:
        with self._lock:
            for flight in self._flights:
                if flight.load is load and not flight.over and self._listener.withdraws(load):
                    flight.over = flight.given_up = True
        self._go_on()

    def idle(self) -> bool:
        return not self._flights

    def rouse(self) -> None:
        self._ends.put(ROUSE)

    @property
    def piece_s(self) -> float:
        return self.stats.seconds / self._pieces

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._go_on()
        self._ends.put(CLOSE)
        self._thread.join(timeout=10)
        _unpin(self._source)

    def _go_on(self) -> None:
        """Issues what can be issued now, and tells the listener of copies that have arrived or ended."""
        with self._lock:
            pieces: list[IssuedPiece] = []
            ended = self._take_ended()
            arrived = self._issue_next(pieces)
            ended += self._take_ended()  # what could not be issued
        for flight in arrived:
            self._listener.arrived(flight.load)
        for piece in pieces:  # not before, so that nobody hears of an end first
            self._ends.put(piece)
        for flight in ended:
            if flight.error is not None and not flight.given_up:
                self._listener.failed(flight.load, flight.error)
            else:
                self._listener.released(flight.load)

    def _take_ended(self) -> list[CopyFlight]:
        ended = [flight for flight in self._flights if flight.over and not flight.flying]
        for flight in ended:
            self._flights.remove(flight)
            if flight.error is not None or flight.given_up:
                self.stats.abort()
            else:
                self.stats.end(self._bytes_of(flight.load), flight.seconds)
        return ended

    def _issue_next(self, pieces: list[IssuedPiece]) -> list[CopyFlight]:
        """Issues the rest of what is demanded; where nothing is, pieces of prefetches. Returns what is complete."""
        waiting = [flight for flight in self._flights if not flight.over]
        for flight in waiting:
            if self._closed:
                load = flight.load
                flight.over = True
                flight.error = MissingExpert(load.layer, load.expert, "the link to its device is closed")
            elif flight.load.demand:
                flight.urgent = True
                self._issue(flight, self._bytes_of(flight.load), pieces)
        if not any(flight.urgent for flight in self._flights):
            flying = sum(flight.flying for flight in self._flights)
            for flight in sorted(waiting, key=lambda flight: -flight.load.urgency):
                while not flight.over and flying < AHEAD:
                    self._issue(flight, flight.issued_bytes + self._piece_bytes, pieces)
                    flying += 1
        return [flight for flight in waiting if flight.over and flight.error is None]

    def _issue(self, flight: CopyFlight, to_bytes: int, pieces: list[IssuedPiece]) -> None:
        """Issues the next piece, up to `to_bytes` of the expert."""
        load, stream = flight.load, self._streams[flight.urgent and not flight.issued_bytes]
        into, size_bytes = self._layout.place(load.slot)
        source, first, end_bytes = (
            self._source.layout.place(load.source)[0],
            flight.issued_bytes,
            min(to_bytes, size_bytes),
        )
        try:
            with torch.cuda.stream(stream):
                if not flight.issued_bytes:
                    self._order.before_copy(load.slot, stream)
                start = moment(stream)
                part = self._host[source + first : source + end_bytes]
                self._slab[into + first : into + end_bytes].copy_(part, non_blocking=True)
                end = moment(stream, blocking=True)
        except RuntimeError as error:
            flight.over, flight.error = True, error
            return
        self._order.copied(load.slot, end)
        flight.issued_bytes, flight.over = end_bytes, end_bytes == size_bytes
        flight.flying += 1
        pieces.append(IssuedPiece(flight, start, end))

    def _bytes_of(self, load: Transfer) -> int:
        return self._layout.place(load.slot)[1]

    def _reap(self) -> None:
        while (message := self._ends.get()) is not CLOSE:
            if isinstance(message, str):
                self._listener.roused(self)
            else:
                self._end(message)

    def _end(self, piece: IssuedPiece) -> None:
        flight, seconds, failure = piece.flight, 0.0, None
        try:
            piece.end.synchronize()
            seconds = self._charged_s(piece.start, piece.end)
        except RuntimeError as error:
            log.exception("a copy to the GPU failed")
            failure = error
        with self._lock:
            flight.flying -= 1
            flight.seconds += seconds
            if failure is not None and flight.over:  # it counts as arrived; whoever computes from it fails likewise
                flight.given_up = True
            elif failure is not None:
                flight.over, flight.error = True, failure
        self._go_on()

    def _charged_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the piece's seconds; where pieces overlap, the time since the one before it ended."""
        milliseconds = [start.elapsed_time(end)]
        if self._last is not None:
            milliseconds.append(self._last.elapsed_time(end))
        self._last = end
        return max(0.0, float(min(milliseconds))) / 1e3


def moment(stream: torch.cuda.Stream, *, blocking: bool = False) -> torch.cuda.Event:
    """Returns an event that fires when the stream gets here."""
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _pin(slab: HostSlab) -> None:
    """Registers the slab for DMA in place. Where that is refused, copies still work, but slower."""
    if slab.pinned:
        return
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(slab.address, slab.size_bytes, PORTABLE))
    slab.pinned = not code
    if code:
        log.warning("RAM for experts is not pinned, copies will be slow", extra={"cuda_error": code})
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # clears the error, which the next kernel would report otherwise


def _unpin(slab: HostSlab) -> None:
    if slab.pinned:
        slab.pinned = False
        torch.cuda.cudart().cudaHostUnregister(slab.address)  # type: ignore[no-untyped-call]
