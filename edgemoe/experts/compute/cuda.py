"""Holds and computes experts on an NVIDIA GPU: a slab of slots, and products from it.

A computation waits, on the GPU, for the copies into the slots that it reads (see `cuda_link`); the host waits for
neither. How long computations took, and how long they waited, is read off the GPU's own clock once they have ended.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.errors import CapacityError, ConfigError
from edgemoe.experts.compute.cuda_link import MARKS, CudaLink, SlotOrder, ignore_progress, is_readable, moment
from edgemoe.experts.compute.dispatch import DeviceTimings
from edgemoe.experts.tiers.residency_records import NONE
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.kernels.cpu.expert_math import ExpertMath
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout
from edgemoe.types.step import TokenGroups

log = logging.getLogger(__name__)
ROWS = (16, 32, 64)  # calls of one expert that one program computes
TILE_ROWS = (64, 128)  # the same where there are many of each, in bfloat16
MANY_CALLS = 32  # of an expert, on average: from here on the matrix units are worth it
UNSEEN = -2  # no slot, and not NONE
READ_BYTES_PER_S = 48e9  # that kernels read from RAM; H200 on PCIe 5 x16
LAUNCHES_S = 1.5e-3  # that a layer takes longer operation by operation; there, too


class GpuExpertKernels:
    """Runs two kernels for all experts of a layer. Writes each call's output to a row of its own, [T * k, H].

    In bfloat16, experts that have many calls are computed on the matrix units.
    """

    def __init__(self, slab: torch.Tensor, layout: SlabLayout, geometry: ExpertGeometry) -> None:
        """Compiles the kernels for all block sizes. Raises Triton's errors."""
        from edgemoe.kernels.gpu import expert_blocks as gpu_experts
        from edgemoe.kernels.gpu import expert_tiles

        self._few, self._many = gpu_experts, expert_tiles
        self._slab, self._geometry = slab.view(-1), geometry
        classes = layout.classes.layer_class
        self._first = [layout.first(size_class) for size_class in classes]  # slot, by layer
        self._constants = [
            gpu_experts.constants(geometry, layer, layout.slot_bytes(size_class))
            for layer, size_class in enumerate(classes)
        ]
        dtype = torch.bfloat16 if geometry.bf16 else torch.float32
        hidden = torch.zeros((1, geometry.hidden), dtype=dtype, device=slab.device)
        out = torch.zeros((geometry.top_k, geometry.hidden), device=slab.device)
        one = np.zeros(1, np.int64)
        group, self._tiles = TokenGroups(one, np.array([0, 1]), one, one, np.zeros(1, np.float32)), geometry.bf16
        for layer in {tuple(each.values()): layer for layer, each in enumerate(self._constants)}.values():
            for rows in ROWS:
                self._launch(layer, one + self._first[layer], group, hidden, out, False, rows)
            try:
                for rows in TILE_ROWS if self.may_tile(layer) else ():
                    self._launch(layer, one + self._first[layer], group, hidden, out, True, rows)
            except Exception as error:  # too little shared memory, another release of Triton
                self._tiles = False
                log.warning(
                    "kernels of many tokens cannot be compiled; prompts are computed by those of few, more slowly",
                    extra={"device": str(slab.device), "error": repr(error)},
                )

    def add(self, layer: int, slots: IntArray, group: TokenGroups, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the weighted outputs of the group's calls of a layer."""
        calls = len(group.calls) / len(group.experts)
        tiled = calls > MANY_CALLS and self.may_tile(layer)
        rows = tile_rows(calls) if tiled else block_rows(int(np.diff(group.offsets).max()))
        self._launch(layer, slots, group, hidden, out, tiled, rows)

    def may_tile(self, layer: int) -> bool:
        """Returns whether the experts of a layer can be computed in tiles."""
        return self._tiles and self._many.fits(self._geometry, layer)

    def _launch(
        self,
        layer: int,
        slots: IntArray,
        group: TokenGroups,
        hidden: torch.Tensor,
        out: torch.Tensor,
        tiled: bool,
        rows: int,
    ) -> None:
        blocks = blocks_of(slots - self._first[layer], group.offsets, rows)
        parts = [blocks.ravel(), group.calls.astype(np.int32), group.weights.view(np.int32)]
        starts = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)])  # 16-byte aligned, as Triton likes it
        packed = np.zeros(starts[-1], np.int32)
        for start, part in zip(starts, parts, strict=False):
            packed[start : start + len(part)] = part
        there = torch.from_numpy(packed).to(hidden.device, non_blocking=True)
        on_gpu = [there[start : start + len(part)] for start, part in zip(starts.tolist(), parts, strict=False)]
        cut, calls, shares = on_gpu[0].view(-1, 3), on_gpu[1], on_gpu[2].view(torch.float32)
        compute = self._many.experts_in_tiles if tiled else self._few.experts
        shape = (self._many.tile_shape if tiled else self._few.block_shape)(self._geometry, layer, rows)
        with torch.cuda.device(hidden.device):
            compute(hidden, self._slab, out, cut, calls, shares, self._constants[layer], shape)


