"""Serves this box's experts to peers: computes them on peers' hidden states, or sends them as bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.experts.compute.dispatch import Group
from edgemoe.experts.compute.moe import TieredExperts
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import NONE
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.store.files import page_memory
from edgemoe.store.manifest import Manifest
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, Store
from edgemoe.types.peers import ExpertWork

READS = 4  # of experts for peers at a time
KEPT_READS = 8  # experts read for peers and kept while their parts are fetched, at most,
KEPT_BYTES = 128 << 20  # within these bytes, but at least two


class PeerCompute:
    """Computes experts for peers, on the thread that serves them. Their demands change no policy."""

    def __init__(self, experts: TieredExperts, on_disk: BoolArray) -> None:
        """Uses the `experts` of the calling thread. `on_disk` [L, E] marks the experts that the store can read."""
        self._experts, self._on_disk = experts, on_disk
        self._residency, self._geometry = experts.residency, experts.geometry
        self.experts = 0  # of layer-steps, computed for peers
        self._dtype = torch.bfloat16 if self._geometry.bf16 else torch.float32
        self._threads: int | None = torch.get_num_threads()  # OpenMP keeps this by thread

    def refuses(self, work: ExpertWork) -> str:
        """Returns why the work cannot be done here, or ""."""
        if len(work.rows) > self._geometry.top_k and np.bincount(work.rows).max() > self._geometry.top_k:
            return f"a row with more calls than the {self._geometry.top_k} that a token has"
        absent = self._residency.missing_from_ram(work.layer, work.experts) & ~self._on_disk[work.layer, work.experts]
        if absent.any():
            return f"expert {int(work.experts[absent][0])} of layer {work.layer} is not here"
        return ""

    @torch.inference_mode()
    def compute(self, works: Sequence[ExpertWork]) -> Sequence[memoryview]:
        """Returns the result of each work; all are of one layer. Raises StoreError."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None
        first = list(itertools.accumulate((len(work.hidden) for work in works), initial=0))
        group = _merge(works, first, self._geometry.top_k)
        hidden = self._hidden(np.concatenate([work.hidden for work in works]))
        rows = self._bytes(self._experts.compute(works[0].layer, hidden, group))
        self.experts += len(group.experts)
        return [rows[a:b].data.cast("B") for a, b in itertools.pairwise(first)]

    @torch.inference_mode()
    def compute_at_once(self, work: ExpertWork) -> memoryview | None:
        """Returns the work's result if all its experts are in the top tier, else None. Never runs beside `compute`."""
        group = _merge([work], [0], self._geometry.top_k)
        sums = self._experts.compute_if_there(work.layer, self._hidden(work.hidden.copy()), group)
        if sums is None:
            return None
        self.experts += len(group.experts)
        return self._bytes(sums).data.cast("B")

    def _hidden(self, rows: npt.NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(rows).view(self._dtype)  # [R, H]

    def _bytes(self, sums: torch.Tensor) -> npt.NDArray[np.uint8]:
        rows: npt.NDArray[np.uint8] = sums.to("cpu", self._dtype).contiguous().view(torch.uint8).numpy()
        return rows


def _merge(works: Sequence[ExpertWork], first: Sequence[int], k: int) -> Group:
    """Returns the calls of all works as one group; the rows of work i begin at `first[i]`."""
    if len(works) == 1:
        (work,) = works
        return Group(work.experts, work.offsets, _places(work.rows, k), work.rows, work.weights)
    experts = np.concatenate([np.repeat(work.experts, np.diff(work.offsets)) for work in works])
    rows = np.concatenate([work.rows + start for work, start in zip(works, first, strict=False)])
    weights = np.concatenate([work.weights for work in works])
    order = np.argsort(experts, kind="stable")
    experts, rows, weights = experts[order], rows[order], weights[order]
    starts = np.flatnonzero(np.concatenate(([True], experts[1:] != experts[:-1])))
    offsets = np.concatenate((starts, [len(experts)]))
    return Group(experts[starts], offsets, _places(rows, k), rows, weights)


def _places(rows: IntArray, k: int) -> IntArray:
    """Returns a distinct place for each call, row * k + j."""
    if rows.max() == 0:
        return np.arange(len(rows))
    order, counts = np.argsort(rows, kind="stable"), np.bincount(rows)
    within = np.empty_like(rows)
    within[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows * k + within


class ExpertShelf:
    """Provides experts as bytes, from RAM or else from the disk. Used on the event loop."""

    def __init__(self, manifest: Manifest, store: Store, geometry: ExpertGeometry) -> None:
        self._manifest, self._store, self._geometry = manifest, store, geometry
        self._residency: Residency | None = None
        self._learned: dict[ExpertId, str] = {}
        self._reads: OrderedDict[ExpertId, asyncio.Task[memoryview]] = OrderedDict()
        self._reading = asyncio.Semaphore(READS)

    def attach(self, residency: Residency, ram: HostSlab) -> None:
        """Sets the RAM tier to take experts from."""
        self._residency, self._ram = residency, ram

    def grow(self, manifest: Manifest) -> None:
        """Replaces the manifest by a longer one of the same store."""
        self._manifest = manifest

    def on_disk(self) -> BoolArray:
        """Returns the mask of experts that the store can read, [L, E]."""
        present: npt.NDArray[np.bool_] = np.zeros((self._geometry.layers, self._geometry.experts), np.bool_)
        for layer, entry in enumerate(self._manifest.layers):
            present[layer, list(entry.by_expert)] = True
        return present

    def has(self, layer: int, expert: int) -> bool:
        return self._manifest.present(layer, expert)

    def checksum(self, layer: int, expert: int) -> str | None:
        """Returns the expert's checksum; None where it is not known yet."""
        if self._manifest.present(layer, expert):
            return self._manifest.entry(layer, expert).xxh3_128
        return self._learned.get(ExpertId(layer, expert))

    def learn(self, layer: int, expert: int, checksum: str) -> None:
        self._learned[ExpertId(layer, expert)] = checksum

    async def part(self, layer: int, expert: int, offset: int, size_bytes: int) -> bytes:
        """Returns a part of an expert that is in memory or on the disk. Raises StoreError."""
        slot = NONE if self._residency is None else self._residency.pin(layer, expert)
        if slot >= 0:
            assert self._residency is not None
            try:
                return bytes(self._ram.view(slot)[offset : offset + size_bytes])
            finally:
                self._residency.unpin(slot)
        whole = await asyncio.shield(self._read(ExpertId(layer, expert)))
        if offset + size_bytes >= self._geometry.expert_bytes(layer):  # the last part
            self._reads.pop(ExpertId(layer, expert), None)
        return bytes(whole[offset : offset + size_bytes])

    def _read(self, expert: ExpertId) -> asyncio.Task[memoryview]:
        """Returns the read of an expert, shared by all parts that are asked for at about the same time."""
        if (task := self._reads.get(expert)) is None or (task.done() and task.exception() is not None):
            task = self._reads[expert] = asyncio.ensure_future(self._load(expert))
        self._reads.move_to_end(expert)
        kept = [each for each, read in self._reads.items() if read.done()]
        most = min(KEPT_READS, max(2, KEPT_BYTES // self._geometry.stride_bytes(expert.layer)))
        for each in kept[: max(0, len(kept) - most)]:
            del self._reads[each]
        return task

    async def _load(self, expert: ExpertId) -> memoryview:
        async with self._reading:
            room = page_memory(self._geometry.stride_bytes(expert.layer))
            await self._store.read(expert.layer, expert.expert, room)
            return room
