"""Copies experts to an NVIDIA GPU, each whole, and orders copies and computations by slot. Pins the source memory.

A computation waits, on the GPU, for the copies into its slots and for no other. A slot's next copy waits for the last
computation that read it. So a copy counts as arrived once it is issued; the GPU's own clock tells how long it took.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from edgemoe.errors import MissingExpert
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotTransfer
from edgemoe.experts.transfer.link_stats import LinkStats
from edgemoe.experts.transfer.links import TransferListener
from edgemoe.types.arrays import IntArray
from edgemoe.types.size_classes import SlabLayout

log = logging.getLogger(__name__)

MAPPED_PORTABLE = 3  # cudaHostRegisterMapped | cudaHostRegisterPortable: kernels of all devices may read it
POPULATE_WRITE = 23  # of madvise, since Linux 5.14: finds the pages, without a call for each
SLICE_BYTES = 512 << 20
THREADS = 4


def ignore_progress(share: float) -> None:
    """Does nothing with the share that is done."""


class PinnedSlab:
    """Keeps a slab registered until `release`, unless somebody else has registered it.

    If CUDA refuses, earlier registrations stay. Copies from the rest still work, but slower.
    """

    def __init__(
        self, slab: HostSlab, device: torch.device, progress: Callable[[float], None] = ignore_progress
    ) -> None:
        self._slab, self._device, self._progress = slab, device, progress
        self._lock = threading.Lock()  # of all that follows
        self._slices: list[tuple[int, int]] = []  # address and bytes of each registration
        self._code = 0  # of CUDA's refusal
        if not slab.pinned:
            self._register()

    def release(self) -> None:
        """Ends the registrations. No copy may be under way."""
        if self._slices:
            self._slab.pinned = False
        for address, _ in self._slices:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._slices.clear()

    def _register(self) -> None:
        began_s, size_bytes = time.monotonic(), self._slab.size_bytes
        _raise_limit()
        each = max(1, SLICE_BYTES // self._slab.layout.extent_bytes) * self._slab.layout.extent_bytes
        slices = [(self._slab.address + start, min(each, size_bytes - start)) for start in range(0, size_bytes, each)]
        threads = min(THREADS, len(os.sched_getaffinity(0)), len(slices))
        with ThreadPoolExecutor(threads, "edgemoe-pin") as pool:
            list(pool.map(self._register_slice, slices))
        self._slab.pinned = not self._code
        pinned_bytes = sum(size for _, size in self._slices)
        fields = {"bytes": pinned_bytes, "of": size_bytes, "seconds": round(time.monotonic() - began_s, 3)}
        if self._code:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            log.warning(
                "RAM for experts is not all pinned, copies of the rest are slow; lower memory.ram_bytes, or raise the "
                "limit of locked memory (LimitMEMLOCK, ulimit -l)",
                extra={**fields, "cuda_error": self._code, "memlock": limit},
            )
        else:
            log.info("RAM for experts is pinned", extra=fields)

    def _register_slice(self, part: tuple[int, int]) -> None:
        if self._code:
            return  # the next slice would be refused for the same reason
        ctypes.CDLL(None).madvise(ctypes.c_void_p(part[0]), ctypes.c_size_t(part[1]), POPULATE_WRITE)
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(*part, MAPPED_PORTABLE))  # type: ignore[no-untyped-call]
        with self._lock:
            if code:
                self._code = code
                return
            self._slices.append(part)
            self._progress(sum(size for _, size in self._slices) / self._slab.size_bytes)


def _raise_limit() -> None:
    """Lets this process lock as much memory as its hard limit allows."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


# Copies experts to an NVIDIA GPU, each whole, in an order that computations on it keep to.


ROUSE, CLOSE = "rouse", "close"  # messages to the link's thread besides copies
MARKS = 64  # computations remembered; instead of an older one, the oldest remembered is waited for
BESIDE = 4  # copies that ended last, beside which another may have been under way
AHEAD = 2  # copies of prefetches in flight at least: while one moves, the thread issues the next
AHEAD_BYTES = 4 << 20  # and more small ones up to these bytes: 80 us on a link of 50 GB/s, in which the thread wakes


