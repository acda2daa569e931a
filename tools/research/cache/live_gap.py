"""The live cache compared with a replay of its own recording: the same decisions, the same misses.

    python -m tools.research.cache.live_gap [--json] [--model demo|mid] [--capacity .25,.5] [--link 2,8,25]

Contenders decode in turns, round by round, behind an emulated link. Each recording is replayed by the same objects from
the same start. Differences are paired by round. results/live_gap.md describes the method.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from edgemoe.jit.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np
import torch

from edgemoe.config.settings import RecordSettings
from edgemoe.experts.predict.controller import restored
from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.experts.transfer.link_prefetch import IdleWindow
from edgemoe.policy.cache_ranks import LRU
from edgemoe.replay.bound import Belady, ByteBelady
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.named_policies import LFRU, LFU
from edgemoe.replay.replay_policies import next_uses
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.replay.trace import Trace
from edgemoe.telemetry.recorder import Recorder
from edgemoe.telemetry.routing_recording import AHEAD, RecordingHeader, read_recording
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import StepRouting
from tools.bench.stall import CONTENDERS, SEED, Model, Runner, learn, open_model
from tools.bench.stats import interval

NAMES = ("lru", "learned", "learned + prefetch")
GB = 1e9


class Live(NamedTuple):
    """One contender's live run, round by round."""

    rounds: list[dict[str, Any]]
    recording: Path
    slots: int
    looks: float  # share of the steps that had any
    idle_s: list[float]  # after each layer-step
    machine: BoxSpec  # for its replay


class Setting(NamedTuple):
    """The conditions of a run."""

    capacity: float
    link: float  # bytes/s
    rounds: int  # the unscored ones as well
    args: Namespace


class PaidPolicy(LearnedPolicy):
    """`learned` with updates that cost the processor time measured here."""

    def __init__(self, geometry: ExpertGeometry) -> None:
        self._spent_s, self._since_s = 0.0, time.thread_time()
        sizes = geometry.layers, geometry.experts, geometry.top_k
        super().__init__(*sizes, clock=lambda: self._spent_s + time.thread_time() - self._since_s)

    def rank(self, layer: int) -> FloatArray:
        self._since_s = time.thread_time()
        ranks = super().rank(layer)
        self._spent_s += time.thread_time() - self._since_s
        return ranks

    def end(self, routing: StepRouting | None = None) -> None:
        self._since_s = time.thread_time()
        super().end(routing)
        self._spent_s += time.thread_time() - self._since_s


def run_live(model: Model, setting: Setting, state: Path, lesson: list[StepRouting], scratch: Path) -> dict[str, Live]:
    """Runs all contenders in turns."""
    args, geometry = setting.args, model.spec.geometry
    header = RecordingHeader("", geometry.layers, geometry.experts, geometry.top_k, hints=True)
    share = Namespace(**{**vars(args), "share": setting.capacity})
    with ExitStack() as open_:
        runners, recorders, rounds = {}, [], dict[str, list[dict[str, Any]]]()
        for name in NAMES:
            shutil.copyfile(state, own := scratch / f"{name} state")
            runners[name] = runner = Runner(model, CONTENDERS[name], setting.link, share, own, hints=True)
            open_.enter_context(closing(runner))
            folder = str(scratch / name)
            runner.recorder = Recorder(RecordSettings(dir=folder, max_bytes=1 << 33), header, 1 << 31)
            recorders.append(open_.enter_context(closing(runner.recorder)))
            if runner.controller is None:
                runner.teach(lesson)
            rounds[name] = []
        gc.collect()
        idle_s = watched(runners[NAMES[-1]].tiers.loader.gap)
        for number in range(setting.rounds):
            turn = number % len(NAMES)
            for name in NAMES[turn:] + NAMES[:turn]:
                result = runners[name].run(1000 + number, args.tokens)
                del result["routings"]
                rounds[name].append(result)
            assert len({tuple(each[-1].pop("tokens")) for each in rounds.values()}) == 1, "other tokens"
        slots = {name: runner.tiers.residency.devices[0].slots for name, runner in runners.items()}
        looks = {name: _looks(runner) for name, runner in runners.items()}
    assert not any(recorder.dropped for recorder in recorders)
    machine = BoxSpec(0.0, round(args.expert_bytes), setting.link, 1e9, 1.0, True)
    return {name: Live(rounds[name], scratch / name, slots[name], looks[name], idle_s, machine) for name in NAMES}


