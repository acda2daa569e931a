"""Stall per token in replay: the demo model's experts behind simulated links and disks.

    python -m tools.research.cache.stall_replay [--json] [--link 2,8,25] [--expert-bytes 9.44e6,2.36e6]

One recorded run of the model is replayed by the serving objects for every contender. Only time, links, disk and
computing are simulated, so a busy machine changes nothing. results/stall_replay.md describes the method.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
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
from edgemoe.policy.cache_ranks import EWMA, LRU
from edgemoe.replay.box import BoxSpec, ReplayBox
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.replay.trace import ReplayCounts
from edgemoe.telemetry.recorder import Recorder
from edgemoe.telemetry.routing_recording import RecordingHeader
from edgemoe.types.step import StepRouting
from tools.bench.stall import SEED, Contender, Runner, learn, open_model
from tools.bench.stats import interval
from tools.research.cache.live_gap import GB, recorded, teach


class Replayed(NamedTuple):
    """A policy, and the sources of its prefetches."""

    policy: str
    gate: bool = False
    plans: bool = False


CONTENDERS = {
    "LRU": Replayed("lru"),
    "LRU + gate": Replayed("lru", gate=True),
    "two-tier": Replayed("two-tier"),
    "learned": Replayed("learned"),
    "learned + gate": Replayed("learned", gate=True),
    "learned + plans": Replayed("learned", plans=True),
    "learned + prefetch": Replayed("learned", gate=True, plans=True),
}
WITHOUT = {"LRU + gate": "LRU"} | {f"learned + {what}": "learned" for what in ("gate", "plans", "prefetch")}


class Lesson(NamedTuple):
    """The model's recording, and the policies' state before it."""

    shape: tuple[int, int, int]  # layers, experts, top_k
    steps: list[ReplayedStep]
    taught: list[StepRouting]
    state: Path


def record(args: Namespace, scratch: Path) -> Lesson:
    """Generates --rounds texts with the model."""
    with open_model("demo", 1) as model:
        settings = Namespace(**{**vars(args), "share": 1.0, "ram": 1.0, "expert_bytes": 1.0, "scoutgate": None})
        taught = learn(model, settings, state := scratch / "state")
        runner, geometry = (
            Runner(model, Contender("lru", gate=True), 1e15, settings, None, hints=True),
            model.spec.geometry,
        )
        header = RecordingHeader("", geometry.layers, geometry.experts, geometry.top_k, hints=True)
        folder = scratch / "steps"
        with closing(runner):
            runner.recorder = Recorder(RecordSettings(dir=str(folder), max_bytes=1 << 33), header, 1 << 31)
            with closing(runner.recorder):
                for number in range(args.unscored + args.rounds):
                    runner.run(1000 + number, args.tokens)
        return Lesson((geometry.layers, geometry.experts, geometry.top_k), list(recorded(folder)), taught, state)


def policy_of(name: str, lesson: Lesson) -> Any:
    """Returns the policy in its learned state."""
    layers, experts, _ = lesson.shape
    if name == "learned":
        policy = LearnedPolicy(*lesson.shape)
        policy.start(*restored(NextUsePredictor(*lesson.shape), lesson.state))
        return policy
    plain = {"lru": LRU(layers, experts), "two-tier": EWMA(*lesson.shape)}
    teach(plain[name], lesson.taught)
    return plain[name]


def rounds_of(contender: Replayed, lesson: Lesson, machine: BoxSpec, args: Namespace) -> list[ReplayCounts]:
    """Returns the counts of each scored round."""
    geometry, policy = machine.geometry(*lesson.shape), policy_of(contender.policy, lesson)
    run = Replay(policy, geometry)
    capacity_bytes = int(args.share * geometry.count) * geometry.largest_bytes
    box = run.add(capacity_bytes, machine, prefetch=contender.gate or contender.plans, plans=contender.plans)
    steps = (step if contender.gate else step._replace(hints=None) for step in lesson.steps)
    with closing(box):
        rounds = [_round(run, box, steps, args.tokens) for _ in range(args.unscored + args.rounds)]
    return rounds[args.unscored :]


def _round(run: Replay, box: ReplayBox, steps: Iterator[ReplayedStep], tokens: int) -> ReplayCounts:
    """Returns the counts of `tokens` decoded tokens, after their prompt."""
    run.step(next(steps))
    before = box.counts
    for step in itertools.islice(steps, tokens):
        run.step(step)
    return box.counts.since(before)


def row(
    name: str, rounds: list[ReplayCounts], others: dict[str, list[ReplayCounts]], args: Namespace, size: int
) -> dict[str, Any]:
    """Returns a contender's figures per token."""
    stall_ms = [1e3 * each.stall_s / args.tokens for each in rounds]
    total = ReplayCounts(*map(sum, zip(*rounds, strict=True)))
    tokens, wasted = args.tokens * len(rounds), total.wasted_bytes / size
    begun = total.prefetched + total.promoted + total.withdrawn
    figures = {
        "contender": name,
        "stall_ms": interval(stall_ms),
        "misses": total.misses / tokens,
        "prefetched": total.prefetched / tokens,
        "promoted": total.promoted / tokens,
        "withdrawn": total.withdrawn / tokens,
        "wasted": wasted / tokens,
        "unused": (total.withdrawn + wasted) / begun if begun else 0.0,
        "to_vram_mb": total.to_vram_bytes / tokens / 1e6,
        "to_ram_mb": total.to_ram_bytes / tokens / 1e6,
    }
    for key, other in (("over_lru", "LRU"), ("over_without", WITHOUT.get(name, ""))):
        if other in others:
            theirs = [1e3 * each.stall_s / args.tokens for each in others[other]]
            over = interval([a - b for a, b in zip(stall_ms, theirs, strict=True)])
            figures[key] = [each / np.mean(theirs) for each in over]
    return figures


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | stall ms/token | over LRU | over itself without | misses | begun: arrived, demanded, given up "
        "| dropped unused | unused | MB up, MB read |",
        "|" + "---|" * 9,
    ]
    for each in rows:
        lru, without = (
            f"{each[key][0]:+.1%} ± {each[key][1]:.1%}" if key in each else "" for key in ("over_lru", "over_without")
        )
        lines.append(
            f"| {each['contender']} | {each['stall_ms'][0]:.2f} ± {each['stall_ms'][1]:.2f} | {lru} | {without} "
            f"| {each['misses']:.2f} | {each['prefetched']:.2f}, {each['promoted']:.2f}, {each['withdrawn']:.2f} "
            f"| {each['wasted']:.2f} | {each['unused']:.0%} | {each['to_vram_mb']:.1f}, {each['to_ram_mb']:.1f} |"
        )
    return "\n".join(lines)


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=numbers, default=[2.0, 8.0, 25.0], help="GB/s")
    parser.add_argument("--expert-bytes", type=numbers, default=[9.44e6])
    parser.add_argument("--ram", type=numbers, default=[1.0], help="shares of the experts that RAM holds")
    parser.add_argument("--disk", type=numbers, default=[1.3], help="GB/s, where RAM does not hold all")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that the device holds")
    parser.add_argument("--layer-ms", type=float, default=0.35)
    parser.add_argument("--between-ms", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=60, help="a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--unscored", type=int, default=2, help="rounds before them")
    parser.add_argument("--warm", type=int, default=1500, help="tokens learned from beforehand")
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        lesson = record(args, Path(scratch))
        for size, ram, link in itertools.product(map(int, args.expert_bytes), args.ram, args.link):
            for disk in args.disk if ram < 1 else args.disk[:1]:
                machine = BoxSpec(
                    1e-3 * args.layer_ms, size, GB * link, GB * disk, ram, True, between_s=1e-3 * args.between_ms
                )
                rounds = {name: rounds_of(CONTENDERS[name], lesson, machine, args) for name in args.contenders}
                rows = [row(name, its, rounds, args, size) for name, its in rounds.items()]
                where = {"expert_bytes": size, "link": link, "ram": ram, "disk": disk if ram < 1 else None}
                results.append({**where, "rows": rows})
                print(
                    f"\n{size / 1e6:g} MB, {link:g} GB/s, RAM {ram:.0%}" + (f", disk {disk:g} GB/s" if ram < 1 else "")
                )
                print(table(rows), flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
