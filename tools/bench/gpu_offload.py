"""Decode steps on a GPU that holds a part of the experts; the others are in pinned RAM.

    python -m tools.bench.gpu_offload [--shape C] [--layers 12] [--shares 1,.65,.5,.25] [--policy lru] [--rows 1]

Each share decodes the same tokens with the same experts, a Markov chain of Zipf-like popularities: the gates are
given biases that choose them. Logits must equal the first share's bit for bit. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.config.budgets import DeviceBudget
from edgemoe.engine.driver import SequenceDriver
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compiled_parts import TIERS
from edgemoe.experts.predict.controller import PredictionController, PredictorFiles
from edgemoe.jit.object_cache import link
from edgemoe.model.decoder import Decoder
from edgemoe.model.feed_forward import Gate
from edgemoe.types.experts import Tier
from edgemoe.types.step import Batch, StepMeta
from tools.bench.filling import RandomStore, fill, running
from tools.bench.gpu import KERNELS, SHAPES, Bench, say

CONTEXT, BIAS = 256, 100.0  # tokens before the first step; added to the scores of the chosen experts
READY_S = 90.0  # that the learned policy has to be compiled


class DistinctStore(RandomStore):
    """A store of random experts, no two of them equal in a layer: rows of gates begin elsewhere."""

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        await super().read(layer, expert, into)
        geometry = self._geometry
        line = geometry.encoding(layer).row_bytes(geometry.hidden)
        gates = np.frombuffer(into, np.uint8)[: 2 * geometry.width * line]
        gates[:] = np.roll(gates, (1 + expert) * line)


def chain(
    layers: int, experts: int, k: int, tokens: int, power: float = 0.9, keep: float = 0.3
) -> npt.NDArray[np.int64]:
    """Returns the experts [tokens, L, k] of a chain: each is kept with `keep`, the others are drawn by popularity."""
    rng, out = np.random.default_rng(7), np.zeros((tokens, layers, k), np.int64)
    for layer in range(layers):
        weight = np.log(((np.arange(experts) + 3.0) ** -power)[rng.permutation(experts)])
        last = rng.permutation(experts)[:k]
        for token in range(tokens):
            scores = weight + rng.gumbel(size=experts)
            scores[last[rng.random(k) < keep]] = np.inf
            last = np.argsort(-scores, kind="stable")[:k]
            out[token, layer] = last
    return out


@dataclass(frozen=True)
class Plan:
    """The steps of each run: `warm` ones first, then the timed ones."""

    warm: int
    timed: int
    rows: int

    @property
    def steps(self) -> int:
        return self.warm + self.timed


class OffloadBench(Bench):
    """The same decode steps with a part of the experts on the device."""

    def prepare(self, plan: Plan) -> None:
        """Makes dense weights, and the biases of the gates for each step."""
        geometry, self.plan = self.geometry, plan
        self.decoder: Decoder = self._decoder()
        shape = geometry.layers, geometry.experts
        self._bias = torch.zeros(shape, device=self.device)
        for row, gate in zip(self._bias, self.decoder.gates, strict=True):
            _steer(gate, row)
        ids = chain(*shape, geometry.top_k, plan.steps)
        self._wanted = torch.zeros((plan.steps, *shape), device=self.device)
        self._wanted.scatter_(2, torch.from_numpy(ids).to(self.device), BIAS)

    def run(self, share: float, policy: str) -> tuple[dict[str, object], torch.Tensor]:
        """Decodes all steps. Returns the figures of the timed ones, and the logits of each step's first row."""
        plan, made = self.plan, self._steps()
        logits = torch.zeros((plan.steps, self.spec.vocab), device=self.device)
        times, before = [], np.zeros(3, np.int64)
        with self._tiers(share, policy) as (tiers, controller):
            began_s = time.perf_counter()
            for number, (meta, batch) in enumerate(made):
                if number == plan.warm:
                    before, loaded = np.array(tiers.residency.served), tiers.residency.usage(Tier.VRAM).moved
                    stall_s = sum(tiers.experts.stall_s)
                self._bias.copy_(self._wanted[number])
                start_s = time.perf_counter()
                ids = tiers.experts.begin_step(meta)
                controller.on_step_begun(meta, ids)
                out = self.decoder.forward(batch, self._cache, tiers.experts)
                routing = tiers.experts.end_step()
                controller.observe(routing)
                times.append(time.perf_counter() - start_s)
                logits[number] = out[0]
            timed, served = times[plan.warm :], np.array(tiers.residency.served) - before
            step_s, misses = median(timed), served[1:].sum() / plan.timed
            mean_s, bytes_ = float(np.mean(timed)), self.geometry.stride_bytes(0)
            figures: dict[str, object] = {
                "share": share,
                "policy": policy,
                "layer_us": step_s / self.spec.layers * 1e6,
                "mean_us": mean_s / self.spec.layers * 1e6,
                "first_us": median(times[: plan.timed]) / self.spec.layers * 1e6,
                "misses": float(misses),
                "hit_rate": float(served[0] / max(1, served.sum())),
                "loads": (tiers.residency.usage(Tier.VRAM).moved - loaded) / plan.timed,
                "read_gb_per_s": float(misses * bytes_ / mean_s / 1e9),
                "stall_us": (sum(tiers.experts.stall_s) - stall_s) / plan.timed / self.spec.layers * 1e6,
                "seconds": time.perf_counter() - began_s,
                "learned": {name: value for name, value in controller.metrics().items() if "step" in name},
            }
        return figures, logits

    def _steps(self) -> list[tuple[StepMeta, Batch]]:
        plan = self.plan
        sequences = SequenceDriver(self.spec, plan.rows, CONTEXT + plan.steps, self.device)
        sequences.step([[n] * (CONTEXT - 1) for n in range(plan.rows)])  # not computed: attention reads zeros
        self._cache = sequences.cache
        made = []
        for number in range(plan.steps):
            meta, batch = sequences.step([[(7 * number + n) % self.spec.vocab] for n in range(plan.rows)])
            tables = [list(table) for table in batch.block_tables]
            made.append((meta, replace(batch, block_tables=tables)))
        return made

    @contextlib.contextmanager
    def _tiers(self, share: float, policy: str) -> Iterator[tuple[ExpertTiers, PredictionController]]:
        """Builds tiers with all experts in RAM and a share of them on the device, under a live policy."""
        geometry = self.geometry
        controller = PredictionController(
            geometry.layers, geometry.experts, geometry.top_k, kept=PredictorFiles(kernels=KERNELS)
        )
        try:
            ranks = controller.policy if policy == "learned" else controller.meanwhile
            everything = geometry.all_bytes
            memory = TierMemory(everything, [DeviceBudget(self.kind, int(share * everything), 5e10)])
            policies = {Tier.VRAM: ranks, Tier.RAM: ranks}
            tiers = ExpertTiers(geometry, DistinctStore(geometry), memory, policies, None)
            if policy == "learned":
                controller.attach(tiers.residency, tiers.loader, geometry)
                controller.wait_idle(READY_S)
            with running(tiers):
                fill(tiers)
                while not tiers.residency.resident_mask(Tier.RAM).all():
                    time.sleep(0.002)
                self._synchronize()
                yield tiers, controller
        finally:
            controller.close()


def _steer(gate: Gate, bias: torch.Tensor) -> None:
    """Makes a gate choose by its scores and a bias [E]."""
    gate.selection_bias = bias


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="C", choices=SHAPES)
    parser.add_argument("--encoding", default="int4", help="of the experts (%(default)s)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--warm", type=int, default=700, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--timed", type=int, default=200)
    parser.add_argument("--shares", default="1,.65,.5,.25", help="of the experts on the device (%(default)s)")
    parser.add_argument("--policy", default="learned", help="learned, lru, or both by commas (%(default)s)")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    began_s = time.perf_counter()
    link(TIERS.codes, Path(KERNELS))
    bench = OffloadBench(SHAPES[args.shape], args.layers, args.encoding, args.device)
    bench.prepare(Plan(args.warm, args.timed, args.rows))
    say("prepared_s", time.perf_counter() - began_s)
    first: torch.Tensor | None = None
    for policy in args.policy.split(","):
        for share in map(float, args.shares.split(",")):
            with torch.inference_mode():
                figures, logits = bench.run(share, policy)
            first = logits if first is None else first
            figures["equal_steps"] = int((logits == first).all(1).sum())
            say("offload", figures)


if __name__ == "__main__":
    main()
