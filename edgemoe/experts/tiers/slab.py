"""Allocates memory for experts: equal slots in one page-aligned slab that never grows."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.errors import CapacityError
from edgemoe.store.files import padded

Slab = npt.NDArray[np.uint8]


class ExpertShape(NamedTuple):
    """The sizes of a model's experts: L layers of E experts, k of them per token, each SwiGLU of width I."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    bf16: bool  # else float32

    @property
    def item_bytes(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def expert_bytes(self) -> int:
        """Returns the bytes of one expert: gate and up rows [2I, H], then down [H, I]."""
        return 3 * self.width * self.hidden * self.item_bytes

    @property
    def stride_bytes(self) -> int:
        """Returns the bytes of one slot: an expert, rounded up to whole pages."""
        return padded(self.expert_bytes)

    def slots(self, budget_bytes: int, what: str) -> int:
        """Returns the slots that fit a budget, at most all experts. Raises CapacityError for less than one."""
        if budget_bytes < self.stride_bytes:
            raise CapacityError(
                f"{what}: {budget_bytes} bytes hold no expert, one takes {self.stride_bytes}; raise the budget"
            )
        return min(budget_bytes // self.stride_bytes, self.layers * self.experts)


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
