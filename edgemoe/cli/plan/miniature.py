"""Models of random weights with every expert in memory, in the encodings asked for, which decode and prefill."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from edgemoe.cli.plan.subject import dense_encoding
from edgemoe.encodings.codec import pack
from edgemoe.engine.driver import SequenceDriver
from edgemoe.errors import StoreError
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.moe import Fetching
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.jit.intrinsics import chunk, fields, i64_at, record
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import DTYPES
from edgemoe.policy.baselines import LRU
from edgemoe.types.encoding import Encoding
from edgemoe.types.experts import LivePolicy, Tier
from edgemoe.types.step import StepRouting

STREAM = fields("address", "sums")
STREAM_WORDS = 1 << 15
STD = 0.02
OWN_ROWS = 512  # of a dense matrix; the others repeat them, but for gates, which tell experts apart
FILL_S = 120.0  # for random experts to be in RAM


@chunk
def _stream(job: int, number: int) -> None:
    a = record(job, STREAM)
    words, total = i64_at(a.address + number * STREAM_WORDS * 8), 0
    for k in range(STREAM_WORDS):
        total += words[k]
    i64_at(a.sums)[number] = total


def with_encodings(spec: ModelSpec, experts: str, dense: str) -> ModelSpec:
    """Returns a model in other encodings, by their names; the model's own type leaves weights as they are."""
    encodings = (experts,) * spec.geometry.layers if experts != spec.dtype else ()
    return replace(spec, encodings=encodings, dense_encoding=dense if dense != spec.dtype else "")


class RandomStore:
    """Experts made on the spot."""

    def __init__(self, spec: ModelSpec) -> None:
        geometry = self._geometry = spec.geometry
        random = np.random.default_rng(0)
        self._made: dict[Encoding, list[npt.NDArray[np.uint8]]] = {}
        for encoding in {geometry.encoding(layer) for layer in range(geometry.layers)}:
            shapes = (geometry.gate_up_shape, geometry.down_shape)
            self._made[encoding] = [
                pack(random.standard_normal(shape, np.float32) * np.float32(STD), encoding) for shape in shapes
            ]

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._geometry.expert_bytes(layer)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """The same rows for all, in an order of their own."""
        target, at = np.frombuffer(into, np.uint8), 0
        for rows in self._made[self._geometry.encoding(layer)]:
            turn = (layer * 977 + expert * 131) % len(rows)
            place = target[at : at + rows.nbytes].reshape(rows.shape)
            place[: len(rows) - turn], place[len(rows) - turn :] = rows[turn:], rows[:turn]
            at += rows.nbytes


def resident_tiers(spec: ModelSpec, kernels: Kernels, policy: LivePolicy | None = None) -> ExpertTiers:
    """Returns tiers whose RAM holds every expert, filled. Raises StoreError where that does not happen."""
    geometry = spec.geometry
    policy = policy or LRU(geometry.layers, geometry.experts)
    policies: Mapping[Tier, LivePolicy] = {Tier.RAM: policy, Tier.VRAM: policy}
    memory = TierMemory(geometry.all_bytes)
    tiers = ExpertTiers(geometry, RandomStore(spec), memory, policies, kernels, fetching=Fetching(prefetch=False))
    try:
        asyncio.run(_fill(tiers))
    except TimeoutError:
        raise StoreError(f"{geometry.all_bytes} bytes of random experts were not in RAM after {FILL_S:g} s") from None
    return tiers


