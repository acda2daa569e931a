"""Holds and computes experts on an NVIDIA GPU: a slab of slots, and products from it.

A computation waits, on the GPU, for the copies into the slots that it reads (see `cuda_link`); the host waits for
neither. How long computations took, and how long they waited, is read off the GPU's own clock once they have ended.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.errors import CapacityError, ConfigError
from edgemoe.experts.compute.cuda_link import MARKS, CudaLink, SlotOrder, ignore_progress, moment
from edgemoe.experts.compute.dispatch import DeviceTimings
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.kernels.cpu.expert_math import ExpertMath
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout
from edgemoe.types.token_groups import TokenGroups

ROWS = (16, 32, 64)  # calls of one expert that one program computes
TILE_ROWS = (64, 128)  # the same where there are many of each, in bfloat16
MANY_CALLS = 32  # of an expert, on average: from here on the matrix units are worth it


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
        for layer in {tuple(each.values()): layer for layer, each in enumerate(self._constants)}.values():
            for tiled, rows in [(False, rows) for rows in ROWS] + [(True, rows) for rows in TILE_ROWS]:
                if not tiled or self._may_tile(layer):
                    one = np.zeros(1, np.int64)
                    group = TokenGroups(one, np.array([0, 1]), one, one, np.zeros(1, np.float32))
                    self._launch(layer, one + self._first[layer], group, hidden, out, tiled, rows)

    def add(self, layer: int, slots: IntArray, group: TokenGroups, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the weighted outputs of the group's calls of a layer."""
        calls = len(group.calls) / len(group.experts)
        tiled = calls > MANY_CALLS and self._may_tile(layer)
        rows = tile_rows(calls) if tiled else block_rows(int(np.diff(group.offsets).max()))
        self._launch(layer, slots, group, hidden, out, tiled, rows)

    def _may_tile(self, layer: int) -> bool:
        return self._geometry.bf16 and self._many.fits(self._geometry, layer)

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


class ResidentSlots:
    """Computes experts of few tokens that are all in a GPU's slab. Implements `ExpertSlots`."""

    def __init__(
        self,
        slab: torch.Tensor,
        layout: SlabLayout,
        geometry: ExpertGeometry,
        where: IntArray,
        settle: Callable[[], None],
    ) -> None:
        """Takes the slot of each expert, `where` [L, E], NONE if missing. `settle` waits for copies into the slab."""
        from edgemoe.kernels.gpu import expert_blocks as gpu_experts
        from edgemoe.kernels.gpu import experts_decode

        self._compute, self._slab, self._where, self._settle = experts_decode, slab.view(-1), where, settle
        classes = layout.classes.layer_class
        self._first = np.array([layout.first(size_class) for size_class in classes])[:, None]
        self._exists, self._seen = geometry.exists, np.full(where.shape, -1, np.int64)
        self._constants = [
            gpu_experts.constants(geometry, layer, layout.slot_bytes(size_class))
            for layer, size_class in enumerate(classes)
        ]
        self._slots = torch.zeros(where.shape, dtype=torch.int32, device=slab.device)

    def renew(self) -> bool:
        if np.array_equal(self._where, self._seen):
            return True
        seen = self._where.copy()
        if (seen[self._exists] < 0).any():
            return False
        self._settle()
        self._slots.copy_(torch.from_numpy(np.where(self._exists, seen - self._first, 0).astype(np.int32)))
        self._seen = seen
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
        compute.experts_decode(planes, self._slab, self._slots[layer], ids, weights, sizes, calls)
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
    return CudaLink(ram, slab, layout, order, progress), CudaCompute(slab, layout, geometry, order)


class CudaCompute:
    """Computes experts in place in the slab, by two kernels for all experts of a layer."""

    def __init__(self, slab: torch.Tensor, layout: SlabLayout, geometry: ExpertGeometry, order: SlotOrder) -> None:
        """Compiles the kernels for a slab, uint8, cut as `layout` says.

        Raises ConfigError where that fails.
        """
        self._geometry, self._order, self._device = geometry, order, slab.device
        self._slab, self._layout = slab, layout
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

    def slots(self, where: IntArray) -> ResidentSlots | None:
        return ResidentSlots(self._slab, self._layout, self._geometry, where, self.synchronize)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def clone_for_thread(self, math: ExpertMath) -> Self:
        twin = copy.copy(self)  # with hidden states and sums of its own; all threads use the device's default stream
        twin._timed = deque(maxlen=MARKS)
        return twin
