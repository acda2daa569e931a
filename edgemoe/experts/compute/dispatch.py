"""Computes experts in host memory: as fast as the CPU can, or as an emulated device."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import torch

from edgemoe.experts.transfer.link_stats import Clock
from edgemoe.kernels.cpu.expert_math import ExpertMath, ExpertSlab, ExpertTable
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import ExpertSlots, TokenGroups


class DeviceTimings(NamedTuple):
    """The work and times of a device that works beside its caller, by its own clock."""

    units: float = 0.0  # of work, see `work_units`
    waited_s: float = 0.0  # for copies of experts
    computed_s: float = 0.0


class ExpertCompute(Protocol):
    """Computes experts on one device. Called on the compute thread only."""

    def begin(self, layer: int, hidden: torch.Tensor) -> None:
        """Starts a layer with `hidden` [T, H]."""

    def add(self, slots: IntArray, group: TokenGroups) -> None:
        """Adds the weighted outputs of the group's experts; expert i is in `slots[i]`."""

    def end(self) -> torch.Tensor:
        """Returns the sum, [T, H] float32."""

    def places(self, where: IntArray) -> ExpertTable | None:
        """Returns the table of experts by their slots [L, E] if the CPU can compute them without this; else None."""

    def slots(self, where: IntArray, in_ram: IntArray) -> ExpertSlots | None:
        """Returns the object that computes experts without the host, by their slots here and in RAM [L, E].

        The slots are read as they change.
        """

    def pop_timings(self) -> DeviceTimings:
        """Returns the times of work that waited for copies and ended since the last call; 0 for host computation."""

    def synchronize(self) -> None:
        """Waits until nothing reads or writes slots any more that was started before."""

    def clone_for_thread(self, math: ExpertMath) -> Self:
        """Returns another one over the same slots for another thread; the CPU computes by `math`."""


class HostCompute:
    """Computes experts in a slab of host memory on the CPU."""

    def __init__(self, slabs: Sequence[tuple[ExpertSlab, int]], math: ExpertMath) -> None:
        """Takes for each layer the slots as its experts lie in them, and the number of the first of these."""
        self._slabs, self._math = slabs, math

    def begin(self, layer: int, hidden: torch.Tensor) -> None:
        self._slab, self._first = self._slabs[layer]
        self._hidden = hidden.contiguous()
        self._out = torch.zeros(hidden.shape, dtype=torch.float32)

    def add(self, slots: IntArray, group: TokenGroups) -> None:
        if self._first:
            slots = slots - self._first
        self._math.add(self._slab, slots, group.offsets, group.tokens, group.weights, self._hidden, self._out)

    def end(self) -> torch.Tensor:
        return self._out

    def places(self, where: IntArray) -> ExpertTable | None:
        return self._math.table(self._slabs, where)

    def slots(self, where: IntArray, in_ram: IntArray) -> None:
        return None  # they are not in a GPU's memory

    def pop_timings(self) -> DeviceTimings:
        return DeviceTimings()

    def synchronize(self) -> None:
        pass  # nothing goes on beside the caller

    def clone_for_thread(self, math: ExpertMath) -> Self:
        return type(self)(self._slabs, math)


# --- an emulated device: the CPU computes, and waits until the device would have read its experts ---


class DeviceTime:
    """Gives the time of one device to the threads that compute on it, first come, first served. Thread-safe."""

    def __init__(self, bytes_per_s: float, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = clock()

    def reserve(self, size_bytes: float) -> tuple[float, float]:
        """Returns when a read of `size_bytes` begins and ends, by the clock."""
        with self._lock:
            begins_s = max(self.clock(), self._free_s)
            self._free_s = begins_s + size_bytes / self._bytes_per_s
            return begins_s, self._free_s


class EmulatedCompute(HostCompute):
    """Computes experts in a slab of host memory, in the time of a device."""

    def __init__(
        self, slabs: Sequence[tuple[ExpertSlab, int]], math: ExpertMath, sizes_bytes: IntArray, device: DeviceTime
    ) -> None:
        """Takes the arguments of HostCompute, and the bytes of an expert of each layer [L]."""
        super().__init__(slabs, math)
        self._sizes_bytes, self._device = sizes_bytes, device
        self._units = self._computed_s = 0.0  # not told yet
        self._ends_s = 0.0

    def begin(self, layer: int, hidden: torch.Tensor) -> None:
        super().begin(layer, hidden)
        self._expert_bytes = float(self._sizes_bytes[layer])

    def add(self, slots: IntArray, group: TokenGroups) -> None:
        units = float(work_units(group.offsets).sum())
        begins_s, self._ends_s = self._device.reserve(units * self._expert_bytes)
        super().add(slots, group)
        self._units += units
        self._computed_s += self._ends_s - begins_s

    def end(self) -> torch.Tensor:
        self.synchronize()
        return super().end()

    def places(self, where: IntArray) -> None:
        return None  # computing from them would take no time of the device

    def pop_timings(self) -> DeviceTimings:
        spent, self._units, self._computed_s = DeviceTimings(self._units, 0.0, self._computed_s), 0.0, 0.0
        return spent

    def synchronize(self) -> None:
        if (left_s := self._ends_s - self._device.clock()) > 0:
            time.sleep(left_s)

    def clone_for_thread(self, math: ExpertMath) -> Self:
        return type(self)(self._slabs, math, self._sizes_bytes, self._device)