async def _fill(tiers: ExpertTiers) -> None:
    """Returns once every expert is in RAM, where none has to be loaded any more: nothing goes on running."""
    every, layers = np.arange(tiers.geometry.experts), range(tiers.geometry.layers)
    async with asyncio.timeout(FILL_S), asyncio.TaskGroup() as group:
        running = group.create_task(tiers.run())
        while not all(tiers.residency.all_on_top(layer, every) for layer in layers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        running.cancel()


def random_decoder(spec: ModelSpec, kernels: Kernels) -> Decoder:
    """Returns a decoder of random dense weights, which are the same for all encodings."""
    random, dtype, tensors = torch.Generator().manual_seed(0), DTYPES[spec.dtype], {}
    for name, shape in dense_shapes(spec).items():
        rows = shape[0] if "mlp.gate." in name or not shape[1:] else min(shape[0], OWN_ROWS)
        some = (rows, *shape[1:])
        values = torch.ones(some) if "norm" in name else torch.randn(some, generator=random) * STD
        encoding = dense_encoding(spec, name, shape[-1])
        is_plain = encoding.name == spec.dtype
        made = values.to(dtype) if is_plain else torch.from_numpy(pack(values.numpy(), encoding))
        tensors[name] = made.repeat(-(-shape[0] // rows), *[1] * (made.dim() - 1))[: shape[0]].contiguous()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dense.safetensors"
        save_file(tensors, path)
        return Decoder.load(spec, path, kernels=kernels)


def dense_bytes(spec: ModelSpec) -> int:
    """Read once a step, whatever the batch; of an untied embedding only a row."""
    total = 0
    for name, (*rows, columns) in dense_shapes(spec).items():
        if "embed_tokens" not in name or spec.block.tied:
            total += int(np.prod(rows)) * dense_encoding(spec, name, columns).row_bytes(columns)
    return total


class Ours:
    """A decoder over tiers whose RAM holds every expert."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, decoder: Decoder, tiers: ExpertTiers) -> None:
        self.spec, self.kernels, self.decoder, self.tiers = spec, kernels, decoder, tiers

    @classmethod
    def plain(cls, config: dict[str, Any], threads: int, policy: LivePolicy | None = None) -> Ours:
        """Makes a model without encodings."""
        spec = spec_from_config(config)
        kernels = Kernels(threads, spec.dtype == "bfloat16")
        return cls(spec, kernels, random_decoder(spec, kernels), resident_tiers(spec, kernels, policy))

    def begin(self, batch: int, most: int) -> None:
        """Empty caches for so many sequences of so many tokens."""
        self._sequences = SequenceDriver(self.spec, batch, most)

    def feed(self, tokens: torch.Tensor) -> StepRouting:
        """One step of tokens [batch, n]; what its gates chose."""
        meta, batch = self._sequences.step(tokens.tolist())
        self.tiers.experts.begin_step(meta)
        self.decoder.forward(batch, self._sequences.cache, self.tiers.experts).argmax(-1)
        return self.tiers.experts.end_step()

    def decode(self, steps: torch.Tensor) -> tuple[float, float]:
        """Seconds and bytes of a step, on average; `steps` is [n, batch, 1]."""
        start = time.perf_counter()
        routings = [self.feed(step) for step in steps]
        taken = (time.perf_counter() - start) / len(steps)
        touched = sum(len(np.unique(ids)) for routing in routings for ids in routing.ids)
        return taken, touched / len(steps) * self.spec.geometry.expert_bytes(0) + dense_bytes(self.spec)

    def stream(self, size_bytes: int) -> float:
        """Seconds to read so many bytes of experts, in one go and as fast as the box can."""
        slab = self.tiers.ram.bytes
        taken = min(size_bytes, slab.nbytes)
        first = np.random.randint(0, slab.nbytes - taken + 1) & ~4095
        return size_bytes / _streamed(self.kernels, slab.ctypes.data + first, taken)


def stream_bytes_per_s(kernels: Kernels, size_bytes: int) -> float:
    """Returns the rate of reading so many bytes of memory once, by all threads."""
    memory = np.ones(size_bytes, np.uint8)
    return _streamed(kernels, memory.ctypes.data, size_bytes)


def _streamed(kernels: Kernels, address: int, size_bytes: int) -> float:
    chunks = size_bytes // (8 * STREAM_WORDS)
    sums, job = np.zeros(chunks, np.int64), np.zeros(1, STREAM)
    job["address"], job["sums"] = address, sums.ctypes.data
    start = time.perf_counter()
    parallel(kernels.pool.control, _stream.address, job.ctypes.data, chunks)
    return chunks * 8 * STREAM_WORDS / (time.perf_counter() - start)
