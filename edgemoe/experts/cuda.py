"""Experts on an NVIDIA GPU: one slab of slots, copies into it beside the computation, products out of it.

A copy is issued at once on a stream of its own and counts as arrived: whatever computes from its slot first waits,
on the GPU, for that copy's event and no other. A slot's next copy waits likewise for the last computation that
read the old expert, and for the last copy into the slot. The host waits for neither.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from queue import SimpleQueue
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.errors import CapacityError
from edgemoe.experts.arena import ExpertShape, HostArena
from edgemoe.experts.compute import Group
from edgemoe.experts.links import Dock, LinkStats
from edgemoe.experts.pool import Load
from edgemoe.kernels.products import ExpertMath, ExpertSlab, by_products
from edgemoe.types import IntArray

log = logging.getLogger(__name__)

ROUSE, CLOSE = "rouse", "close"  # what the link's thread is told beside copies
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
ROWS = (16, 32, 64)  # calls of one expert that one program takes on
MARKS = 64  # computations remembered; of older ones the oldest remembered is waited for


def open_cuda(kind: str, slots: int, shape: ExpertShape, ram: HostArena) -> tuple[CudaLink, CudaCompute]:
    """Link and arithmetic of device `cuda:N`. Raises CapacityError where the slab does not fit."""
    device = torch.device(kind)
    try:
        slab = torch.empty((slots, shape.stride_bytes), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        raise CapacityError(
            f"{kind} has {free_bytes} bytes free, the slab of its experts takes {slots * shape.stride_bytes}; "
            "lower the device's expert_bytes"
        ) from error
    order = Order(slots)
    return CudaLink(ram, slab, order), CudaCompute(slab, shape, order)


class Order:
    """Which GPU work waits for which, slot by slot. The compute thread computes, any thread copies."""

    def __init__(self, slots: int) -> None:
        self._copies: dict[int, torch.cuda.Event] = {}  # slot -> a copy that no computation has waited for
        self._readers = [0] * slots  # number of the last computation that read each slot
        self._computed = 0
        self._marks = [torch.cuda.Event() for _ in range(MARKS)]  # type: ignore[no-untyped-call]

    def before_copy(self, slot: int, stream: torch.cuda.Stream) -> None:
        """What `stream` copies into the slot from here on waits for what was in it."""
        if (copy := self._copies.get(slot)) is not None:
            stream.wait_event(copy)
        if reader := self._readers[slot]:
            stream.wait_event(self._marks[reader % MARKS])  # of that computation or a later one

    def copied(self, slot: int, copy: torch.cuda.Event) -> None:
        self._copies[slot] = copy

    def before_compute(self, slots: list[int], stream: torch.cuda.Stream) -> None:
        """What `stream` computes from the slots from here on waits for the copies into them."""
        if self._copies:
            for slot in slots:
                if (copy := self._copies.pop(slot, None)) is not None:
                    stream.wait_event(copy)

    def computed(self, slots: list[int], stream: torch.cuda.Stream) -> None:
        number = self._computed + 1
        self._marks[number % MARKS].record(stream)
        for slot in slots:
            self._readers[slot] = number
        self._computed = number


class CudaLink:
    """RAM -> one GPU. Implements `Link`; a thread of its own notices when copies end."""

    def __init__(self, source: HostArena, slab: torch.Tensor, order: Order) -> None:
        self.stats = LinkStats()
        self._source, self._slab, self._order = source, slab, order
        _pin(source)
        self._host = torch.from_numpy(source.slab)
        self._streams = tuple(torch.cuda.Stream(slab.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._flying = 0
        self._ends: SimpleQueue[tuple[Load, torch.cuda.Event] | str] = SimpleQueue()
        self._thread = threading.Thread(target=self._reap, name="edgemoe-copies", daemon=True)

    def attach(self, dock: Dock) -> None:
        self._dock = dock
        self._thread.start()

    def copy(self, load: Load) -> None:
        try:
            end = self._issue(load)
        except RuntimeError as error:
            self._dock.failed(load, error)
            return
        self._dock.arrived(load)
        self._ends.put((load, end))

    def idle(self) -> bool:
        return not self._flying

    def rouse(self) -> None:
        self._ends.put(ROUSE)

    def close(self) -> None:
        self._ends.put(CLOSE)
        self._thread.join(timeout=10)
        _unpin(self._source)

    def _issue(self, load: Load) -> torch.cuda.Event:
        stream = self._streams[load.demand]
        with self._lock, torch.cuda.stream(stream):
            self._order.before_copy(load.slot, stream)
            self._slab[load.slot].copy_(self._host[load.source], non_blocking=True)
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(stream)
            self._order.copied(load.slot, end)
            self._flying += 1
            self.stats.begin()
        return end

    def _reap(self) -> None:
        while (flight := self._ends.get()) is not CLOSE:
            if isinstance(flight, str):
                self._dock.roused(self)
            else:
                self._end(*flight)

    def _end(self, load: Load, end: torch.cuda.Event) -> None:
        try:
            end.synchronize()
        except RuntimeError:
            log.exception("a copy to the GPU failed")
        with self._lock:
            self._flying -= 1
            self.stats.end(self._source.stride_bytes)
        self._dock.released(load)


class CudaCompute:
    """Experts computed where they lie in the slab, by one kernel for all of them, else by torch's products."""

    def __init__(self, slab: torch.Tensor, shape: ExpertShape, order: Order) -> None:
        self._shape, self._order = shape, order
        self._slab = ExpertSlab(slab, shape.hidden, shape.width, shape.bf16)
        self._fused = _fused(slab, shape)

    def begin(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden.to(self._slab.device, non_blocking=True).contiguous()
        rows = len(hidden) * self._shape.top_k if self._fused else len(hidden)
        self._out = torch.zeros((rows, self._shape.hidden), dtype=torch.float32, device=self._slab.device)

    def add(self, slots: IntArray, group: Group) -> None:
        stream, read = torch.cuda.current_stream(self._slab.device), slots.tolist()
        self._order.before_compute(read, stream)
        if self._fused is None:
            by_products(self._slab, slots, group.offsets, group.tokens, group.weights, self._hidden, self._out)
        else:
            self._fused.add(slots, group, self._hidden, self._out)
        self._order.computed(read, stream)

    def end(self) -> torch.Tensor:
        if self._fused is None:
            return self._out
        return self._out.view(len(self._hidden), self._shape.top_k, -1).sum(1)

    def twin(self, math: ExpertMath) -> Self:
        return copy.copy(self)  # a thread's own hidden states and sums; all threads use the device's default stream


class Fused:
    """Two kernels for all experts of a layer. Writes each call's output to a row of its own, [T * k, H]."""

    def __init__(self, slab: torch.Tensor, shape: ExpertShape) -> None:
        """Compiles for all sizes of batches. Raises what Triton raises where it cannot."""
        from edgemoe.kernels import gpu_experts

        self._experts = gpu_experts.experts
        self._slab = slab.view(torch.bfloat16 if shape.bf16 else torch.float32).view(-1)
        self._sizes = (shape.top_k, shape.hidden, shape.width, shape.stride_bytes // shape.item_bytes)
        hidden = torch.zeros((1, shape.hidden), dtype=self._slab.dtype, device=slab.device)
        for calls in ROWS:
            repeated = np.zeros(calls, np.int64)  # one token's one call, again and again
            group = Group(repeated[:1], np.array([0, calls]), repeated, repeated, np.zeros(calls, np.float32))
            self.add(repeated[:1], group, hidden, torch.zeros((shape.top_k, shape.hidden), device=slab.device))

    def add(self, slots: IntArray, group: Group, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the weighted outputs of the group's calls."""
        rows = _rows(int(np.diff(group.offsets).max()))
        blocks = blocks_of(slots, group.offsets, rows)
        parts = [blocks.ravel(), group.calls.astype(np.int32), group.weights.view(np.int32)]
        starts = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)])  # 16-byte aligned, as Triton likes it
        packed = np.zeros(starts[-1], np.int32)
        for start, part in zip(starts, parts, strict=False):
            packed[start : start + len(part)] = part
        there = torch.from_numpy(packed).to(hidden.device, non_blocking=True)
        on_gpu = [there[start : start + len(part)] for start, part in zip(starts.tolist(), parts, strict=False)]
        with torch.cuda.device(hidden.device):
            self._experts(
                hidden,
                self._slab,
                out,
                on_gpu[0].view(-1, 3),
                on_gpu[1],
                on_gpu[2].view(torch.float32),
                self._sizes,
                rows,
            )


