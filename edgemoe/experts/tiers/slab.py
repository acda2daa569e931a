"""Allocates memory for experts: slots in one page-aligned slab that never grows."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from edgemoe.errors import CapacityError
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout

Slab = npt.NDArray[np.uint8]


def layout_in(budget_bytes: int, geometry: ExpertGeometry, what: str) -> SlabLayout:
    """Returns the slots that fit a budget, at most all experts. Raises CapacityError for less than one of each size."""
    layout = SlabLayout.within(budget_bytes, geometry)
    if layout is None:
        least = f"no expert, one takes {geometry.largest_bytes}"
        sizes = sorted(set(geometry.strides_bytes.tolist()))
        if len(sizes) > 1:
            least = f"not one expert of each size ({', '.join(map(str, sizes))} bytes)"
        raise CapacityError(f"{what}: {budget_bytes} bytes hold {least}; raise the budget")
    return layout


class HostSlab:
    """Owns slots in anonymous private host memory: the RAM tier, or the slab of an emulated device."""

    def __init__(self, layout: SlabLayout, *, lock: bool = False) -> None:
        """Allocates the slab; `lock` keeps it from being swapped out. Raises CapacityError where that fails."""
        self.layout = layout
        self.pinned = False  # registered for DMA
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.size_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses when a kernel walks the rows
        self._view = memoryview(self._map)
        self.bytes: Slab = np.frombuffer(self._map, np.uint8)
        if lock:
            self._lock()

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def slots(self, size_class: int = 0) -> Slab:
        """Returns all slots that the slab would have if it were of one class, [S, bytes from slot to slot]."""
        return self.bytes.reshape(self.layout.slots(size_class), -1)

    def slot(self, slot: int) -> Slab:
        """Returns the bytes of one slot's expert, padding included."""
        start, size_bytes = self.layout.place(slot)
        return self.bytes[start : start + size_bytes]

    def view(self, slot: int) -> memoryview:
        """Returns the same as writable memory."""
        start, size_bytes = self.layout.place(slot)
        return self._view[start : start + size_bytes]

    def _lock(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size_bytes)):
            why = os.strerror(ctypes.get_errno())
            raise CapacityError(
                f"cannot lock {self.size_bytes} bytes of experts in RAM ({why}); raise LimitMEMLOCK or do not lock"
            )
