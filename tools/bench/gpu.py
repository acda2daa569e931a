"""What a GPU gives: copies into it, experts and whole decode steps out of its memory, and what a miss costs.

    python -m tools.bench.gpu [--layers 8] [--hidden 2048] [--width 768] [--experts 128] [--top-k 8] [--device cuda:0]

Layers of Qwen3-30B-A3B's shape by default, with blank experts: the time does not depend on what they hold. Routing
is uniformly random, the worst case for a cache. The last line is one JSON object. `--device emulated` tries the
script itself on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file

from edgemoe.config.budgets import DeviceBudget
from edgemoe.engine.driver import SequenceDriver
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.moe import Fetching
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.model.decoder import Decoder
from edgemoe.policy.baselines import LRU
from edgemoe.types.experts import ExpertGeometry, Tier

CONTEXT = 256  # tokens in the cache before a decode step is timed
BATCHES = (1, 8, 64, 512)


class BlankStore:
    """Experts of zeros, at once."""

    def __init__(self, geometry: ExpertGeometry) -> None:
        self._geometry = geometry

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._geometry.expert_bytes(0)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        await asyncio.sleep(0)


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

    def metrics(self) -> dict[str, object]:
        with self.tiers(1.0) as tiers:
            self._fill(tiers)
            link = tiers.loader.links[0].stats
            fixed_s, per_byte_s = link.cost()
            found: dict[str, object] = {
                "expert_mb": self.geometry.expert_bytes(0) / 1e6,
                "h2d_gb_per_s": link.bytes_per_s / 1e9,
                "h2d_expert_us": (fixed_s + per_byte_s * self.geometry.stride_bytes(0)) * 1e6,
                "hits": [self._hits(tiers, tokens) for tokens in BATCHES],
                "decode": [self._decode(tiers, batch) for batch in (1, 8)],
            }
        found["misses"] = [self._misses(prefetch) for prefetch in (False, True)]
        return found

    @contextlib.contextmanager
    def tiers(self, share: float, *, prefetch: bool = False) -> Iterator[ExpertTiers]:
        """Everything in RAM, and a share of it on the device."""
        geometry, policy = self.geometry, LRU(self.geometry.layers, self.geometry.experts)
        everything = geometry.all_bytes
        memory = TierMemory(everything, [DeviceBudget(self.kind, int(share * everything), 8e9)])
        policies = {Tier.VRAM: policy, Tier.RAM: policy}
        tiers = ExpertTiers(
            geometry, BlankStore(geometry), memory, policies, None, fetching=Fetching(prefetch=prefetch)
        )
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

    def _fill(self, tiers: ExpertTiers) -> None:
        """Waits until every slot of the device is in use and its link is quiet."""
        while tiers.residency.devices[0].free or not tiers.loader.links[0].idle():
            time.sleep(0.01)
        self._synchronize()

    def _hits(self, tiers: ExpertTiers, tokens: int) -> dict[str, float]:
        """One layer's experts, all of them on the device."""
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
        """Whole steps of the decoder, every expert a hit."""
        decoder, spec = self._decoder(), self.spec
        sequences = SequenceDriver(spec, batch, CONTEXT, self.device)
        sequences.step([[n] * (CONTEXT - 1) for n in range(batch)])  # not computed: what they attend to is zeros
        _, step = sequences.step([[n] for n in range(batch)])
        seconds = self._time(lambda: decoder.forward(step, sequences.cache, tiers.experts), 16)
        return {"batch": batch, "step_ms": seconds * 1e3, "layer_us": seconds / spec.layers * 1e6}

    def _misses(self, prefetch: bool) -> dict[str, float | bool]:
        """Single tokens with a quarter of the experts on the device; with `prefetch` the next layer is known."""
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
        """Seconds of one deed: the median of rounds, after one to warm up."""
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
    print(json.dumps(Bench(parser.parse_args()).metrics()))


if __name__ == "__main__":
    main()