def blocks_of(slots: IntArray, offsets: IntArray, rows: int) -> npt.NDArray[np.int32]:
    """The calls of each slot cut into blocks of at most `rows`: slot, first call, last call + 1, [B, 3]."""
    counts = -(-np.diff(offsets) // rows)
    expert = np.repeat(np.arange(len(slots)), counts)
    within = np.arange(len(expert)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = offsets[expert] + within * rows
    return np.stack([slots[expert], first, np.minimum(first + rows, offsets[expert + 1])], axis=1).astype(np.int32)


def _rows(calls: int) -> int:
    """Rows of a block where an expert has at most so many calls."""
    return next((rows for rows in ROWS if calls <= rows), ROWS[-1])


def _fused(slab: torch.Tensor, shape: ExpertShape) -> Fused | None:
    try:
        return Fused(slab, shape)
    except Exception as error:  # no Triton, no C compiler, an unknown GPU: whatever it is, torch can do the work
        log.warning("experts run without the fused GPU kernel", extra={"error": repr(error)})
        return None


def _pin(arena: HostArena) -> None:
    """Registers the arena for DMA, exactly as it lies; where that is refused, copies go on, slower."""
    if arena.pinned:
        return
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(arena.address, arena.size_bytes, PORTABLE))
    arena.pinned = not code
    if code:
        log.warning("RAM for experts is not pinned, copies will be slow", extra={"cuda_error": code})
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error with it, which else the next kernel would report


def _unpin(arena: HostArena) -> None:
    if arena.pinned:
        arena.pinned = False
        torch.cuda.cudart().cudaHostUnregister(arena.address)  # type: ignore[no-untyped-call]