class SlotOrder:
    """Orders copies and computations on the GPU by slot. The compute thread computes, any thread copies.

    A computation pins its slots until `computed`. A CUDA graph pins none and may read every slot. So it is launched
    under `lock`, and so is each copy issued: before the launch looks where experts lie, or after its `computed`.
    """

    def __init__(self, slots: int) -> None:
        self.lock = threading.Lock()
        self._copies: dict[int, torch.cuda.Event] = {}  # slot -> a copy that no computation has waited for
        self._readers: IntArray = np.zeros(slots, np.int64)  # number of the last computation that read each slot
        self._computed = 0
        self._marks = [torch.cuda.Event() for _ in range(MARKS)]  # type: ignore[no-untyped-call]

    def before_copy(self, slot: int, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait for the last copy into the slot and for the last computation that reads it."""
        if (copy := self._copies.get(slot)) is not None:
            stream.wait_event(copy)
        if reader := self._readers.item(slot):
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

    def under_way(self) -> list[int]:
        """Returns slots whose copies have not ended. Called under `lock`."""
        for slot, copy in list(self._copies.items()):
            if copy.query():  # type: ignore[no-untyped-call]
                self._copies.pop(slot, None)
        return list(self._copies)

    def computed(self, slots: list[int] | IntArray, stream: torch.cuda.Stream) -> None:
        """Marks the end of a computation that reads the slots."""
        number = self._computed + 1
        self._marks[number % MARKS].record(stream)
        self._readers[slots] = number
        self._computed = number

    def launched(self, slots: IntArray, device: torch.device) -> None:
        """Marks the end of a graph's computation. Called under `lock`."""
        self.computed(slots, torch.cuda.current_stream(device))


class CopyFlight(NamedTuple):
    """A copy in flight, between two moments on the GPU."""

    load: SlotTransfer
    size_bytes: int
    urgent: bool  # was demanded when it was issued
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaLink:
    """Copies experts from RAM to one GPU. Implements `TierLink`; a thread of its own notices when copies end.

    An expert is one copy: in 256 KiB each, a link of 54 GB/s carries 12. A demanded copy is issued at once. Prefetches
    wait for demands to end, and for each other beyond `AHEAD` copies and `AHEAD_BYTES`.
    """

    at_once = False

    def __init__(
        self,
        source: HostSlab,
        slab: torch.Tensor,
        layout: SlabLayout,
        order: SlotOrder,
        progress: Callable[[float], None] = ignore_progress,
    ) -> None:
        """Copies into `slab`, uint8, cut as `layout` says. Pins the source, if nobody has; `progress` takes a share."""
        self.stats = LinkStats()
        self._source, self._slab, self._layout, self._order = source, slab, layout, order
        self._pinning = PinnedSlab(source, slab.device, progress)
        self._streams = tuple(torch.cuda.Stream(slab.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # of all that follows
        self._waiting: list[SlotTransfer] = []
        self._flying = self._flying_bytes = self._urgent = 0  # copies in flight, their bytes, those demanded
        self._closed = self._roused = False
        self._ended: deque[CopyFlight] = deque(maxlen=BESIDE)
        self._ends: SimpleQueue[CopyFlight | str] = SimpleQueue()
        self._thread = threading.Thread(target=self._reap, name="edgemoe-copies", daemon=True)

    def attach(self, listener: TransferListener) -> None:
        self._listener = listener
        self._thread.start()

    def copy(self, load: SlotTransfer) -> None:
        with self._lock:
            self._waiting.append(load)
            self.stats.begin()
        self._go_on()

    def withdraw(self, load: SlotTransfer) -> None:
        with self._lock:
            gone = load in self._waiting and self._listener.withdraw_prefetch(load)
            if gone:
                self._waiting.remove(load)
                self.stats.abort()
        if gone:
            self._listener.on_released(load)

    def idle(self) -> bool:
        with self._lock:  # a copy that is being issued waits no more, and does not fly yet
            return not self._waiting and not self._flying

    def has_room(self) -> bool:
        with self._lock:
            return not self._waiting and self._may_prefetch()

    def wake(self) -> None:
        self._roused = True
        self._ends.put(ROUSE)

    @property
    def piece_s(self) -> float:
        return self.stats.seconds

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._go_on()
        self._ends.put(CLOSE)
        self._thread.join(timeout=10)
        self._pinning.release()

    def _go_on(self) -> None:
        """Issues the copies that can start now, and reports arrived and failed ones to the listener."""
        issued: list[CopyFlight] = []
        failed: list[tuple[SlotTransfer, Exception]] = []
        with self._lock:
            while (load := self._next()) is not None:
                self._waiting.remove(load)
                try:
                    if self._closed:
                        raise MissingExpert(load.layer, load.expert, "the link to its device is closed")
                    issued.append(self._issue(load, load.demand))
                except (RuntimeError, MissingExpert) as error:
                    self.stats.abort()
                    failed.append((load, error))
        for flight in issued:
            self._listener.on_arrived(flight.load)
            self._ends.put(flight)  # not before, so that nobody hears of its end first
        for load, why in failed:
            self._listener.on_failed(load, why)

    def _next(self) -> SlotTransfer | None:
        """Returns the copy to issue now: any while closed, a demanded one, or the most urgent if there is room."""
        if self._closed or not self._waiting:
            return next(iter(self._waiting), None)
        demanded = next((load for load in self._waiting if load.demand), None)
        if demanded is not None or not self._may_prefetch():
            return demanded
        return max(self._waiting, key=lambda load: load.urgency, default=None)

    def _may_prefetch(self) -> bool:
        return not self._urgent and (self._flying < AHEAD or self._flying_bytes < AHEAD_BYTES)

    def _issue(self, load: SlotTransfer, urgent: bool) -> CopyFlight:
        stream = self._streams[urgent]
        into, size_bytes = self._layout.place(load.slot)
        source = self._source.layout.place(load.source)[0]
        with self._order.lock, torch.cuda.stream(stream):
            self._order.before_copy(load.slot, stream)
            start = moment(stream)
            copy_async(self._slab, into, self._source, source, size_bytes, stream)
            end = moment(stream, blocking=True)
            self._order.copied(load.slot, end)
        self._count(1, size_bytes, urgent)
        return CopyFlight(load, size_bytes, urgent, start, end)

    def _count(self, copies: int, size_bytes: int, urgent: bool) -> None:
        self._flying += copies
        self._flying_bytes += copies * size_bytes
        self._urgent += copies * urgent

    def _reap(self) -> None:
        while (message := self._ends.get()) is not CLOSE:
            if not isinstance(message, str):
                self._end(message)
            if self._roused:  # before the next copy's end, which the link would be idle after
                self._roused = False
                self._listener.on_woken(self)

    def _end(self, flight: CopyFlight) -> None:
        seconds = None
        try:
            flight.end.synchronize()
            seconds = self._charged_s(flight)
        except RuntimeError:  # it counts as arrived; a computation from it fails likewise
            log.exception("a copy to the GPU failed")
        with self._lock:
            self._count(-1, flight.size_bytes, flight.urgent)
            if seconds is None:
                self.stats.abort()
            else:
                self.stats.end(flight.size_bytes, seconds)
        self._go_on()  # before the listener, which takes a while, so that the link does not stand idle
        self._listener.on_released(flight.load)

    def _charged_s(self, flight: CopyFlight) -> float:
        """Returns a copy's seconds, less the time shared with one of the last copies."""
        start, others = flight.start, list[tuple[float, float]]()
        end_ms = start.elapsed_time(flight.end)
        for one in self._ended:
            if (other_end_ms := start.elapsed_time(one.end)) > 0:
                others.append((start.elapsed_time(one.start), other_end_ms))
        busy_ms = free_ms = 0.0
        for other_start_ms, other_end_ms in sorted(others):
            busy_ms += max(0.0, min(other_start_ms, end_ms) - free_ms)
            free_ms = max(free_ms, min(other_end_ms, end_ms))
        self._ended.append(flight)
        return float(busy_ms + end_ms - free_ms) / 1e3


def moment(stream: torch.cuda.Stream, *, blocking: bool = False) -> torch.cuda.Event:
    """Returns an event that fires when the stream gets here."""
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def copy_async(
    slab: torch.Tensor, into: int, host: HostSlab, source: int, size_bytes: int, stream: torch.cuda.Stream
) -> None:
    """Queues a copy of bytes of RAM into a slab on the GPU. Raises RuntimeError if the driver refuses.

    Calls the driver while holding the GIL. Otherwise another thread could take it and delay the event behind the copy,
    and the measurement, by up to 5 ms. Memory that is not pinned is copied by torch, which waits.
    """
    if not host.pinned:
        there = slab.view(-1)[into : into + size_bytes]
        there.copy_(torch.from_numpy(host.bytes[source : source + size_bytes]), non_blocking=True)
        return
    code = _driver().cuMemcpyHtoDAsync_v2(slab.data_ptr() + into, host.address + source, size_bytes, stream.cuda_stream)
    if code:
        raise RuntimeError(f"the driver refuses a copy of {size_bytes} bytes to {slab.device}: CUDA error {code}")


def is_readable(host: HostSlab, device: torch.device) -> bool:
    """Returns whether the device's kernels can read the slab, all of it pinned, at the addresses that the CPU uses."""
    if not host.pinned:
        return False  # a warning has said so
    found = ctypes.c_uint64()
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # makes the device this thread's for the driver
            code = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), host.address, 0)
    except (OSError, AttributeError, RuntimeError) as error:
        code = repr(error)
    if code or found.value != host.address:
        log.warning(
            "the GPU cannot read experts in RAM in place; while it lacks some, steps run operation by operation",
            extra={"device": str(device), "cuda_error": code, "address": host.address, "on_device": found.value},
        )
        return False
    return True


@functools.cache
def _driver() -> ctypes.PyDLL:
    driver = ctypes.PyDLL("libcuda.so.1")
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    driver.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    return driver