class RamExperts(NamedTuple):
    """The experts in RAM that a GPU's kernels can read."""

    slab: HostSlab  # pinned
    where: IntArray  # [L, E] slot of each expert, NONE if missing


class SlotOffsets:
    """Computes where slots of a slab begin, by the size classes of layers."""

    def __init__(self, layout: SlabLayout) -> None:
        classes = layout.classes.layer_class
        self._first: IntArray = np.array([layout.first(which) for which in classes])[:, None]
        self._bytes: IntArray = np.array([layout.slot_bytes(which) for which in classes])[:, None]

    def __call__(self, where: IntArray) -> IntArray:
        """Returns the bytes from the slab's begin to slots [L, E]."""
        return (where - self._first) * self._bytes


class ReachableExperts:
    """Computes experts of few tokens in a GPU's slab, or from RAM in place. Implements `ExpertSlots`.

    An expert that is being copied is read from RAM. Experts may leave their places in RAM meanwhile; `is_intact`
    tells whether they stayed. Each call reads its expert by itself, which costs time if several
    rows share experts of RAM. So a launch of many rows is refused if that takes longer than operations one by one.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        layout: SlabLayout,
        geometry: ExpertGeometry,
        where: IntArray,
        order: SlotOrder,
        ram: RamExperts | None,
    ) -> None:
        """Takes the slot of each expert, `where` [L, E], NONE if missing. Without `ram`, RAM is never read."""
        from edgemoe.kernels.gpu import expert_blocks as gpu_experts
        from edgemoe.kernels.gpu import experts_decode

        self._compute, self._slab, self._order, self._ram = experts_decode, slab.view(-1), order, ram
        self._where, self._exists, self._geometry = where, geometry.exists, geometry
        self._in_slab, self._in_ram = SlotOffsets(layout), SlotOffsets(layout if ram is None else ram.slab.layout)
        self._constants = [
            gpu_experts.constants(geometry, layer, layout.slot_bytes(size_class))
            for layer, size_class in enumerate(layout.classes.layer_class)
        ]
        self._seen: IntArray = np.full(where.shape, UNSEEN, np.int64)  # slots that `_places` was made from
        self._seen_ram: IntArray = self._seen  # the same of RAM
        self.outside: BoolArray = self._exists.copy()
        self._places = torch.zeros(where.shape, dtype=torch.int64, device=slab.device)
        self._staged = torch.zeros(where.shape, dtype=torch.int64, pin_memory=slab.device.type == "cuda")

    def renew(self) -> bool:
        with self._order.lock:
            return self._renew()

    def launch(self, graph: Callable[[], object], rows: int) -> bool:
        with self._order.lock:
            if not self._renew() or self._repeats_s(rows) > LAUNCHES_S:
                return False
            graph()
            self._order.launched(self._seen[self._seen >= 0], self._slab.device)
        return True

    def is_intact(self) -> bool:
        if self._ram is None or not self.outside.any():
            return True
        return np.array_equal(self._ram.where[self.outside], self._seen_ram[self.outside])

    def _repeats_s(self, rows: int) -> float:
        """Returns the time in which a layer's kernels read experts of RAM again, if rows choose theirs at random."""
        experts, k = self._geometry.experts, self._geometry.top_k
        repeated = rows * k - experts * (1 - (1 - k / experts) ** rows)
        share = np.count_nonzero(self.outside) / self._geometry.count
        return float(share * repeated * self._geometry.largest_bytes / READ_BYTES_PER_S)

    def _renew(self) -> bool:
        where = self._where.copy()
        if copied := self._order.under_way():
            where[np.isin(where, copied)] = NONE
        outside = self._exists & (where < 0)
        reads_ram = bool(outside.any())
        if reads_ram and (self._ram is None or (self._ram.where[self._exists] < 0).any()):
            return False
        if not (np.array_equal(where, self._seen) and self.is_intact()):
            places = self._in_slab(where)
            if self._ram is not None and reads_ram:
                from_slab, self._seen_ram = self._ram.slab.address - self._slab.data_ptr(), self._ram.where.copy()
                places = np.where(outside, from_slab + self._in_ram(self._seen_ram), places)
            self._staged.copy_(torch.from_numpy(np.where(self._exists, places, 0)))
            self._places.copy_(self._staged, non_blocking=True)
            self._seen, self.outside = where, outside
        return True

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        self.add(layer, self._compute.in_planes(hidden, self.kind(layer)), ids, weights, out, 1.0)
        return out

    def kind(self, layer: int) -> int:
        return int(self._constants[layer]["KIND"])

    def add(
        self,
        layer: int,
        planes: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: torch.Tensor,
        factor: float,
    ) -> None:
        compute, sizes = self._compute, self._constants[layer]
        calls = torch.empty((ids.numel(), sizes["hidden"]), dtype=torch.float32, device=planes.device)
        compute.experts_decode(planes, self._slab, self._places[layer], ids, weights, sizes, calls)
        compute.add_sums(calls, to, ids.shape[1], factor)


