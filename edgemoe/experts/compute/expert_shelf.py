"""Provides this box's experts as bytes, which peers fetch in parts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import NONE
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.store.files import page_memory
from edgemoe.store.manifest import Manifest
from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, ExpertReader

READS = 4  # of experts for peers at a time
KEPT_READS = 8  # experts read for peers and kept while their parts are fetched, at most,
KEPT_BYTES = 128 << 20  # within these bytes, but at least two


class ExpertShelf:
    """Provides experts as bytes, from RAM or else from the disk. Used on the event loop."""

    def __init__(self, manifest: Manifest, store: ExpertReader, geometry: ExpertGeometry) -> None:
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
