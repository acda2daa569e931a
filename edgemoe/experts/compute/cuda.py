"""Holds and computes experts on an NVIDIA GPU: a slab of slots, and products from it.

A computation waits, on the GPU, for the copies into the slots that it reads (see `cuda_link`); the host waits for
neither. How long computations took, and how long they waited, is read off the GPU's own clock once they have ended.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Self

import torch

from edgemoe.errors import CapacityError, ConfigError
from edgemoe.experts.compute.cuda_link import MARKS, CudaLink, Order, moment
from edgemoe.experts.compute.dispatch import Group, Spent
from edgemoe.experts.compute.gpu_calls import GpuCalls, ResidentSlots
from edgemoe.experts.compute.pinning import ignore_progress
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.kernels.cpu.expert_math import ExpertMath
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout


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
    order = Order(layout.count)
    return CudaLink(ram, slab, layout, order, progress), CudaCompute(slab, layout, geometry, order)


class CudaCompute:
    """Computes experts in place in the slab, by two kernels for all experts of a layer."""

    def __init__(self, slab: torch.Tensor, layout: SlabLayout, geometry: ExpertGeometry, order: Order) -> None:
        """Compiles the kernels for a slab, uint8, cut as `layout` says.

        Raises ConfigError where that fails.
        """
        self._geometry, self._order, self._device = geometry, order, slab.device
        self._slab, self._layout = slab, layout
        self._timed: deque[tuple[float, list[torch.cuda.Event]]] = deque(maxlen=MARKS)  # units, and moments
        try:
            self._fused = GpuCalls(slab, layout, geometry)
        except Exception as error:  # no Triton, no C compiler, or too old a GPU; `error` says which
            raise ConfigError(
                f"the experts' kernels cannot be compiled for {slab.device}: {error!r}; install the Triton that this "
                "torch asks for and a C compiler, or take the GPU out of `devices`"
            ) from error

    def begin(self, layer: int, hidden: torch.Tensor) -> None:
        self._layer = layer
        self._hidden = hidden.to(self._device, non_blocking=True).contiguous()
        rows = len(hidden) * self._geometry.top_k
        self._out = torch.zeros((rows, self._geometry.hidden), dtype=torch.float32, device=self._device)

    def add(self, slots: IntArray, group: Group) -> None:
        stream, read = torch.cuda.current_stream(self._device), slots.tolist()
        began = self._order.before_compute(read, stream)
        ready = began and moment(stream)
        self._fused.add(self._layer, slots, group, self._hidden, self._out)
        self._order.computed(read, stream)
        if began and ready:
            self._timed.append((float(work_units(group.offsets).sum()), [began, ready, moment(stream)]))

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

    def places(self, where: IntArray) -> None:
        return None  # they are not in the CPU's memory

    def slots(self, where: IntArray) -> ResidentSlots | None:
        return ResidentSlots(self._slab, self._layout, self._geometry, where, self.settle)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def twin(self, math: ExpertMath) -> Self:
        twin = copy.copy(self)  # with hidden states and sums of its own; all threads use the device's default stream
        twin._timed = deque(maxlen=MARKS)
        return twin
