"""Compares experts in RAM with their checksums, one in each idle second, and replaces damaged ones.

A slot has an expert's bytes as the store has them, so the manifest's checksum is that of the slot. A page of memory
that was damaged twice is failing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from edgemoe.errors import StoreError
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import NONE
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.store.files import checksum, page_memory
from edgemoe.telemetry import metrics as names
from edgemoe.types.experts import PAGE_BYTES, ExpertGeometry, ExpertReader, padded

log = logging.getLogger(__name__)
EACH_S = 1.0
FAILING = 2  # times that a page was damaged
MOST_PAGES = 4096  # that are counted

ChecksumOf = Callable[[int, int], str | None]  # (layer, expert); None: not known


class RamScrubber:
    """Checks the experts of the RAM tier. Used on the engine's event loop."""

    def __init__(
        self,
        geometry: ExpertGeometry,
        residency: Residency,
        ram: HostSlab,
        store: ExpertReader,
        checksum_of: ChecksumOf,
        is_idle: Callable[[], bool],
    ) -> None:
        self.checked = self.damaged = 0  # experts
        self.pages = Counter[int]()  # damaged ones, by number in the slab
        self._geometry, self._residency, self._ram, self._store = geometry, residency, ram, store
        self._checksum_of, self._is_idle = checksum_of, is_idle
        self._last = NONE  # expert that was checked, layer * E + expert

    async def run(self) -> None:
        """Checks one expert in each idle second, until cancelled."""
        while True:
            await asyncio.sleep(EACH_S)
            if self._is_idle():
                await self.check_next()

    async def check_next(self) -> None:
        """Checks the next expert in RAM, if there is one."""
        resident = np.flatnonzero(self._residency.ram.where.ravel() >= 0)
        if len(resident):
            later = resident[resident > self._last]
            self._last = int((later if len(later) else resident)[0])
            await self.check(*divmod(self._last, self._geometry.experts))

    async def check_all(self, layer: int, experts: Sequence[int]) -> bool:
        """Checks these experts if they are in RAM. Returns whether one was damaged."""
        return any([await self.check(layer, expert) for expert in experts])

    async def check(self, layer: int, expert: int) -> bool:
        """Checks an expert if it is in RAM, and replaces its bytes if they are damaged. Returns whether they were."""
        wanted = self._checksum_of(layer, expert)
        if wanted is None or (slot := self._residency.pin(layer, expert)) == NONE:
            return False
        try:
            held = self._ram.view(slot)[: self._geometry.expert_bytes(layer)]
            self.checked += 1
            if await asyncio.to_thread(checksum, held) == wanted:
                return False
            self.damaged += 1
            await self._replace(layer, expert, slot, held)
        finally:
            self._residency.unpin(slot)
        return True

    async def _replace(self, layer: int, expert: int, slot: int, held: memoryview) -> None:
        fields = {"layer": layer, "expert": expert}
        whole = page_memory(padded(len(held)))
        try:
            await self._store.read(layer, expert, whole)
        except StoreError as error:
            log.error("an expert in memory is damaged and cannot be read again", extra={**fields, "why": str(error)})
            return
        good, bad = np.frombuffer(whole, np.uint8)[: len(held)], np.frombuffer(held, np.uint8)
        wrong = np.flatnonzero(good != bad)
        pages = np.unique((self._ram.layout.place(slot)[0] + wrong) // PAGE_BYTES).tolist()
        self._count(pages)
        held[:] = whole[: len(held)]
        fields |= {"bytes": len(wrong), "pages": len(pages), "failing_pages": self.failing}
        log.error("an expert in memory was damaged; it was read again", extra=fields)

    def _count(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page in self.pages or len(self.pages) < MOST_PAGES:
                self.pages[page] += 1

    @property
    def failing(self) -> int:
        """Counts the pages of memory that were damaged repeatedly."""
        return sum(count >= FAILING for count in self.pages.values())

    def metrics(self) -> dict[str, float]:
        """Returns numbers for /metrics by their final names."""
        return {
            names.EXPERTS_SCRUBBED: self.checked,
            names.EXPERTS_DAMAGED: self.damaged,
            names.FAILING_PAGES: self.failing,
        }
