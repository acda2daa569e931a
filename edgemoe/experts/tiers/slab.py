"""Allocates memory for experts: equal slots in one page-aligned slab that never grows."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from edgemoe.errors import CapacityError
from edgemoe.types.experts import ExpertGeometry

Slab = npt.NDArray[np.uint8]


def slots_in(budget_bytes: int, geometry: ExpertGeometry, what: str) -> int:
    """Returns the slots that fit a budget, at most all experts. Raises CapacityError for less than one."""
    stride_bytes = geometry.stride_bytes
    if budget_bytes < stride_bytes:
        raise CapacityError(f"{what}: {budget_bytes} bytes hold no expert, one takes {stride_bytes}; raise the budget")
    return min(budget_bytes, geometry.all_bytes) // stride_bytes


class HostSlab:
    """Owns slots in anonymous private host memory: the RAM tier, or the slab of an emulated device."""

    def __init__(self, slots: int, stride_bytes: int, *, lock: bool = False) -> None:
        """Allocates the slab; `lock` keeps it from being swapped out. Raises CapacityError where that fails."""
        self.slots, self.stride_bytes = slots, stride_bytes
        self.pinned = False  # registered for DMA
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.size_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses when a kernel walks the rows
        self._view = memoryview(self._map)
        self.slab: Slab = np.frombuffer(self._map, np.uint8).reshape(slots, stride_bytes)  # [S, stride]
        if lock:
            self._lock()

    @property
    def size_bytes(self) -> int:
        return self.slots * self.stride_bytes

    @property
    def address(self) -> int:
        return int(self.slab.ctypes.data)

    def view(self, slot: int) -> memoryview:
        """Returns one slot's memory, writable, padding included."""
        return self._view[slot * self.stride_bytes : (slot + 1) * self.stride_bytes]

    def _lock(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size_bytes)):
            why = os.strerror(ctypes.get_errno())
            raise CapacityError(
                f"cannot lock {self.size_bytes} bytes of experts in RAM ({why}); raise LimitMEMLOCK or do not lock"
            )
