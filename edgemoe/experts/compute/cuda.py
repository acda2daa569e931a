"""Holds and computes experts on an NVIDIA GPU: a slab of slots, copies into it, and products from it.

A copy is issued at once on a stream of its own and counts as arrived: whatever computes from its slot first waits,
on the GPU, for that copy's event and no other. A slot's next copy waits likewise for the last computation that
read the old expert, and for the last copy into the slot. The host waits for neither: how long copies and computations
took, and how long these waited for those, is read off the GPU's own clock once they have ended.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections import deque
from queue import SimpleQueue
from typing import Self

import torch

from edgemoe.errors import CapacityError, ConfigError
from edgemoe.experts.compute.dispatch import Group, Spent
from edgemoe.experts.compute.gpu_calls import GpuCalls
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import Transfer
from edgemoe.experts.transfer.links import LinkStats, TransferListener
from edgemoe.kernels.cpu.expert_math import ExpertMath
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.peers import work_units

log = logging.getLogger(__name__)

ROUSE, CLOSE = "rouse", "close"  # messages to the link's thread besides copies
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
MARKS = 64  # computations remembered; instead of an older one, the oldest remembered is waited for


def open_cuda(kind: str, slots: int, geometry: ExpertGeometry, ram: HostSlab) -> tuple[CudaLink, CudaCompute]:
    """Returns the link and the computation of device `cuda:N`.

    Raises CapacityError where the slab does not fit, ConfigError where the kernels cannot be compiled.
    """
    device = torch.device(kind)
    try:
        slab = torch.empty((slots, geometry.stride_bytes), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        raise CapacityError(
            f"{kind} has {free_bytes} bytes free, the slab of its experts takes {slots * geometry.stride_bytes}; "
            "lower the device's expert_bytes"
        ) from error
    order = Order(slots)
    return CudaLink(ram, slab, order), CudaCompute(slab, geometry, order)


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
                    began = began or _moment(stream)
                    stream.wait_event(copy)
                    self._copies.pop(slot, None)  # after waiting, because another thread then skips the wait
        return began

    def computed(self, slots: list[int], stream: torch.cuda.Stream) -> None:
        number = self._computed + 1
        self._marks[number % MARKS].record(stream)
        for slot in slots:
            self._readers[slot] = number
        self._computed = number


class CudaLink:
    """Copies experts from RAM to one GPU. Implements `TierLink`; a thread of its own notices when copies end."""

    def __init__(self, source: HostSlab, slab: torch.Tensor, order: Order) -> None:
        self.stats = LinkStats()
        self._source, self._slab, self._order = source, slab, order
        _pin(source)
        self._host = torch.from_numpy(source.slab)
        self._streams = tuple(torch.cuda.Stream(slab.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._flying = 0
        self._last: torch.cuda.Event | None = None  # the end of the last copy that ended
        self._ends: SimpleQueue[tuple[Transfer, torch.cuda.Event, torch.cuda.Event] | str] = SimpleQueue()
        self._thread = threading.Thread(target=self._reap, name="edgemoe-copies", daemon=True)

    def attach(self, listener: TransferListener) -> None:
        self._listener = listener
        self._thread.start()

    def copy(self, load: Transfer) -> None:
        try:
            start, end = self._issue(load)
        except RuntimeError as error:
            self._listener.failed(load, error)
            return
        self._listener.arrived(load)
        self._ends.put((load, start, end))

    def idle(self) -> bool:
        return not self._flying

    @property
    def piece_s(self) -> float:
        return self.stats.seconds  # a copy is issued whole

    def withdraw(self, load: Transfer) -> None:
        """Does nothing: what is issued cannot be taken back."""

    def rouse(self) -> None:
        self._ends.put(ROUSE)

    def close(self) -> None:
        self._ends.put(CLOSE)
        self._thread.join(timeout=10)
        _unpin(self._source)

    def _issue(self, load: Transfer) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Issues the copy. Returns the events of its start and end."""
        stream = self._streams[load.demand]
        with self._lock, torch.cuda.stream(stream):
            self._order.before_copy(load.slot, stream)
            start = _moment(stream)
            self._slab[load.slot].copy_(self._host[load.source], non_blocking=True)
            end = _moment(stream, blocking=True)
            self._order.copied(load.slot, end)
            self._flying += 1
            self.stats.begin()
        return start, end

    def _reap(self) -> None:
        while (flight := self._ends.get()) is not CLOSE:
            if isinstance(flight, str):
                self._listener.roused(self)
            else:
                self._end(*flight)

    def _end(self, load: Transfer, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        try:
            end.synchronize()
            seconds = self._charged_s(start, end)
        except RuntimeError:
            log.exception("a copy to the GPU failed")
            seconds = None
        with self._lock:
            self._flying -= 1
            if seconds is None:
                self.stats.abort()
            else:
                self.stats.end(self._source.stride_bytes, seconds)
        self._listener.released(load)

    def _charged_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the copy's seconds; where copies overlap, the time since the one before it ended."""
        milliseconds = [start.elapsed_time(end)]
        if self._last is not None:
            milliseconds.append(self._last.elapsed_time(end))
        self._last = end
        return max(0.0, float(min(milliseconds))) / 1e3


class CudaCompute:
    """Computes experts in place in the slab, by two kernels for all experts of a layer."""

    def __init__(self, slab: torch.Tensor, geometry: ExpertGeometry, order: Order) -> None:
        """Compiles the kernels. Raises ConfigError where that fails."""
        self._geometry, self._order, self._device = geometry, order, slab.device
        self._timed: deque[tuple[float, list[torch.cuda.Event]]] = deque(maxlen=MARKS)  # units, and moments
        try:
            self._fused = GpuCalls(slab, geometry)
        except Exception as error:  # no Triton, no C compiler, or too old a GPU; `error` says which
            raise ConfigError(
                f"the experts' kernels cannot be compiled for {slab.device}: {error!r}; install the Triton that this "
                "torch asks for and a C compiler, or take the GPU out of `devices`"
            ) from error

    def begin(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden.to(self._device, non_blocking=True).contiguous()
        rows = len(hidden) * self._geometry.top_k
        self._out = torch.zeros((rows, self._geometry.hidden), dtype=torch.float32, device=self._device)

    def add(self, slots: IntArray, group: Group) -> None:
        stream, read = torch.cuda.current_stream(self._device), slots.tolist()
        began = self._order.before_compute(read, stream)
        ready = began and _moment(stream)
        self._fused.add(slots, group, self._hidden, self._out)
        self._order.computed(read, stream)
        if began and ready:
            self._timed.append((float(work_units(group.offsets).sum()), [began, ready, _moment(stream)]))

    def end(self) -> torch.Tensor:
        return self._out.view(len(self._hidden), self._geometry.top_k, -1).sum(1)

    def spent(self) -> Spent:
        units = waited_s = computed_s = 0.0
        while self._timed and self._timed[0][1][-1].query():  # type: ignore[no-untyped-call]
            more, (began, ready, ended) = self._timed.popleft()
            units += more
            waited_s += began.elapsed_time(ready) / 1e3
            computed_s += ready.elapsed_time(ended) / 1e3
        return Spent(units, waited_s, computed_s)

    def twin(self, math: ExpertMath) -> Self:
        twin = copy.copy(self)  # with hidden states and sums of its own; all threads use the device's default stream
        twin._timed = deque(maxlen=MARKS)
        return twin


def _moment(stream: torch.cuda.Stream, *, blocking: bool = False) -> torch.cuda.Event:
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
