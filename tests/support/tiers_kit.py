"""Shared parts of the tests of tiers: a small model's experts in a file, and a plain computation of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from edgemoe.config.budgets import DeviceBudget
from edgemoe.errors import CorruptExpert
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.moe import FetchOptions
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, ExpertReader, Tier

torch.set_num_threads(1)  # the matrices are tiny

SMALL = ExpertGeometry(layers=3, experts=8, top_k=2, hidden=32, width=24, dtype="float32")


def emulated(expert_bytes: int, link_bytes_per_s: float = 1e12) -> DeviceBudget:
    return DeviceBudget("emulated", expert_bytes, link_bytes_per_s)


class Weights:
    """Random experts, and their output with all in memory."""

    def __init__(self, geometry: ExpertGeometry, seed: int = 0) -> None:
        self.geometry = geometry
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if geometry.bf16 else torch.float32
        size = (geometry.layers, geometry.experts)
        self.gate_up = torch.randn(*size, 2 * geometry.width, geometry.hidden, generator=generator).to(dtype) * 0.2
        self.down = torch.randn(*size, geometry.hidden, geometry.width, generator=generator).to(dtype) * 0.2

    def bytes_of(self, layer: int, expert: int) -> bytes:
        parts = (self.gate_up[layer, expert], self.down[layer, expert])
        found = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
        return found.ljust(self.geometry.expert_bytes(layer), b"\xff")  # NaN in the unread rest

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Computes every call on its own, in float64."""
        out = torch.zeros(hidden.shape, dtype=torch.float64)
        for t, row in enumerate(ids.tolist()):
            for j, expert in enumerate(row):
                x = hidden[t].double()
                gate, up = (self.gate_up[layer, expert].double() @ x).chunk(2)
                out[t] += weights[t, j].double() * (
                    self.down[layer, expert].double() @ (torch.nn.functional.silu(gate) * up)
                )
        return out

    def route(
        self, tokens: int, rng: np.random.Generator, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns hidden states [T, H], distinct experts of a layer and their weights [T, k]."""
        geometry = self.geometry
        hidden = torch.from_numpy(rng.standard_normal((tokens, geometry.hidden)).astype(np.float32))
        if geometry.bf16:
            hidden = hidden.bfloat16()
        ids = np.argsort(rng.random((tokens, geometry.experts_of(layer))), axis=1)[:, : geometry.top_k]
        weights = rng.random((tokens, geometry.top_k)).astype(np.float32)
        return hidden, torch.from_numpy(ids), torch.from_numpy(weights)


class FileStore:
    """Implements `types.Store` on one file. Reads of experts in `held` wait; reads of `damaged` ones fail."""

    def __init__(self, weights: Weights) -> None:
        self.geometry = weights.geometry
        self.reads: list[ExpertId] = []
        self.damaged: set[ExpertId] = set()
        self.gates: dict[ExpertId, asyncio.Event] = {}
        self._file = os.memfd_create("experts")
        self._offsets: dict[ExpertId, int] = {}
        for layer in range(self.geometry.layers):
            for expert in range(self.geometry.experts_of(layer)):
                self._offsets[ExpertId(layer, expert)] = os.lseek(self._file, 0, os.SEEK_CUR)
                os.write(self._file, weights.bytes_of(layer, expert))

    def pin(self, layer: int, *experts: int) -> None:
        for expert in experts:
            self.gates[ExpertId(layer, expert)] = asyncio.Event()

    def unpin(self, layer: int, *experts: int) -> None:
        for expert in experts:
            self.gates.pop(ExpertId(layer, expert)).set()

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self.geometry.expert_bytes(layer)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        key = ExpertId(layer, expert)
        self.reads.append(key)
        await asyncio.sleep(0)
        if key in self.gates:
            await self.gates[key].wait()
        if key in self.damaged:
            raise CorruptExpert("a file", layer, expert, "as the test wants it")
        size_bytes = self.geometry.expert_bytes(layer)
        assert os.preadv(self._file, [into[:size_bytes]], self._offsets[key]) == size_bytes

    def __del__(self) -> None:
        os.close(self._file)


def small_tiers(
    store: ExpertReader,
    ram_slots: int,
    device_slots: tuple[int, ...] = (),
    kernels: Kernels | None = None,
    geometry: ExpertGeometry = SMALL,
    link_bytes_per_s: float = 1e12,
    containment: bool = True,
    on_disk: BoolArray | None = None,
    **fetching: Any,
) -> ExpertTiers:
    """Makes tiers with `ram_slots` slots in RAM and `device_slots` in emulated devices."""
    policy = LRU(geometry.layers, geometry.experts)
    devices = [emulated(slots * geometry.largest_bytes, link_bytes_per_s) for slots in device_slots]
    return ExpertTiers(
        geometry,
        store,
        TierMemory(ram_slots * geometry.largest_bytes, devices, containment=containment),
        {Tier.VRAM: policy, Tier.RAM: policy},
        kernels,
        fetching=FetchOptions(**fetching),
        on_disk=on_disk,
    )


@contextlib.contextmanager
def running(tiers: ExpertTiers, *, fill: bool = False) -> Iterator[ExpertTiers]:
    """Runs the tiers with their loop on a thread of its own; at the end nothing may be left behind."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(tiers.run() if fill else tiers.loader.run())
    thread = threading.Thread(target=_run, args=(loop, task), daemon=True)
    thread.start()
    try:
        yield tiers
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        assert not thread.is_alive()
        loop.close()
        tiers.close()
        tiers.check_integrity(idle=True)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
