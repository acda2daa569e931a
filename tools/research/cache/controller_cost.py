"""The cost of learning from every step, and the misses that fewer updates of the forecast cause.

python -m tools.research.cache.controller_cost cost     # or start, step, looks TRACE...
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import mean

from edgemoe.jit.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np
import torch

from edgemoe.experts.predict.controller import PredictionController, PredictorFiles
from edgemoe.experts.predict.next_use import NextUsePredictor, write_state
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.policy.cache_ranks import LRU
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.replay_policies import PolicyMaker
from edgemoe.replay.run import replay
from edgemoe.replay.trace import Trace, load
from edgemoe.telemetry.metrics import LEARNED_SECONDS
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import LivePolicy
from edgemoe.types.step import StepRouting
from tools.bench.stats import interval
from tools.research.cache.replay import BASELINES, MAKERS

SHAPES = ((26, 64, 6), (48, 128, 8), (61, 256, 8))
SHARES = (0.25, 0.5)


def looks(args: Namespace) -> None:
    """Measures the closed share of the gap between the best of LRU, LFU and LFRU, and Belady's optimum."""
    trace = load(args.traces, limit=args.tokens)
    print(f"{', '.join(file.name for file in args.traces)}, {trace.tokens} tokens, scored on the second half")
    missed = {name: misses(trace, name) for name in (*BASELINES, "belady")}
    best = [min(missed[name][i] for name in BASELINES) for i in range(len(SHARES))]
    print("| looks a step | gap closed at 25 % | 50 % |\n|---|---|---|")
    for each in (4.0, 3.0, 2.0, 1.0, 0.5, 0.25, 0.0):
        closed = []
        for seed in range(args.seeds):
            some = misses(trace, "sparing", sparing(each, seed))
            closed.append([(b - m) / (b - o) for b, m, o in zip(best, some, missed["belady"], strict=True)])
        print(f"| {each:g} | {' | '.join(f'{share:.3f}' for share in np.mean(closed, axis=0))} |", flush=True)


class Sparing(LearnedPolicy):
    """A policy with a number of updates a step; below 1, one in some of the steps."""

    def __init__(self, trace: Trace, looks: float, seed: int) -> None:
        super().__init__(trace.layers, trace.experts, trace.top_k, seed)
        self._looks, self._due = looks, 0.0

    def end(self, routing: StepRouting | None = None) -> None:
        super().end(routing)
        self._due = self._due % 1 + self._looks
        self.predictor.set_looks(int(self._due))  # independent of the time budget


def sparing(looks: float, seed: int) -> PolicyMaker:
    """Returns the maker of a policy with `looks` updates a step."""
    return lambda trace, batch: Sparing(trace, looks, seed)


def misses(trace: Trace, name: str, make: PolicyMaker | None = None) -> list[int]:
    """Returns the misses of the second half at each share."""
    slots = [round(share * trace.layers * trace.experts) for share in SHARES]
    machine = BoxSpec(1e-3, 1 << 20, 8e9, 3e9, 1.0, False)
    return [each.misses for each in replay(trace, name, slots, 1, 0.5, machine, {name: make} if make else MAKERS)]


def cost(args: Namespace) -> None:
    """Measures processor time per token: on the compute thread, with ranks for every layer, and beside it."""
    print("| layers x experts | tokens remembered | looks | compute thread, us a token | beside it | both |")
    print("|---|---|---|---|---|---|")
    for layers, experts, top_k in SHAPES:
        predictor, random = NextUsePredictor(layers, experts, top_k), np.random.default_rng(0)
        fill(predictor)
        favour = 1 / np.arange(1, experts + 1)
        ids = np.argsort(random.random((300, layers, experts)) ** (1 / favour), axis=2)[:, :, -top_k:].astype(np.int16)
        for number in (4, 2, 1, 0):
            predictor.set_looks(number)
            here_s, beside_s = [], []
            for token in ids:
                choices, own_s = np.full((layers, 1, top_k), -1, np.int16), 0.0
                began_s = time.thread_time()
                predictor.begin(("a",), choices, np.zeros(1, np.int64))
                for layer, row in enumerate(token):
                    choices[layer] = row
                    predictor.update_ranks()
                    middle_s = time.thread_time()
                    predictor.work()
                    own_s += time.thread_time() - middle_s
                predictor.end()
                here_s.append(time.thread_time() - began_s - own_s)
                middle_s = time.thread_time()
                predictor.work()
                beside_s.append(own_s + time.thread_time() - middle_s)
            here, beside = (1e6 * mean(each[100:]) for each in (here_s, beside_s))
            sizes = f"{layers} x {experts} | {predictor.memory.slots} | {number}"
            print(f"| {sizes} | {here:.0f} | {beside:.0f} | {here + beside:.0f} |", flush=True)


def fill(predictor: NextUsePredictor) -> None:
    """Fills the memory, so that every token has its long-term cost."""
    memory, random = predictor.memory, np.random.default_rng(0)
    memory.written = memory.slots
    words = (random.integers(0, 1 << 62, memory.chosen.shape).astype(np.uint64) for _ in range(2))
    memory.chosen[:] = next(words) & next(words)
    used = np.uint64((1 << (predictor.experts - 1) % 64 + 1) - 1)
    memory.chosen[:, -1] &= used
    memory.soon[:] = random.integers(0, 255, memory.soon.shape, np.uint8)
    memory.before[:], memory.after[:] = np.arange(memory.slots) - 1, np.arange(memory.slots) + 1
    memory.after[-1] = -1


