"""Decoding with everything resident, against transformers on the same random weights, in one interleaved run.

    python -m tools.bench.decode --json [--batches 1,8,16] [--rounds 7] [--tokens 8]

By default a Qwen3-MoE of 16 layers, width 1024, 64 experts of 512, top-8, bf16 (3.4 GB, held twice). Each round every
contender decodes the same random tokens in turn, so noise hits all alike; medians over rounds. `stream_ms` is the time
to read once all the bytes that a step needs, measured in the same rounds; overhead is what a step takes beyond it.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from edgemoe.kernels.env import WORKER_ENV

for _name, _value in WORKER_ENV.items():  # before anything loads torch
    os.environ.setdefault(_name, _value)

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from edgemoe.experts.compute import Group
from edgemoe.kernels.compute import Kernels
from edgemoe.kernels.machine import chunk, fields, i64_at, record
from edgemoe.kernels.pool import parallel
from edgemoe.kernels.products import ExpertMath, ExpertSlab
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.model.memory import zeros  # noqa: E402
from edgemoe.model.spec import dense_shapes, spec_from_config
from edgemoe.types import BLOCK_TOKENS, Batch

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
CONTEXT = 64  # tokens in the cache before timing starts

STREAM = fields("address", "words", "sums")
STREAM_WORDS = 1 << 15


@chunk
def _stream(job: int, number: int) -> None:
    a = record(job, STREAM)
    words, total = i64_at(a.address + number * STREAM_WORDS * 8), 0
    for k in range(STREAM_WORDS):
        total += words[k]
    i64_at(a.sums)[number] = total


class Resident:
    """All experts in one slab: the most that any tier can give."""

    lookahead = 0

    def __init__(self, spec: Any, kernels: Kernels, model: Any) -> None:
        self._spec, self._math = spec, ExpertMath(kernels)
        self.stride = -(-spec.expert_bytes // 4096) * 4096
        self.slab = zeros([spec.layers * spec.experts, self.stride], torch.uint8, "cpu")
        self._experts = ExpertSlab(self.slab, spec.hidden, spec.expert_width, kernels.bf16)
        for number, layer in enumerate(model.model.layers):
            here = slice(number * spec.experts, (number + 1) * spec.experts)
            self._experts.gate_up[here] = layer.mlp.experts.gate_up_proj
            self._experts.down[here] = layer.mlp.experts.down_proj
        self._math.calibrate(spec.hidden, spec.expert_width, kernels.bf16)
        self.crossover = self._math.crossover
        self.touched = 0  # distinct experts, over layers and steps

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        group, out = Group.of(ids.numpy(), weights.numpy()), torch.zeros(hidden.shape)
        slots = group.experts + layer * self._spec.experts
        self._math.add(self._experts, slots, group.offsets, group.tokens, group.weights, hidden, out)
        self.touched += len(slots)
        return out

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        raise NotImplementedError


class Ours:
    """Our decoder, `batch` sequences at once."""

    def __init__(self, decoder: Decoder, experts: Resident, batch: int, most: int) -> None:
        self._decoder, self._experts, self._batch = decoder, experts, batch
        blocks = -(-most // BLOCK_TOKENS)
        self._kv = KVCache(decoder.spec, batch * blocks)
        self._tables = [list(range(s * blocks, (s + 1) * blocks)) for s in range(batch)]
        self._length = 0

    def feed(self, tokens: torch.Tensor) -> None:
        """One step of tokens [batch, n]."""
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
        self._decoder.forward(batch, self._kv, self._experts).argmax(-1)


class Theirs:
    """transformers with one of its experts implementations."""

    def __init__(self, model: Any, implementation: str) -> None:
        self._model, self._implementation = model, implementation
        self._cache = transformers.DynamicCache(config=model.config)

    @torch.inference_mode()
    def feed(self, tokens: torch.Tensor) -> None:
        self._model.set_experts_implementation(self._implementation)
        output = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(-1)


def seconds(deed: Callable[[Any], None], inputs: Sequence[Any]) -> float:
    """Mean time of the deed on each of the inputs."""
    start = time.perf_counter()
    for each in inputs:
        deed(each)
    return (time.perf_counter() - start) / len(inputs)


def make_oracle(args: argparse.Namespace) -> Any:
    """transformers' model with random weights."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        head_dim=64,
        num_experts=args.experts,
        moe_intermediate_size=args.expert_width,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
        dtype=args.dtype,
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(getattr(torch, args.dtype))
    model.to_empty(device="cpu").eval()
    model.model.rotary_emb.__init__(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return model


def make_decoder(model: Any, kernels: Kernels) -> Decoder:
    spec, state = spec_from_config(model.config.to_dict()), model.state_dict()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dense.safetensors"
        save_file({name: state[name] for name in dense_shapes(spec)}, path)
        return Decoder.load(spec, path, kernels=kernels)


class Streamer:
    """Reads as many bytes as a step does, from places that differ from step to step, as fast as the box can."""

    def __init__(self, kernels: Kernels, slab: torch.Tensor) -> None:
        self._kernels, self._slab, self._start = kernels, slab.flatten(), 0
        self._sums = np.zeros(slab.nbytes // (8 * STREAM_WORDS) + 1, np.int64)
        self._job = np.zeros(1, STREAM)

    def read(self, size_bytes: int) -> None:
        chunks = size_bytes // (8 * STREAM_WORDS)
        if self._start + size_bytes > self._slab.nbytes:
            self._start = 0
        self._job["address"] = self._slab.data_ptr() + self._start
        self._job["sums"] = self._sums.ctypes.data
        parallel(self._kernels.pool.control, _stream.address, self._job.ctypes.data, chunks)
        self._start += chunks * 8 * STREAM_WORDS


def dense_bytes(decoder: Decoder) -> int:
    """Read once a step, whatever the batch; of the embedding only a row."""
    spec = decoder.spec
    return sum(int(np.prod(shape)) for shape in dense_shapes(spec).values()) * spec.dtype_bytes - (
        0 if spec.tied else spec.vocab * spec.hidden * spec.dtype_bytes
    )


def measure(args: argparse.Namespace, model: Any, decoder: Decoder, experts: Resident, batch: int) -> dict[str, Any]:
    """Milliseconds per step of each contender with `batch` sequences."""
    most = CONTEXT + (args.rounds + 1) * args.tokens + 1
    contenders: dict[str, Any] = {"edgemoe": Ours(decoder, experts, batch, most)}
    contenders |= {name: Theirs(model, name) for name in args.implementations.split(",") if name}
    streamer = Streamer(decoder.kernels, experts.slab)
    taken: dict[str, list[float]] = {name: [] for name in (*contenders, "stream")}
    prompt = torch.randint(0, args.vocab, (batch, CONTEXT))
    for contender in contenders.values():
        contender.feed(prompt)
        contender.feed(prompt[:, :1])
    for _ in range(args.rounds):
        steps = list(torch.randint(0, args.vocab, (args.tokens, batch, 1)))
        experts.touched = 0
        for name, contender in contenders.items():
            taken[name].append(seconds(contender.feed, steps))
        step_bytes = experts.touched * decoder.spec.expert_bytes // args.tokens + dense_bytes(decoder)
        reads = [step_bytes] * min(args.tokens, max(1, experts.slab.nbytes // step_bytes))
        taken["stream"].append(seconds(streamer.read, reads))
    return report(batch, step_bytes, {name: median(values) * 1e3 for name, values in taken.items()}, decoder)


def report(batch: int, step_bytes: int, ms: dict[str, float], decoder: Decoder) -> dict[str, Any]:
    stream_ms, ours_ms = ms.pop("stream"), ms["edgemoe"]
    theirs = {name: value for name, value in ms.items() if name != "edgemoe"}
    best = min(theirs, key=lambda name: theirs[name]) if theirs else None
    result: dict[str, Any] = {
        "batch": batch,
        "step_mb": round(step_bytes / 1e6, 1),
        "stream_ms": round(stream_ms, 2),
        "stream_gb_per_s": round(step_bytes / stream_ms / 1e6, 1),
        "edgemoe_ms": round(ours_ms, 2),
        "edgemoe_tokens_per_s": round(batch * 1e3 / ours_ms, 1),
        "overhead_ms": round(ours_ms - stream_ms, 2),
        "overhead_us_per_layer": round((ours_ms - stream_ms) * 1e3 / decoder.spec.layers, 1),
    }
    if best is not None:
        result["transformers_ms"] = {name: round(value, 2) for name, value in theirs.items()}
        result["ratio"] = round(theirs[best] / ours_ms, 2)
        result["overhead_ratio"] = round((theirs[best] - stream_ms) / (ours_ms - stream_ms), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "layers": 16,
        "hidden": 1024,
        "experts": 64,
        "expert-width": 512,
        "top-k": 8,
        "vocab": 32000,
        "rounds": 7,
        "tokens": 8,
        "threads": len(os.sched_getaffinity(0)),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batches", default="1,8,16", help="numbers of sequences decoded at once")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help="of transformers' experts")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = make_oracle(args)
    kernels = Kernels(args.threads, args.dtype == "bfloat16")
    decoder = make_decoder(model, kernels)
    experts = Resident(decoder.spec, kernels, model)
    results = []
    for batch in map(int, args.batches.split(",")):
        results.append(measure(args, model, decoder, experts, batch))
        if not args.json:
            print(json.dumps(results[-1], indent=2), flush=True)
    machine = f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}"
    print(json.dumps({"machine": machine, "crossover": experts.crossover, "decode": results}))


if __name__ == "__main__":
    main()
