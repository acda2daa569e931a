"""Computes on the CPU, and is done no sooner than a device would be that reads its experts at a stated speed.

The time is the device's, not the compute thread's: several devices of a box work side by side, and the thread waits
where it needs their sums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Self

import torch

from edgemoe.experts.compute.dispatch import Group, HostCompute, Spent
from edgemoe.experts.transfer.links import Clock
from edgemoe.kernels.cpu.expert_math import ExpertMath, ExpertSlab
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import IntArray


class DeviceTime:
    """Gives the time of one device to the threads that compute on it, first come, first served. Thread-safe."""

    def __init__(self, bytes_per_s: float, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = clock()

    def take(self, size_bytes: float) -> tuple[float, float]:
        """Returns when a read of so many bytes begins and ends, by the clock."""
        with self._lock:
            begins_s = max(self.clock(), self._free_s)
            self._free_s = begins_s + size_bytes / self._bytes_per_s
            return begins_s, self._free_s


class EmulatedCompute(HostCompute):
    """Computes experts in a slab of host memory, in the time of a device."""

    def __init__(
        self, slabs: Sequence[tuple[ExpertSlab, int]], math: ExpertMath, sizes_bytes: IntArray, device: DeviceTime
    ) -> None:
        """Takes for each layer what HostCompute does, and the bytes of an expert [L]."""
        super().__init__(slabs, math)
        self._sizes_bytes, self._device = sizes_bytes, device
        self._units = self._computed_s = 0.0  # not told yet
        self._ends_s = 0.0

    def begin(self, layer: int, hidden: torch.Tensor) -> None:
        super().begin(layer, hidden)
        self._expert_bytes = float(self._sizes_bytes[layer])

    def add(self, slots: IntArray, group: Group) -> None:
        units = float(work_units(group.offsets).sum())
        begins_s, self._ends_s = self._device.take(units * self._expert_bytes)
        super().add(slots, group)
        self._units += units
        self._computed_s += self._ends_s - begins_s

    def end(self) -> torch.Tensor:
        self.settle()
        return super().end()

    def places(self, where: IntArray) -> None:
        return None  # whoever computes from them would take no time of the device

    def spent(self) -> Spent:
        spent, self._units, self._computed_s = Spent(self._units, 0.0, self._computed_s), 0.0, 0.0
        return spent

    def settle(self) -> None:
        if (left_s := self._ends_s - self._device.clock()) > 0:
            time.sleep(left_s)

    def twin(self, math: ExpertMath) -> Self:
        return type(self)(self._slabs, math, self._sizes_bytes, self._device)
