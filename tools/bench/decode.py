"""Decoding with everything resident, against transformers on a model of the same shape, in one interleaved run.

    python -m tools.bench.decode --json [--batches 1,8,16] [--rounds 7] [--steps 8]

By default a Qwen3-MoE of 16 layers, width 1024, 64 experts of 512, top-8, bf16, with random weights (3.4 GB in this
process and as much in that of transformers). Ours decodes through the real tiers, with RAM for all experts. Each round
every contender decodes the same random tokens in turn, so noise hits all alike; medians over rounds. `stream_ms` is
the time to read once all the bytes that a step needs, measured in the same rounds; overhead is what a step takes
beyond it. The last line is one JSON object. `tools.bench.offload` is the same with too little memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from edgemoe.kernels.env import WORKER_ENV

ENVIRONMENT = dict(os.environ)  # transformers' process gets it as it is
os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from edgemoe.experts.build import ExpertTiers, TierMemory  # noqa: E402
from edgemoe.experts.compute.moe import Fetching  # noqa: E402
from edgemoe.families.config import spec_from_config  # noqa: E402
from edgemoe.families.spec import ModelSpec, dense_shapes  # noqa: E402
from edgemoe.kernels.cpu.intrinsics import chunk, fields, i64_at, record  # noqa: E402
from edgemoe.kernels.cpu.runtime import Kernels  # noqa: E402
from edgemoe.kernels.cpu.thread_pool import parallel  # noqa: E402
from edgemoe.model.decoder import Decoder  # noqa: E402
from edgemoe.model.kv import KVCache  # noqa: E402
from edgemoe.policy.baselines import LRU  # noqa: E402
from edgemoe.types.experts import LivePolicy, Tier  # noqa: E402
from edgemoe.types.routing import StepMeta  # noqa: E402
from edgemoe.types.step import BLOCK_TOKENS, Batch  # noqa: E402
from tools.bench.make_model import make_config  # noqa: E402
from tools.bench.oracle import Oracle, spawn  # noqa: E402

CONTEXT = 64  # tokens in the cache before timing starts
PAUSE_S = 0.03  # between contenders: threads of the one before stop spinning

STREAM = fields("address", "sums")
STREAM_WORDS = 1 << 15


@chunk
def _stream(job: int, number: int) -> None:
    a = record(job, STREAM)
    words, total = i64_at(a.address + number * STREAM_WORDS * 8), 0
    for k in range(STREAM_WORDS):
        total += words[k]
    i64_at(a.sums)[number] = total


class RandomStore:
    """Experts made on the spot."""

    def __init__(self, spec: ModelSpec) -> None:
        self._bytes = spec.geometry.expert_bytes(0)
        dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
        values = torch.randn(self._bytes // dtype.itemsize) * 0.02
        self._values = values.to(dtype).view(torch.uint8).numpy()

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._bytes

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """The same values for all, turned by a number of their own."""
        turn = (layer * 977 + expert * 131) * 64 % self._bytes
        target = np.frombuffer(into, np.uint8)
        target[: self._bytes - turn], target[self._bytes - turn :] = self._values[turn:], self._values[:turn]


class Ours:
    """The decoder over tiers whose RAM holds every expert."""

    def __init__(self, config: dict[str, Any], threads: int, policy: LivePolicy | None = None) -> None:
        self.spec = spec = spec_from_config(config)
        self.kernels = Kernels(threads, spec.dtype == "bfloat16")
        self.decoder = _random_decoder(spec, self.kernels)
        geometry = spec.geometry
        policy = policy or LRU(geometry.layers, geometry.experts)
        everything = geometry.all_bytes
        self.tiers = ExpertTiers(
            geometry,
            RandomStore(spec),
            TierMemory(everything),
            {Tier.RAM: policy, Tier.VRAM: policy},
            self.kernels,
            fetching=Fetching(prefetch=False),
        )
        self._fill()

    def _fill(self) -> None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_until_complete, args=(self.tiers.run(),), daemon=True).start()
        layers, experts = range(self.spec.geometry.layers), np.arange(self.spec.geometry.experts)
        while not all(self.tiers.residency.all_on_top(layer, experts) for layer in layers):
            time.sleep(0.05)

    def begin(self, batch: int, most: int) -> None:
        """Empty caches for so many sequences of so many tokens."""
        blocks = -(-most // BLOCK_TOKENS)
        self._kv = KVCache(self.spec.kv_layout, batch * blocks)
        self._tables = [list(range(s * blocks, (s + 1) * blocks)) for s in range(batch)]
        self._batch, self._length = batch, 0

    def feed(self, tokens: torch.Tensor) -> int:
        """One step of tokens [batch, n]; distinct experts that it needed, summed over layers."""
        n = tokens.shape[1]
        positions = torch.arange(self._length, self._length + n).repeat(self._batch)
        self._length += n
        batch = Batch(
            tokens=tokens.flatten(),
            positions=positions,
            query_lens=[n] * self._batch,
            context_lens=[self._length] * self._batch,
            block_tables=self._tables,
            logit_rows=torch.arange(1, self._batch + 1) * n - 1,
            decode=n == 1,
        )
        names = tuple(map(str, range(self._batch)))
        decode = np.full(self._batch, n == 1)
        meta = StepMeta(names, np.full(self._batch, n), decode, batch.tokens.numpy(), positions.numpy())
        self.tiers.experts.begin_step(meta)
        self.decoder.forward(batch, self._kv, self.tiers.experts).argmax(-1)
        return sum(len(np.unique(ids)) for ids in self.tiers.experts.end_step().ids)

    def decode(self, steps: torch.Tensor) -> tuple[float, float]:
        """Seconds and bytes of a step, on average; `steps` is [n, batch, 1]."""
        start = time.perf_counter()
        touched = sum(self.feed(step) for step in steps)
        taken = (time.perf_counter() - start) / len(steps)
        return taken, touched / len(steps) * self.spec.geometry.expert_bytes(0) + dense_bytes(self.spec)

    def stream(self, size_bytes: int) -> float:
        """Seconds to read so many bytes of experts, in one go and as fast as the box can."""
        slab = self.tiers.ram.bytes
        chunks = min(size_bytes, slab.nbytes) // (8 * STREAM_WORDS)
        start_byte = np.random.randint(0, slab.nbytes - chunks * 8 * STREAM_WORDS + 1) & ~4095
        sums, job = np.zeros(chunks, np.int64), np.zeros(1, STREAM)
        job["address"], job["sums"] = slab.ctypes.data + start_byte, sums.ctypes.data
        start = time.perf_counter()
        parallel(self.kernels.pool.control, _stream.address, job.ctypes.data, chunks)
        return (time.perf_counter() - start) * size_bytes / (chunks * 8 * STREAM_WORDS)


def _random_decoder(spec: ModelSpec, kernels: Kernels) -> Decoder:
    dtype = torch.bfloat16 if kernels.bf16 else torch.float32
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dense.safetensors"
        tensors = {
            name: (torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02).to(dtype)
            for name, shape in dense_shapes(spec).items()
        }
        save_file(tensors, path)
        return Decoder.load(spec, path, kernels=kernels)


def dense_bytes(spec: ModelSpec) -> int:
    """Read once a step, whatever the batch; of an untied embedding only a row."""
    elements = sum(int(np.prod(shape)) for shape in dense_shapes(spec).values())
    return (elements - (0 if spec.block.tied else spec.vocab * spec.hidden)) * spec.dtype_bytes


def measure(args: argparse.Namespace, ours: Ours, oracle: Oracle, batch: int) -> dict[str, Any]:
    """Milliseconds per step of each contender with `batch` sequences."""
    implementations = args.implementations.split(",")
    taken: dict[str, list[float]] = {name: [] for name in ("edgemoe", "stream", *implementations)}
    prompt = torch.randint(0, args.vocab, (batch, CONTEXT))
    ours.begin(batch, CONTEXT + (args.rounds + 1) * args.steps)
    ours.feed(prompt)
    for name in implementations:
        oracle.ask(do="begin", implementation=name, tokens=prompt.tolist())
    step_bytes = 0.0
    for round_ in range(-1, args.rounds):  # the first one is not counted
        steps = torch.randint(0, args.vocab, (args.steps, batch, 1))
        seconds, step_bytes = ours.decode(steps)
        now = {"edgemoe": seconds, "stream": ours.stream(int(step_bytes))}
        for name in implementations:
            time.sleep(PAUSE_S)
            now[name] = oracle.ask(do="decode", implementation=name, steps=steps.tolist())
        time.sleep(PAUSE_S)
        for name, value in now.items() if round_ >= 0 else ():
            taken[name].append(value)
    return report(batch, ours.spec, step_bytes, {name: median(values) * 1e3 for name, values in taken.items()})


def report(batch: int, spec: ModelSpec, step_bytes: float, ms: dict[str, float]) -> dict[str, Any]:
    ours, stream = ms.pop("edgemoe"), ms.pop("stream")
    best = min(ms.values())
    return {
        "batch": batch,
        "step_mb": round(step_bytes / 1e6, 1),
        "stream_ms": round(stream, 2),
        "stream_gb_per_s": round(step_bytes / stream / 1e6, 1),
        "edgemoe_ms": round(ours, 2),
        "edgemoe_tokens_per_s": round(batch * 1e3 / ours, 1),
        "transformers_ms": {name: round(value, 2) for name, value in ms.items()},
        "transformers_tokens_per_s": round(batch * 1e3 / best, 1),
        "ratio": round(best / ours, 2),
        "overhead_us_per_layer": round((ours - stream) * 1e3 / spec.layers, 1),
        "transformers_overhead_us_per_layer": round((best - stream) * 1e3 / spec.layers, 1),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "layers": 16,
        "hidden": 1024,
        "heads": 16,
        "kv-heads": 4,
        "head-dim": 64,
        "experts": 64,
        "expert-width": 512,
        "top-k": 8,
        "vocab": 32000,
        "context": 40960,
        "rounds": 7,
        "steps": 8,
        "threads": len(os.sched_getaffinity(0)),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--family", choices=["qwen3_moe", "mixtral"], default="qwen3_moe")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--batches", default="1,8,16", help="numbers of sequences decoded at once")
    parser.add_argument("--implementations", default="eager,grouped_mm,batched_mm", help="of transformers' experts")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = make_config(args)
    oracle = spawn(config, args.threads, ENVIRONMENT)
    try:
        ours, results = Ours(config, args.threads), []
        for batch in map(int, args.batches.split(",")):
            results.append(measure(args, ours, oracle, batch))
            if not args.json:
                print(json.dumps(results[-1], indent=2), flush=True)
    finally:
        oracle.close()
    machine = f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}"
    print(json.dumps({"machine": machine, "decode": results}))


if __name__ == "__main__":
    main()