def start(args: Namespace) -> None:
    """Measures wall and processor seconds until the policy is ready, without compiled code and with it.

    Each run is a process of its own.
    """
    code = (
        "import sys, time; from pathlib import Path;"
        "from edgemoe.experts.predict.controller import PredictionController, PredictorFiles;"
        "began_s, spent_s = time.perf_counter(), time.process_time();"
        "it = PredictionController(48, 128, 8, kept=PredictorFiles(None, Path(sys.argv[1]))); assert it.wait_idle(300);"
        "print(f'ready after {time.perf_counter() - began_s:.2f} s, {time.process_time() - spent_s:.2f} s computed');"
        "it.close()"
    )
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            subprocess.run([sys.executable, "-c", code, folder], check=True)


class Switch:
    """A policy that switches between two."""

    margin = 0.0

    def __init__(self, policy: LivePolicy) -> None:
        self.policy = policy

    def touch(self, layer: int, experts: IntArray) -> None:
        self.policy.touch(layer, experts)

    def rank(self, layer: int) -> FloatArray:
        return self.policy.rank(layer)

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self.policy.fuse_chances(layer, experts, chance)


def full_memory(path: Path) -> None:
    """Saves a state with a full memory."""
    predictor = NextUsePredictor(48, 128, 8)
    fill(predictor)
    write_state(path, predictor.learned())


def step(args: Namespace) -> None:
    """Measures steps with everything resident, so that they differ by the controller alone."""
    from edgemoe.cli.plan.measure import ResidentModel
    from tools.bench.make_model import make_config

    shape = {"layers": 48, "hidden": args.hidden, "heads": 8, "kv_heads": 2, "head_dim": 64, "experts": 128}
    shape |= {"expert_width": args.hidden // 2, "top_k": 8, "vocab": 8192, "context": 4096}
    config = make_config(Namespace(family="qwen3_moe", dtype="bfloat16", tied=False, **shape))
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lru = LRU(48, 128)
    switch = Switch(lru)
    ours = ResidentModel.plain(config, args.threads, switch)
    tiers = ours.tiers.experts
    with tempfile.TemporaryDirectory() as scratch:
        full_memory(Path(scratch) / "state")
        controller = PredictionController(48, 128, 8, kept=PredictorFiles(Path(scratch) / "state"))
        controller.wait_idle(120)
    plain_begin, plain_end = tiers.begin_step, tiers.end_step

    def looked(meta):  # type: ignore[no-untyped-def]
        choices = plain_begin(meta)
        controller.on_step_begun(meta, choices)
        return choices

    def observed():  # type: ignore[no-untyped-def]
        routing = plain_end()
        controller.observe(routing)
        return routing

    with_s: list[float] = []
    without_s: list[float] = []
    shares: list[float] = []
    glances: list[float] = []
    for number in range(args.rounds + 2):
        tokens = torch.randint(0, 8192, (args.steps, 1, 1), generator=torch.Generator().manual_seed(number))
        for follows in (number % 2 == 0, number % 2 == 1):
            ours.begin(1, args.steps + 16)
            ours.feed(torch.randint(0, 8192, (1, 16)))
            switch.policy = controller.policy if follows else lru
            tiers.begin_step = looked if follows else plain_begin  # type: ignore[method-assign]
            tiers.end_step = observed if follows else plain_end  # type: ignore[method-assign]
            spent_s, glanced = controller.metrics()[LEARNED_SECONDS], controller.predictive.glances
            taken_s, _ = ours.decode(tokens)
            if follows:
                controller.wait_idle(10)
                shares.append((controller.metrics()[LEARNED_SECONDS] - spent_s) / (taken_s * args.steps))
                glances.append((controller.predictive.glances - glanced) / args.steps)
            (with_s if follows else without_s).append(taken_s)
    more, half = interval([1e2 * (a / b - 1) for a, b in zip(with_s[2:], without_s[2:], strict=True)])
    print(
        f"step {1e3 * mean(without_s[2:]):.2f} ms without, slower by {more:+.2f} % +- {half:.2f} with it; "
        f"processor time {mean(shares[2:]):.2%} of the step's; {mean(glances[2:]):.0%} of the steps without a look"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    kind = kinds.add_parser("cost", help="processor time per token, with a full memory")
    kind.set_defaults(run=cost)
    kind = kinds.add_parser("step", help="steps of 48 x 128 experts, with and without it")
    for name, value in (("rounds", 9), ("steps", 60), ("threads", 1), ("hidden", 512)):
        kind.add_argument(f"--{name}", type=int, default=value)
    kind.set_defaults(run=step)
    kind = kinds.add_parser("start", help="time until the policy is ready")
    kind.set_defaults(run=start)
    kind = kinds.add_parser("looks", help="gap closed by the number of updates a step")
    kind.add_argument("traces", type=Path, nargs="+")
    kind.add_argument("--tokens", type=int, default=3000)
    kind.add_argument("--seeds", type=int, default=2)
    kind.set_defaults(run=looks)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