def blocks_of(slots: IntArray, offsets: IntArray, rows: int) -> npt.NDArray[np.int32]:
    """Returns each slot's calls in blocks of at most `rows`: slot, first call, last call + 1, [B, 3]."""
    counts = -(-np.diff(offsets) // rows)
    expert = np.repeat(np.arange(len(slots)), counts)
    within = np.arange(len(expert)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = offsets[expert] + within * rows
    return np.stack([slots[expert], first, np.minimum(first + rows, offsets[expert + 1])], axis=1).astype(np.int32)


def tile_rows(calls: float) -> int:
    """Returns the rows of a tile where experts have `calls` calls on average."""
    return TILE_ROWS[calls > 1.5 * TILE_ROWS[0]]


def block_rows(calls: int) -> int:
    """Returns the rows of a block where an expert has at most `calls` calls."""
    return next((rows for rows in ROWS if calls <= rows), ROWS[-1])


# Holds and computes experts on an NVIDIA GPU: a slab of slots, and products from it.


def open_cuda(
    kind: str,
    layout: SlabLayout,
    geometry: ExpertGeometry,
    ram: HostSlab,
    progress: Callable[[float], None] = ignore_progress,
) -> tuple[CudaLink, CudaCompute]:
    """Returns the link and the computation of device `cuda:N`. `progress` takes the share of `ram` that is pinned.

    Raises CapacityError where the slab does not fit, ConfigError where the kernels cannot be compiled.
    """
    device = torch.device(kind)
    try:
        slab = torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        raise CapacityError(
            f"{kind} has {free_bytes} bytes free, the slab of its experts takes {layout.size_bytes}; "
            "lower the device's expert_bytes"
        ) from error
    order = SlotOrder(layout.count)
    return CudaLink(ram, slab, layout, order, progress), CudaCompute(slab, layout, geometry, order, ram)


class CudaCompute:
    """Computes experts in place in the slab, by two kernels for all experts of a layer."""

    def __init__(
        self,
        slab: torch.Tensor,
        layout: SlabLayout,
        geometry: ExpertGeometry,
        order: SlotOrder,
        ram: HostSlab | None = None,
    ) -> None:
        """Compiles the kernels for a slab, uint8, cut as `layout` says. Experts are copied from `ram`.

        Raises ConfigError where that fails.
        """
        self._geometry, self._order, self._device = geometry, order, slab.device
        self._slab, self._layout, self._ram = slab, layout, ram
        self._timed: deque[tuple[float, list[torch.cuda.Event]]] = deque(maxlen=MARKS)  # units, and moments
        try:
            self._fused = GpuExpertKernels(slab, layout, geometry)
        except Exception as error:  # no Triton, no C compiler, or too old a GPU; `error` says which
            raise ConfigError(
                f"the experts' kernels cannot be compiled for {slab.device}: {error!r}. Install the Triton that this "
                "torch asks for and a C compiler, or take the GPU out of `devices`"
            ) from error

    def begin(self, layer: int, hidden: torch.Tensor) -> None:
        self._layer = layer
        self._hidden = hidden.to(self._device, non_blocking=True).contiguous()
        self._out: torch.Tensor | None = None  # [T * k, H]

    def add(self, slots: IntArray, group: TokenGroups) -> None:
        stream, read = torch.cuda.current_stream(self._device), slots.tolist()
        began = self._order.before_compute(read, stream)
        ready = began and moment(stream)
        if self._out is None:
            self._out = self._rows(whole=len(group.calls) == len(self._hidden) * self._geometry.top_k)
        self._fused.add(self._layer, slots, group, self._hidden, self._out)
        self._order.computed(read, stream)
        if began and ready:
            self._timed.append((float(work_units(group.offsets).sum()), [began, ready, moment(stream)]))

    def end(self) -> torch.Tensor:
        out = self._rows(whole=False) if self._out is None else self._out
        return out.view(len(self._hidden), self._geometry.top_k, -1).sum(1)

    def _rows(self, *, whole: bool) -> torch.Tensor:
        """Makes rows for the outputs of calls, [T * k, H]: zero unless all of them are written."""
        shape = len(self._hidden) * self._geometry.top_k, self._geometry.hidden
        return (torch.empty if whole else torch.zeros)(shape, dtype=torch.float32, device=self._device)

    def pop_timings(self) -> DeviceTimings:
        units = waited_s = computed_s = 0.0
        while self._timed and self._timed[0][1][-1].query():  # type: ignore[no-untyped-call]
            more, (began, ready, ended) = self._timed.popleft()
            units += more
            waited_s += began.elapsed_time(ready) / 1e3
            computed_s += ready.elapsed_time(ended) / 1e3
        return DeviceTimings(units, waited_s, computed_s)

    def places(self, where: IntArray) -> None:
        return None  # they are not in the CPU's memory

    def slots(self, where: IntArray, in_ram: IntArray) -> ReachableExperts:
        ram = None if self._ram is None or not is_readable(self._ram, self._device) else RamExperts(self._ram, in_ram)
        return ReachableExperts(self._slab, self._layout, self._geometry, where, self._order, ram)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def clone_for_thread(self, math: ExpertMath) -> Self:
        twin = copy.copy(self)  # with hidden states and sums of its own; all threads use the device's default stream
        twin._timed = deque(maxlen=MARKS)
        return twin