def watched(window: IdleWindow) -> list[float]:
    """Returns a list that collects the idle times after layer-steps from now on, except the last one."""
    times_s, since_s = list[float](), math.nan
    begin, demand = window.begin, window.demand

    def begins(layer: int) -> None:
        nonlocal since_s
        since_s = time.monotonic()
        begin(layer)

    def ends(layer: int) -> None:
        if since_s == since_s:
            times_s.append(time.monotonic() - since_s)
        demand(layer)

    window.begin, window.demand = begins, ends  # type: ignore[method-assign]
    return times_s


def _looks(runner: Runner) -> float:
    if runner.controller is None:
        return 0.0
    foresight = runner.controller.predictive
    return foresight.studies / max(1, foresight.studies + foresight.glances)


def recorded(folder: Path) -> Iterator[ReplayedStep]:
    """Yields the steps of a recording."""
    for path in sorted(folder.iterdir()):
        for step in read_recording(path)[1]:
            hints = step.hints.get(AHEAD)
            yield ReplayedStep(step.meta, step.ids, None if hints is None else hints.astype(np.float32))


def replayed(
    model: Model, setting: Setting, name: str, live: Live, state: Path, lesson: list[StepRouting]
) -> dict[str, list[float]]:
    """Replays one contender's recording; returns misses and stall, ms per token, of each round."""
    sizes, machine = model.spec.geometry, live.machine
    geometry = machine.geometry(sizes.layers, sizes.experts, sizes.top_k)
    policy: Any = LRU(geometry.layers, geometry.experts)
    if name.startswith("learned"):
        policy = PaidPolicy(geometry) if setting.args.paid else LearnedPolicy(sizes.layers, sizes.experts, sizes.top_k)
        policy.start(*restored(NextUsePredictor(sizes.layers, sizes.experts, sizes.top_k), state))
    else:
        teach(policy, lesson)
    run = Replay(policy, geometry)
    box = run.add(live.slots * geometry.largest_bytes, machine, prefetch=CONTENDERS[name].prefetch)
    box.computing_s = itertools.chain(live.idle_s, itertools.repeat(0.0))
    with closing(box):
        counts = [box.counts for _ in _by_round(run, recorded(live.recording), setting)]
    rounds = [after.since(before) for before, after in zip(counts[::2], counts[1::2], strict=True)]
    return {
        "missed": [each.misses for each in rounds],
        "stall_ms": [1e3 * each.stall_s / setting.args.tokens for each in rounds],
        "prefetched": [each.prefetched / setting.args.tokens for each in rounds],
    }


def yardsticks(model: Model, setting: Setting, live: Live, lesson: list[StepRouting]) -> tuple[float, float]:
    """Returns the scored rounds' misses of the best of LRU, LFU and LFRU, and Belady's bound."""
    sizes, machine = model.spec.geometry, live.machine
    geometry = machine.geometry(sizes.layers, sizes.experts, sizes.top_k)
    steps, missed = list(recorded(live.recording)), []
    capacity_bytes = live.slots * geometry.largest_bytes
    for kind in (LRU, LFU, LFRU):
        policy = kind(sizes.layers, sizes.experts)
        teach(policy, lesson)
        run = Replay(policy, geometry)
        with closing(run.add(capacity_bytes, machine, prefetch=False)) as box:
            counts = [box.counts.misses for _ in _by_round(run, iter(steps), setting)]
        missed.append(counts[-1] - counts[2 * setting.args.unscored])
    trace = Trace([np.stack([step.ids[:, 0] for step in steps if step.meta.decode.all()])], sizes.experts)
    run = Replay(Belady(sizes.layers, sizes.experts, *next_uses(trace, 1)), geometry)
    run.bounds = [bound] = [ByteBelady(geometry, capacity_bytes)]
    decoded = (step for step in steps if step.meta.decode.all())
    counts = [bound.counts.misses for _ in _by_round(run, decoded, setting, prompts=0)]
    return min(missed), counts[-1] - counts[2 * setting.args.unscored]


def teach(policy: Any, lesson: list[StepRouting]) -> None:
    """Trains a policy on the steps' choices."""
    for routing in lesson:
        for layer, ids in enumerate(routing.ids):
            policy.touch(layer, np.unique(ids[-1:]).astype(np.int64))


