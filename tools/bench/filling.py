"""Tiers that run beside a benchmark, and the blank experts that they are filled with."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

from edgemoe.experts.build import ExpertTiers
from edgemoe.types.experts import ExpertGeometry


class BlankStore:
    """A store of experts that are zero, without a delay."""

    def __init__(self, geometry: ExpertGeometry) -> None:
        self._geometry = geometry

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._geometry.expert_bytes(layer)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        await asyncio.sleep(0)


@contextlib.contextmanager
def running(tiers: ExpertTiers) -> Iterator[ExpertTiers]:
    """Runs the tiers' event loop on a thread."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(tiers.run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        yield tiers
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
        tiers.close()


def fill(tiers: ExpertTiers) -> None:
    """Waits until every slot of the device is used and its link is idle."""
    while tiers.residency.devices[0].free or not tiers.loader.links[0].idle():
        time.sleep(0.002)
