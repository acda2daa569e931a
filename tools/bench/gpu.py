"""A GPU's speed: copies into it, experts and decode steps from its memory, and misses.

    python -m tools.bench.gpu [--only link,hits,decode,misses] [--layers 8] [--hidden 2048] [--width 768]

Blank experts in Qwen3-30B-A3B's shape by default; routing is uniformly random, the worst case for a cache. Each figure
is printed at once as a JSON line. `--device emulated` tests the script on a machine without a GPU, except for `link`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import median
from typing import Any

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
from tools.bench.filling import BlankStore, fill, running

Figure = tuple[str, object]
KERNELS = Path(__file__).resolve().parents[2] / ".cache" / "kernels"  # shared with the tests and the demo
CONTEXT = 256  # tokens in the cache before a decode step is timed
BATCHES = (1, 8, 64, 512)


class Bench:
    """One model's shape on one device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.spec = _spec(args)
        spec = self.spec
        self.geometry = spec.geometry
        self.kind = args.device
        self.gpu = self.kind.startswith("cuda")
        self.device = torch.device(self.kind if self.gpu else "cpu")
        self._rng = np.random.default_rng(0)

    def figures(self, only: Collection[str]) -> Iterator[Figure]:
        """Yields the figures of these parts, by name."""
        began_s = time.perf_counter()
        link(TIERS.codes, KERNELS)
        yield "calls_of_tiers_compiled_s", time.perf_counter() - began_s
        if "link" in only:
            from tools.bench.gpu_link import link_figures

            yield from link_figures(self.device)
        if "hits" in only or "decode" in only:
            with self.tiers(1.0) as tiers:
                self._fill(tiers)
                if "decode" in only:
                    yield "decode", [self._decode(tiers, batch) for batch in (1, 8)]
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
            geometry, BlankStore(geometry), memory, policies, None, fetching=FetchOptions(prefetch=prefetch)
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

    def _decode(self, tiers: ExpertTiers, batch: int) -> dict[str, float]:
        """Measures whole steps of the decoder; every expert is a hit."""
        decoder, spec = self._decoder(), self.spec
        sequences = SequenceDriver(spec, batch, CONTEXT, self.device)
        sequences.step([[n] * (CONTEXT - 1) for n in range(batch)])  # not computed: attention reads zeros
        _, step = sequences.step([[n] for n in range(batch)])
        seconds = self._time(lambda: decoder.forward(step, sequences.cache, tiers.experts), 16)
        return {"batch": batch, "step_ms": seconds * 1e3, "layer_us": seconds / spec.layers * 1e6}

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
            return Decoder.load(self.spec, Path(directory) / "dense.safetensors", self.device)

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


def _spec(args: argparse.Namespace) -> ModelSpec:
    return spec_from_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 32768,
            "hidden_size": args.hidden,
            "num_hidden_layers": args.layers,
            "num_attention_heads": args.hidden // 64,
            "num_key_value_heads": max(1, args.hidden // 512),
            "head_dim": 128,
            "num_experts": args.experts,
            "moe_intermediate_size": args.width,
            "num_experts_per_tok": args.top_k,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "dtype": "bfloat16",
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 8, "hidden": 2048, "width": 768, "experts": 128, "top-k": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="link,hits,decode,misses", help="parts, by commas (%(default)s)")
    args = parser.parse_args()
    for name, figure in Bench(args).figures(args.only.split(",")):
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
