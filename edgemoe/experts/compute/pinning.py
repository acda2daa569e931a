"""Registers host memory for DMA: slice by slice, on several threads.

What takes the time is finding and clearing the pages. Beside an H200 one thread registers 4.5 GB/s, four 9.1, eight
7.3. CUDA refuses a copy whose source lies in two registrations, so that slices begin where extents begin.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from edgemoe.experts.tiers.slab import HostSlab

log = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
POPULATE_WRITE = 23  # of madvise, since Linux 5.14: finds the pages, without a call for each
SLICE_BYTES = 512 << 20
THREADS = 4


def ignore_progress(share: float) -> None:
    """Does nothing with the share that is done."""


class Pinning:
    """Keeps a slab registered until `release`, unless somebody else has registered it.

    Where CUDA refuses, what is registered by then stays so. Copies from the rest still work, but slower.
    """

    def __init__(
        self, slab: HostSlab, device: torch.device, progress: Callable[[float], None] = ignore_progress
    ) -> None:
        self._slab, self._device, self._progress = slab, device, progress
        self._lock = threading.Lock()  # of all that follows
        self._slices: list[tuple[int, int]] = []  # address and bytes of what is registered
        self._code = 0  # of CUDA's refusal
        if not slab.pinned:
            self._register()

    def release(self) -> None:
        """Ends the registrations. No copy may be under way."""
        if self._slices:
            self._slab.pinned = False
        for address, _ in self._slices:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._slices.clear()

    def _register(self) -> None:
        began_s, size_bytes = time.monotonic(), self._slab.size_bytes
        _raise_limit()
        each = max(1, SLICE_BYTES // self._slab.layout.extent_bytes) * self._slab.layout.extent_bytes
        slices = [(self._slab.address + start, min(each, size_bytes - start)) for start in range(0, size_bytes, each)]
        threads = min(THREADS, len(os.sched_getaffinity(0)), len(slices))
        with ThreadPoolExecutor(threads, "edgemoe-pin") as pool:
            list(pool.map(self._register_slice, slices))
        self._slab.pinned = not self._code
        pinned_bytes = sum(size for _, size in self._slices)
        fields = {"bytes": pinned_bytes, "of": size_bytes, "seconds": round(time.monotonic() - began_s, 3)}
        if self._code:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            log.warning(
                "RAM for experts is not all pinned, copies of the rest are slow; lower memory.ram_bytes, or raise the "
                "limit of locked memory (LimitMEMLOCK, ulimit -l)",
                extra={**fields, "cuda_error": self._code, "memlock": limit},
            )
        else:
            log.info("RAM for experts is pinned", extra=fields)

    def _register_slice(self, part: tuple[int, int]) -> None:
        if self._code:
            return  # what one slice is refused for, the next is too
        ctypes.CDLL(None).madvise(ctypes.c_void_p(part[0]), ctypes.c_size_t(part[1]), POPULATE_WRITE)
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(*part, PORTABLE))  # type: ignore[no-untyped-call]
        with self._lock:
            if code:
                self._code = code
                return
            self._slices.append(part)
            self._progress(sum(size for _, size in self._slices) / self._slab.size_bytes)


def _raise_limit() -> None:
    """Lets this process lock as much memory as its hard limit allows."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