def _by_round(run: Replay, steps: Iterator[ReplayedStep], setting: Setting, prompts: int = 1) -> Iterator[None]:
    """Yields before and after the tokens of each round."""
    for _ in range(setting.rounds):
        for part in (prompts, setting.args.tokens):
            for step in itertools.islice(steps, part):
                run.step(step)
            yield


def compare(model: Model, setting: Setting, state: Path, lesson: list[StepRouting]) -> list[dict[str, Any]]:
    """Returns a row for each contender."""
    args, first, rows = setting.args, setting.args.unscored, []
    with tempfile.TemporaryDirectory() as scratch:
        live = run_live(model, setting, state, lesson, Path(scratch))
        best, least = yardsticks(model, setting, live["lru"], lesson)
        lru_ms = [each["stall_ms"] for each in live["lru"].rounds[first:]]
        for name, its in live.items():
            again = replayed(model, setting, name, its, state, lesson)
            of = {key: [each[key] for each in its.rounds[first:]] for key in its.rounds[0]}
            missed, missed_again = sum(of["missed"]), sum(again["missed"][first:])
            apart = [a - b for a, b in zip(of["missed"], again["missed"][first:], strict=True)]
            rows.append(
                {
                    "capacity": setting.capacity,
                    "link": setting.link / GB,
                    "policy": name,
                    "live": {"missed": missed, "gap_closed": (best - missed) / (best - least)},
                    "replayed": {"missed": missed_again, "gap_closed": (best - missed_again) / (best - least)},
                    "missed_apart": [each / np.mean(of["missed"]) for each in interval(apart)],
                    "best_of_three": best,
                    "belady": least,
                    "stall_ms": interval(of["stall_ms"]),
                    "stall_ms_replayed": float(np.mean(again["stall_ms"][first:])),
                    "stall_ms_over_lru": interval([a - b for a, b in zip(of["stall_ms"], lru_ms, strict=True)]),
                    "token_ms": interval(of["ms"]),
                    "prefetched": [float(np.mean(of["prefetched"])), float(np.mean(again["prefetched"][first:]))],
                    "looked_at": its.looks,
                }
            )
    if not args.json:
        print(table(rows, args), flush=True)
    return rows


def table(rows: list[dict[str, Any]], args: Namespace) -> str:
    lines = [f"model {args.model}, {args.rounds} rounds of {args.tokens} tokens"]
    lines += [
        "| capacity | GB/s | policy | misses live | replayed | apart | gap closed live | replayed "
        "| stall ms/token live | replayed | over LRU | prefetched live, replayed | steps with looks |",
        "|" + "---|" * 13,
    ]
    for row in rows:
        apart, half = row["missed_apart"]
        stall, over = row["stall_ms"], row["stall_ms_over_lru"]
        lines.append(
            f"| {row['capacity']:.0%} | {row['link']:g} | {row['policy']} | {row['live']['missed']} "
            f"| {row['replayed']['missed']} | {apart:+.1%} ± {half:.1%} | {row['live']['gap_closed']:.3f} "
            f"| {row['replayed']['gap_closed']:.3f} | {stall[0]:.2f} ± {stall[1]:.2f} "
            f"| {row['stall_ms_replayed']:.2f} | {over[0]:+.2f} ± {over[1]:.2f} "
            f"| {row['prefetched'][0]:.2f}, {row['prefetched'][1]:.2f} | {row['looked_at']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "mid"), default="demo")
    parser.add_argument("--capacity", default=".25,.5", help="shares of the experts that the device holds")
    parser.add_argument("--link", default="2,8,25", help="GB/s")
    parser.add_argument("--expert-bytes", type=float, default=9.44e6)
    parser.add_argument("--tokens", type=int, default=100, help="a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--unscored", type=int, default=2, help="rounds before them")
    parser.add_argument("--warm", type=int, default=3000, help="tokens learned from beforehand")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-leisure", dest="paid", action="store_false", help="replay with all looks at every step")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    args.ram = 1.0
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    rows = []
    with open_model(args.model, args.threads) as model, tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch) / "state"
        lesson = learn(model, Namespace(**{**vars(args), "share": 0.25, "scoutgate": None}), state)
        for capacity in args.capacity.split(","):
            for link in args.link.split(","):
                setting = Setting(float(capacity), GB * float(link), args.unscored + args.rounds, args)
                rows += compare(model, setting, state, lesson)
    if args.json:
        print(json.dumps({"model": args.model, "rows": rows}))


if __name__ == "__main__":
    main()
