"""Tiers that run beside a benchmark, and the blank or random experts that they are filled with."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np

from edgemoe.encodings.bfloat import to_bf16
from edgemoe.encodings.codec import pack
from edgemoe.experts.build import ExpertTiers
from edgemoe.types.encoding import Encoding
from edgemoe.types.experts import ExpertGeometry


class BlankStore:
    """A store of experts that are zero, without a delay."""

    def __init__(self, geometry: ExpertGeometry) -> None:
        self._geometry = geometry

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._geometry.expert_bytes(layer)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        await asyncio.sleep(0)


class RandomStore(BlankStore):
    """A store of random experts, few of them distinct: a GPU multiplies zeros faster than other numbers."""

    DISTINCT = 3

    def __init__(self, geometry: ExpertGeometry) -> None:
        super().__init__(geometry)
        self._kinds: dict[str, list[bytes]] = {}

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        encoding = self._geometry.encoding(layer)
        if (kinds := self._kinds.get(encoding.name)) is None:
            kinds = self._kinds[encoding.name] = [self._made(encoding, seed) for seed in range(self.DISTINCT)]
        made = kinds[(layer + expert) % self.DISTINCT]
        into[: len(made)] = made
        await asyncio.sleep(0)

    def _made(self, encoding: Encoding, seed: int) -> bytes:
        rng, geometry = np.random.default_rng(seed), self._geometry
        parts = [
            rng.standard_normal(shape, np.float32) * 0.02 for shape in (geometry.gate_up_shape, geometry.down_shape)
        ]
        if encoding.scales(1):
            packed = [pack(part, encoding).tobytes() for part in parts]
        else:
            packed = [(to_bf16(part) if encoding.name == "bfloat16" else part).tobytes() for part in parts]
        return b"".join(packed) + bytes(geometry.bias_bytes)


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
