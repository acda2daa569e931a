"""A GPU's speed: copies into it, experts and decode steps from its memory, and misses.

    python -m tools.bench.gpu [--only link,decode,kernels,hits,misses] [--shapes A,B,C] [--encoding int4] [--layers 12]

Random experts in the shapes of four models; routing is random too, the worst case for a cache. Decode steps run as
the engine runs them: as CUDA graphs where all experts are in VRAM. Each figure is printed at once as a JSON line.
`--device emulated` tests the script on a machine without a GPU, except for `link` and `kernels`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from edgemoe.config.budgets import DeviceBudget
from edgemoe.engine.driver import SequenceDriver
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compiled_parts import TIERS
from edgemoe.experts.compute.moe import FetchOptions
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.jit.object_cache import link
from edgemoe.model.decoder import Decoder
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import Tier
from edgemoe.types.step import StepMeta
from tools.bench.filling import RandomStore, fill, running

Figure = tuple[str, object]
KERNELS = Path(__file__).resolve().parents[2] / ".cache" / "kernels"  # shared with the tests and the demo
CONTEXT = 1024  # tokens in the cache before a decode step is timed
BATCHES = (1, 8, 64, 512)  # tokens of a layer
ROWS = (1, 2, 4, 8, 16)  # of a decode step


class Shape(NamedTuple):
    """The sizes of a model, which are like a published one's. `own` are fields of its configuration."""

    hidden: int
    width: int  # of an expert
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    own: dict[str, Any] | None = None


LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "intermediate_size": 10944,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
    "norm_topk_prob": False,
}
SHAPES = {
    "A": Shape(2048, 1408, 64, 6, 16, 16, 128),  # DeepSeek-V2-Lite, but for its attention
    "B": Shape(2880, 2880, 32, 4, 64, 8, 64),  # gpt-oss-20b
    "C": Shape(2048, 768, 128, 8, 32, 4, 128),  # Qwen3-30B-A3B
    "D": Shape(2048, 1408, 64, 6, 16, 16, 128, LATENT),  # DeepSeek-V2-Lite
}


class Bench:
    """One model's shape on one device."""

    def __init__(self, shape: Shape, layers: int, encoding: str, device: str) -> None:
        self.spec = spec_of(shape, layers, encoding)
        self.geometry = self.spec.geometry
        self.kind = device
        self.gpu = self.kind.startswith("cuda")
        self.device = torch.device(self.kind if self.gpu else "cpu")
        self._rng = np.random.default_rng(0)

    def figures(self, only: Collection[str]) -> Iterator[Figure]:
        """Yields the figures of these parts, by name."""
        if {"hits", "decode", "kernels"} & set(only):
            with self.tiers(1.0) as tiers:
                self._fill(tiers)
                if {"decode", "kernels"} & set(only):
                    decoder = self._decoder()
                    for rows in ROWS:
                        yield "decode", self._decode(decoder, tiers, rows, "kernels" in only)
                if "hits" in only:
                    yield "hits", [self._hits(tiers, tokens) for tokens in BATCHES]
        if "misses" in only:
            for prefetch in (False, True):
                yield f"misses{'_prefetch' * prefetch}", self._misses(prefetch)

    @contextlib.contextmanager
    def tiers(self, share: float, *, prefetch: bool = False) -> Iterator[ExpertTiers]:
        """Builds tiers with everything in RAM, and a share of it on the device."""
        geometry, policy = self.geometry, LRU(self.geometry.layers, self.geometry.experts)
        everything = geometry.all_bytes
        memory = TierMemory(everything, [DeviceBudget(self.kind, int(share * everything), 8e9)])
        policies = {Tier.VRAM: policy, Tier.RAM: policy}
        tiers = ExpertTiers(
            geometry, RandomStore(geometry), memory, policies, None, fetching=FetchOptions(prefetch=prefetch)
        )
        with running(tiers):
            yield tiers

    def _fill(self, tiers: ExpertTiers) -> None:
        """Waits until every slot of the device is used and its link is idle."""
        fill(tiers)
        self._synchronize()

    def _hits(self, tiers: ExpertTiers, tokens: int) -> dict[str, float]:
        """Measures one layer's experts, all of them on the device."""
        touched = 0

        def layer() -> None:
            nonlocal touched
            hidden, ids, weights = inputs[touched % len(inputs)]
            tiers.experts.forward(touched % self.geometry.layers, hidden, ids, weights)
            touched += 1

        inputs = [self._route(tokens) for _ in range(16)]
        seconds = self._time(layer, 64)
        distinct = float(np.mean([len(np.unique(ids.cpu().numpy())) for _, ids, _ in inputs]))
        return {
            "tokens": tokens,
            "layer_us": seconds * 1e6,
            "experts": distinct,
            "gb_per_s": distinct * self.geometry.expert_bytes(0) / seconds / 1e9,
            "tflop_per_s": tokens
            * self.geometry.top_k
            * 6
            * self.geometry.hidden
            * self.geometry.width
            / seconds
            / 1e12,
        }

    def _decode(self, decoder: Decoder, tiers: ExpertTiers, rows: int, kernels: bool) -> dict[str, Any]:
        """Measures whole steps of the decoder; every expert is a hit. `kernels` tells the kernels of a step apart."""
        spec, geometry = self.spec, self.geometry
        sequences = SequenceDriver(spec, rows, CONTEXT, self.device)
        sequences.step([[n] * (CONTEXT - 1) for n in range(rows)])  # not computed: attention reads zeros
        _, step = sequences.step([[7 * n] for n in range(rows)])

        ones = np.ones(rows, np.int64)
        names = tuple(map(str, range(rows)))
        meta = StepMeta(names, ones, ones > 0, step.tokens.numpy(), step.positions.numpy())

        def forward() -> None:
            tiers.experts.begin_step(meta)
            decoder.forward(step, sequences.cache, tiers.experts)
            tiers.experts.end_step()

        served = tiers.residency.served[0]
        forward()
        experts = (tiers.residency.served[0] - served) / spec.layers
        seconds = self._time(forward, 24)
        kv_bytes = rows * spec.kv_layout.held_bytes(CONTEXT) // spec.layers
        dense = sum(math.prod(shape) for name, shape in dense_shapes(spec).items() if ".layers." in name) // spec.layers
        read = 2 * dense + experts * geometry.expert_bytes(0) + kv_bytes
        figures: dict[str, Any] = {
            "rows": rows,
            "step_ms": seconds * 1e3,
            "layer_us": seconds / spec.layers * 1e6,
            "experts": experts,
            "layer_mb": read / 1e6,
            "gb_per_s": read * spec.layers / seconds / 1e9,
        }
        if kernels and self.gpu:
            figures["kernels_us"] = kernel_times(forward, spec.layers)
        return figures

    def _misses(self, prefetch: bool) -> dict[str, float | bool]:
        """Measures single tokens with a quarter of the experts on the device; with `prefetch` the next layer is
        known.
        """
        with self.tiers(0.25, prefetch=prefetch) as tiers:
            self._fill(tiers)
            layers, number = self.geometry.layers, 0
            inputs = [self._route(1) for _ in range(64 * layers)]

            def layer() -> None:
                nonlocal number
                at, following = number % layers, inputs[(number + 1) % len(inputs)][1]
                if prefetch and at + 1 < layers:
                    probs = torch.zeros((1, self.geometry.experts), device=self.device)
                    tiers.experts.hint(at + 1, probs.scatter_(1, following, 1.0))
                tiers.experts.forward(at, *inputs[number % len(inputs)])
                number += 1

            before = list(tiers.residency.served)
            seconds = self._time(layer, 32 * layers, rounds=1)
            served = np.subtract(tiers.residency.served, before)
            misses = served[1:].sum() / served.sum() * self.geometry.top_k
            rate = tiers.loader.links[0].stats.bytes_per_s
            return {
                "prefetch": prefetch,
                "layer_us": seconds * 1e6,
                "misses_per_layer": float(misses),
                "copy_us_per_layer": float(misses * self.geometry.stride_bytes(0) / rate * 1e6),
                "wasted_mb": tiers.residency.devices[0].usage.wasted_bytes / 1e6,
            }

    def _route(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        geometry = self.geometry
        ids = np.argsort(self._rng.random((tokens, geometry.experts)), axis=1)[:, : geometry.top_k]
        return (
            torch.randn(tokens, geometry.hidden, dtype=torch.bfloat16, device=self.device),
            torch.from_numpy(ids).to(self.device),
            torch.full((tokens, geometry.top_k), 1 / geometry.top_k, device=self.device),
        )

    def _decoder(self) -> Decoder:
        weights = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in dense_shapes(self.spec).items()}
        with tempfile.TemporaryDirectory() as directory:
            save_file(weights, Path(directory) / "dense.safetensors")
            return Decoder.load(self.spec, Path(directory) / "dense.safetensors", self.device, graphs=True)

    def _time(self, deed: Callable[[], object], times: int, rounds: int = 3) -> float:
        """Returns the median seconds of a call over rounds, after one to warm up."""
        taken = []
        with torch.inference_mode():
            for _ in range(rounds + 1):
                self._synchronize()
                start = time.perf_counter()
                for _ in range(times):
                    deed()
                self._synchronize()
                taken.append((time.perf_counter() - start) / times)
        return median(taken[1:])

    def _synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)


