"""What following every step costs, and what following only some of them costs in misses.

python -m tools.bench.controller cost                       processor time per token, memory of recall full
python -m tools.bench.controller step [--rounds 9]          a model of 48 x 128 decodes with and without it, in turns
python -m tools.bench.controller duty TRACE... [--tokens N] misses where a share of the steps is followed
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import mean

from edgemoe.kernels.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np
import torch

from edgemoe.experts.predict.controller import Controller
from edgemoe.experts.predict.learned_policy import LearnedPolicy
from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.policy.baselines import LRU
from edgemoe.replay.cache import Cache
from edgemoe.replay.trace import chosen, load
from edgemoe.telemetry.metrics import LEARNED_SECONDS
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import LivePolicy
from tools.bench.stats import interval

SHAPES = ((26, 64, 6), (48, 128, 8), (61, 256, 8))


class Sparing(LearnedPolicy):
    """Follows a share of the steps and glances at the others, as the controller does where time is short."""

    def __init__(self, layers: int, experts: int, top_k: int, share: float) -> None:
        super().__init__(layers, experts, top_k)
        self._share, self._credit, self._seen = share, 0.0, [np.empty(0, np.int64)] * layers

    def begin(self, sequences: tuple[int, ...]) -> None:  # type: ignore[override]
        self._credit += self._share
        self._names, self._follows = sequences, self._credit >= 1
        if self._follows:
            self._credit -= 1
            super().begin(sequences)

    def touch(self, layer: int, experts: IntArray) -> None:
        if self._follows:
            super().touch(layer, experts)
        else:
            assert self._routed is not None
            self._seen[layer] = np.asarray(self._routed, np.int64)

    def end(self) -> None:
        if self._follows:
            super().end()
        else:
            self.predictor.glance(self._names, np.stack(self._seen))


def duty(args: Namespace) -> None:
    trace = load(args.traces, limit=args.tokens)
    total = trace.layers * trace.experts
    print(f"{', '.join(file.name for file in args.traces)}, {trace.tokens} tokens, scored on the second half")
    print("| share of steps followed | misses at 25 % | 50 % |\n|---|---|---|")
    for share in (1.0, 0.5, 0.25, 0.0):
        policy = Sparing(trace.layers, trace.experts, trace.top_k, share)
        caches = [Cache(trace.layers, trace.experts, round(c * total)) for c in (0.25, 0.5)]
        halves, demands = [0, 0], 0
        for number, each in enumerate(trace.steps(1)):
            if number == trace.tokens // 2:
                halves, demands = [cache.misses for cache in caches], 0
            policy.begin(each.requests)
            for layer in range(trace.layers):
                experts = chosen(each.ids[:, layer])
                policy.route(each.ids[:, layer])
                policy.touch(layer, experts)
                demands += len(experts)
                for cache in caches:
                    cache.run(layer, experts, policy.rank(layer))
            policy.end()
        ratios = [(cache.misses - half) / demands for cache, half in zip(caches, halves, strict=True)]
        print(f"| {share:.0%} | {ratios[0]:.4f} | {ratios[1]:.4f} |", flush=True)


def cost(args: Namespace) -> None:
    print("| layers x experts | tokens remembered | followed, us a token | glanced at |\n|---|---|---|---|")
    for layers, experts, top_k in SHAPES:
        predictor, random = NextUsePredictor(layers, experts, top_k), np.random.default_rng(0)
        memory = predictor.memory
        memory.written = memory.slots
        memory.chosen[:] = random.integers(0, 1 << 62, memory.chosen.shape).astype(np.uint64) & random.integers(
            0, 1 << 62, memory.chosen.shape
        ).astype(np.uint64)
        memory.soon[:] = random.integers(0, 255, memory.soon.shape, np.uint8)
        memory.before[:], memory.after[:] = np.arange(memory.slots) - 1, np.arange(memory.slots) + 1
        memory.after[-1] = -1
        favour = 1 / np.arange(1, experts + 1)
        ids = np.argsort(random.random((300, layers, experts)) ** (1 / favour), axis=2)[:, :, -top_k:]
        times = []
        for follow in (True, False):
            for i, token in enumerate(ids):
                if i == 100:
                    began_s = time.thread_time()
                if follow:
                    predictor.begin(("a",))
                    for layer, row in enumerate(token):
                        predictor.see(layer, row[None], row)
                    predictor.end()
                else:
                    predictor.glance(("a",), token[:, None])
            times.append((time.thread_time() - began_s) / 200 * 1e6)
        print(f"| {layers} x {experts} | {memory.slots} | {times[0]:.0f} | {times[1]:.0f} |", flush=True)


class Switch:
    """A policy that is now one, now another."""

    def __init__(self, policy: LivePolicy) -> None:
        self.policy = policy

    def touch(self, layer: int, experts: IntArray) -> None:
        self.policy.touch(layer, experts)

    def rank(self, layer: int) -> FloatArray:
        return self.policy.rank(layer)

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self.policy.foresee(layer, experts, chance)


def full_memory(path: Path) -> None:
    """Saves a state in which every token costs what it costs in the long run."""
    predictor = NextUsePredictor(48, 128, 8)
    memory = predictor.memory
    memory.written, memory.before[:] = memory.slots, np.arange(memory.slots) - 1
    memory.chosen[:] = np.random.default_rng(0).integers(0, 1 << 62, memory.chosen.shape).astype(np.uint64)
    predictor.save(path)


def step(args: Namespace) -> None:
    """Everything is resident, so that the steps differ by the controller alone."""
    from tools.bench.decode import Ours
    from tools.bench.make_model import make_config

    shape = {"layers": 48, "hidden": args.hidden, "heads": 8, "kv_heads": 2, "head_dim": 64, "experts": 128}
    shape |= {"expert_width": args.hidden // 2, "top_k": 8, "vocab": 8192, "context": 4096}
    config = make_config(Namespace(family="qwen3_moe", dtype="bfloat16", tied=False, **shape))
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lru = LRU(48, 128)
    switch = Switch(lru)
    ours = Ours(config, args.threads, switch)
    tiers = ours.tiers.experts
    with tempfile.TemporaryDirectory() as scratch:
        full_memory(Path(scratch) / "state")
        controller = Controller(48, 128, 8, state_file=Path(scratch) / "state")
        controller.wait_idle(120)
    plain = tiers.end_step

    def observed():  # type: ignore[no-untyped-def]
        routing = plain()
        controller.observe(routing)
        return routing

    with_s, without_s, shares, glances = [], [], [], []
    for number in range(args.rounds + 2):
        tokens = torch.randint(0, 8192, (args.steps, 1, 1), generator=torch.Generator().manual_seed(number))
        for follows in (number % 2 == 0, number % 2 == 1):
            ours.begin(1, args.steps + 16)
            ours.feed(torch.randint(0, 8192, (1, 16)))
            switch.policy = controller.policy if follows else lru
            tiers.end_step = observed if follows else plain  # type: ignore[method-assign]
            spent_s, glanced = controller.metrics()[LEARNED_SECONDS], controller.glances
            taken_s, _ = ours.decode(tokens)
            if follows:
                controller.wait_idle(10)
                shares.append((controller.metrics()[LEARNED_SECONDS] - spent_s) / (taken_s * args.steps))
                glances.append((controller.glances - glanced) / args.steps)
            (with_s if follows else without_s).append(taken_s)
    more, half = interval([1e2 * (a / b - 1) for a, b in zip(with_s[2:], without_s[2:], strict=True)])
    print(
        f"step {1e3 * mean(without_s[2:]):.2f} ms without, slower by {more:+.2f} % +- {half:.2f} with it; "
        f"processor time {mean(shares[2:]):.2%} of the step's; {mean(glances[2:]):.0%} of the steps only glanced at"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    kind = kinds.add_parser("cost")
    kind.set_defaults(run=cost)
    kind = kinds.add_parser("step")
    for name, value in (("rounds", 9), ("steps", 60), ("threads", 1), ("hidden", 512)):
        kind.add_argument(f"--{name}", type=int, default=value)
    kind.set_defaults(run=step)
    kind = kinds.add_parser("duty")
    kind.add_argument("traces", type=Path, nargs="+")
    kind.add_argument("--tokens", type=int, default=6000)
    kind.set_defaults(run=duty)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
