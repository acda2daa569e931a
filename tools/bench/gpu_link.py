"""The speed of the link to a GPU: pinning, single copies, a gathering kernel, and the product's own link.

`link_figures` yields one figure at a time, so that an interrupted run keeps the earlier ones.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import xxhash

from edgemoe.config.budgets import DeviceBudget
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute import cuda_link
from edgemoe.experts.compute.cuda_link import CudaLink, PinnedSlab, SlotOrder, copy_async
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotPool, SlotTransfer
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import ExpertGeometry, ExpertReader, Tier
from edgemoe.types.size_classes import SlabLayout
from tools.bench.filling import BlankStore, fill, running

Figure = tuple[str, object]
PINNED_BYTES = 4 << 30
SIZES_BYTES = (262_144, 524_288, 1 << 20, 2_506_752, 4_595_712, 9_437_184, 13_221_888)  # the last four: models' experts
GATHERED_BYTES = (2_506_752, 9_437_184)
CTAS = (4, 8, 16, 32)
COPIED_BYTES = 1 << 30  # in one measurement
WORDS = 4096  # of 4 bytes that one program of the gather kernel moves at once
ROUNDS = 3
COPIES, OUTSTANDING = 512, 8  # through the product's link


@triton.jit
def gather(addresses, slab, count, stride: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies experts [n] from their addresses in pinned memory into slots 0 to n; programs share all chunks."""
    per: tl.constexpr = (stride // 4 + chunk - 1) // chunk
    lane = tl.arange(0, chunk)
    for c in range(tl.program_id(0), count * per, tl.num_programs(0)):
        at = c % per * chunk + lane
        live = at < stride // 4
        source = tl.multiple_of(tl.load(addresses + c // per), 16).to(tl.pointer_type(tl.int32))
        here = tl.max_contiguous(tl.multiple_of(source + at, [16]), [4])
        there = slab + c // per * (stride // 4) + at  # fewer than 2^31 words
        tl.store(there, tl.load(here, mask=live, other=0), mask=live)


def link_figures(device: torch.device) -> Iterator[Figure]:
    """Yields the figures by name, or the reason why one cannot be measured."""
    for name, measure in measurements(device):
        try:
            yield name, measure()
        except (RuntimeError, AssertionError, OSError, triton.TritonError) as error:
            yield name, {"error": repr(error)[:300]}


def measurements(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the possible measurements; each must be called before the next one is requested."""
    torch.zeros(1, device=device)  # CUDA's own start is not measured
    yield "pin_gb_per_s", lambda: {name: pinned(device, *how) for name, how in PINNINGS.items()}
    host = HostSlab(SlabLayout.even(PINNED_BYTES // 4096, 4096))
    pinning_ = whole(host, device)
    slab = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    yield "copy_gb_per_s", lambda: {size: copied(host, slab, size) for size in SIZES_BYTES}
    for size in GATHERED_BYTES:
        yield f"gather_{size}_gb_per_s", lambda size=size: {ctas: gathered(host, slab, size, ctas) for ctas in CTAS}  # type: ignore[misc]
    pinning_.release()
    for name, geometry in GEOMETRIES.items():
        yield f"link_{name}_demands", functools.partial(link_alone, geometry, device, True)
        yield f"link_{name}_prefetches", functools.partial(link_alone, geometry, device, False)
        yield f"load_{name}", functools.partial(loaded, geometry, device, BlankStore(geometry))
    yield "load_int4_from_disk", functools.partial(loaded_from_disk, GEOMETRIES["int4"], device)


GEOMETRIES = {
    "int4": ExpertGeometry(8, 128, 8, 2048, 768, "bfloat16", encodings=("int4",) * 8),
    "bf16": ExpertGeometry(4, 128, 8, 2048, 768, "bfloat16"),
}
PINNINGS = {  # threads, bytes of a slice, whether the pages are touched before
    "one thread, whole": (1, 1 << 40, False),
    "one thread, pages found before": (1, 1 << 40, True),
    "4 threads": (4, 512 << 20, True),
    "8 threads": (8, 512 << 20, True),
    "8 threads, pages not found before": (8, 512 << 20, False),
    "16 threads": (16, 256 << 20, True),
}


def pinned(device: torch.device, threads: int, slice_bytes: int, populate: bool) -> float:
    """Returns the rate at which fresh memory is registered."""
    host = HostSlab(SlabLayout.even(PINNED_BYTES // 4096, 4096))
    kept = cuda_link.THREADS, cuda_link.SLICE_BYTES, cuda_link.POPULATE_WRITE
    cuda_link.THREADS, cuda_link.SLICE_BYTES = threads, slice_bytes
    cuda_link.POPULATE_WRITE = kept[2] if populate else 0
    began_s = time.perf_counter()
    done = PinnedSlab(host, device)
    seconds = time.perf_counter() - began_s
    ok = host.pinned
    done.release()
    cuda_link.THREADS, cuda_link.SLICE_BYTES, cuda_link.POPULATE_WRITE = kept
    return host.size_bytes / seconds / 1e9 if ok else 0.0


def whole(host: HostSlab, device: torch.device) -> PinnedSlab:
    """Registers memory at once: a copy may begin anywhere in it."""
    kept, cuda_link.SLICE_BYTES = cuda_link.SLICE_BYTES, host.size_bytes
    try:
        return PinnedSlab(host, device)
    finally:
        cuda_link.SLICE_BYTES = kept


def rate(size_bytes: int, deed: Callable[[], object]) -> float:
    """Returns the best of some rounds, in GB/s by the GPU's clock."""
    deed()
    best_ms = float("inf")
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        deed()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return size_bytes / best_ms / 1e6


def copied(host: HostSlab, slab: torch.Tensor, size_bytes: int) -> float:
    """Measures copies of one size, spread over the pinned memory, issued as by the product's link."""
    count, stream = COPIED_BYTES // size_bytes, torch.cuda.current_stream(slab.device)
    step = (PINNED_BYTES - size_bytes) // count // 4096 * 4096

    def deed() -> None:
        for i in range(count):
            copy_async(slab, i * size_bytes, host, i * step, size_bytes, stream)

    return rate(count * size_bytes, deed)


def gathered(host: HostSlab, slab: torch.Tensor, size_bytes: int, ctas: int) -> float:
    """Measures the same copies by a kernel that reads pinned memory."""
    count = COPIED_BYTES // size_bytes
    numbers = np.random.default_rng(0).permutation(PINNED_BYTES // size_bytes)[:count]
    addresses = torch.from_numpy(host.address + numbers.astype(np.int64) * size_bytes).to(slab.device)
    words = slab.view(torch.int32)

    def deed() -> None:
        gather[(ctas,)](addresses, words, count, stride=size_bytes, chunk=WORDS, num_warps=8)

    found = rate(count * size_bytes, deed)
    view = host.bytes[: PINNED_BYTES // size_bytes * size_bytes].reshape(-1, size_bytes)
    view[numbers[-1], :8] = range(8)
    deed()
    assert slab[(count - 1) * size_bytes :][:8].tolist() == list(range(8)), "the kernel copies something else"
    return found


def link_alone(geometry: ExpertGeometry, device: torch.device, demanded: bool) -> dict[str, float]:
    """Copies through the product's link with a few waiting at any time; times by the clock and by its meter."""
    layout = SlabLayout.even(64, geometry.stride_bytes(0))
    host, slab = HostSlab(layout), torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
    link, ends = CudaLink(host, slab, layout, SlotOrder(64)), Ends()
    pool = SlotPool(Tier.VRAM, 1, 64, 64, LRU(1, 64))
    pool.demanded[:] = demanded
    link.attach(ends)
    torch.cuda.synchronize()
    began_s, issuing_s = time.perf_counter(), 0.0
    for number in range(COPIES):
        ends.room.acquire(timeout=60)
        one_s = time.perf_counter()
        link.copy(SlotTransfer(pool, 0, number % 64, number % 64, number % 64))
        issuing_s += time.perf_counter() - one_s
    while not link.idle():
        time.sleep(1e-4)
    seconds = time.perf_counter() - began_s
    meter = link.stats.bytes_per_s / 1e9
    link.close()
    clock = COPIES * geometry.stride_bytes(0) / seconds / 1e9
    return {
        "clock_gb_per_s": clock,
        "meter_gb_per_s": meter,
        "apart": meter / clock - 1,
        "issue_us": issuing_s / COPIES * 1e6,
    }


class Ends:
    """Starts a copy when another one has ended."""

    def __init__(self) -> None:
        self.room = threading.Semaphore(OUTSTANDING)

    def on_arrived(self, load: object) -> None:
        pass

    def on_released(self, load: object) -> None:
        self.room.release()

    def on_failed(self, load: object, error: Exception) -> None:
        raise error

    def withdraw_prefetch(self, load: object) -> bool:
        return False

    def on_woken(self, link: object) -> None:
        pass


class DiskStore(BlankStore):
    """Experts in one file, read around the page cache and hashed, as by the product's store."""

    def __init__(self, geometry: ExpertGeometry, path: Path) -> None:
        super().__init__(geometry)
        self._stride = geometry.stride_bytes(0)
        block, self._count = np.random.default_rng(0).bytes(self._stride), geometry.layers * geometry.experts
        with path.open("wb") as file:
            for _ in range(self._count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.pool = ThreadPoolExecutor(8)
        slab = HostSlab(SlabLayout.even(self._count, self._stride))
        began_s = time.perf_counter()
        list(self.pool.map(lambda number: self._read(number, slab.view(number)), range(self._count)))
        self.gb_per_s = slab.size_bytes / (time.perf_counter() - began_s) / 1e9

    def _read(self, number: int, into: memoryview) -> None:
        os.preadv(self._file, [into], number * self._stride)
        xxhash.xxh3_128_digest(into)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        number = layer * self._geometry.experts + expert
        await asyncio.get_running_loop().run_in_executor(self.pool, self._read, number, into)

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self._file)


def loaded_from_disk(geometry: ExpertGeometry, device: torch.device) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        store = DiskStore(geometry, Path(directory) / "experts")
        try:
            return {"disk_gb_per_s": store.gb_per_s, **loaded(geometry, device, store)}
        finally:
            store.close()


def loaded(geometry: ExpertGeometry, device: torch.device, store: ExpertReader) -> dict[str, float]:
    """Measures loading a whole model into the GPU, through RAM."""
    policy, size_bytes = LRU(geometry.layers, geometry.experts), geometry.all_bytes
    memory = TierMemory(size_bytes, [DeviceBudget(str(device), size_bytes, 8e9)])
    policies: dict[Tier, Any] = {Tier.VRAM: policy, Tier.RAM: policy}
    began_s = time.perf_counter()
    tiers = ExpertTiers(geometry, store, memory, policies, None)
    opened_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    with running(tiers):
        fill(tiers)
        seconds = time.perf_counter() - began_s
        meter = tiers.loader.links[0].stats.bytes_per_s / 1e9
    return {
        "gb": size_bytes / 1e9,
        "open_s": opened_s,
        "fill_s": seconds,
        "gb_per_s": size_bytes / seconds / 1e9,
        "meter_gb_per_s": meter,
        "ahead_bytes": cuda_link.AHEAD_BYTES,
    }