def spec_of(shape: Shape, layers: int, encoding: str) -> ModelSpec:
    """Returns the spec of a model whose experts are encoded; "bfloat16" has them as they are."""
    spec = spec_from_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 32768,
            "hidden_size": shape.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.width,
            "num_experts_per_tok": shape.top_k,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "dtype": "bfloat16",
            **(shape.own or {}),
        }
    )
    return spec if encoding == spec.dtype else replace(spec, encodings=(encoding,) * layers)


def kernel_times(deed: Callable[[], object], layers: int, times: int = 5) -> dict[str, float]:
    """Returns the microseconds of each kernel, a layer, as the GPU's own records have them."""
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            deed()
        torch.cuda.synchronize()
    found = {event.key[:40]: event.self_device_time_total / times / layers for event in profile.key_averages()}
    return {name: us for name, us in sorted(found.items(), key=lambda each: -each[1]) if us >= 0.05}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="C", help="of models, by commas: A, B, C, D (%(default)s)")
    parser.add_argument("--encoding", default="int4", help="of the experts (%(default)s)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="link,decode,hits,misses", help="parts, by commas (%(default)s)")
    args = parser.parse_args()
    only = args.only.split(",")
    began_s = time.perf_counter()
    link(TIERS.codes, KERNELS)
    say("calls_of_tiers_compiled_s", time.perf_counter() - began_s)
    if "link" in only:
        from tools.bench.gpu_link import link_figures

        for name, figure in link_figures(torch.device(args.device)):
            say(name, figure)
    for shape in args.shapes.split(","):
        for part, figure in Bench(SHAPES[shape], args.layers, args.encoding, args.device).figures(only):
            say(f"{part}_{shape}", figure)


def say(name: str, figure: object) -> None:
    print(json.dumps({name: rounded(figure)}), flush=True)


def rounded(figure: Any) -> Any:
    """Returns a figure with four digits."""
    match figure:
        case dict():
            return {name: rounded(each) for name, each in figure.items()}
        case list():
            return [rounded(each) for each in figure]
        case float():
            return float(f"{figure:.4g}")
    return figure


if __name__ == "__main__":
    main()
