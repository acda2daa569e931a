"""The share of the gap to Belady's optimum that the cache closes, for each kind of text, new and known.

    python -m tools.research.cache.cache_gap TRACES --out DIR [--kinds NAME,...] [--orders 5] [--seeds 2] [--as LABEL]
    python -m tools.research.cache.cache_gap TRACES --out DIR --report [--against LABEL]

`closed` is (best of LRU, LFU, LFRU, EWMA - misses) / (best - Belady's). results/cache_replay.md describes the runs.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.experts.predict.next_use import link_predictor
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.replay.bound import ByteBelady
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.replay_policies import MAKERS as SERVED
from edgemoe.replay.replay_policies import PolicyMaker
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.replay.trace import Trace, TraceStep, first, in_turn, load
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import CachePolicy
from edgemoe.types.step import StepMeta
from tools.research.cache.replay import MAKERS

MODELS = {
    "deepseek-v2-lite-esft": ("intent", "law", "translation"),
    "gpt-oss-20b-fingerprint": ("code_cs", "humanities_other", "law", "math", "medical"),
}
KINDS = {f"{folder[:2]}-{kind}": (folder, kind) for folder, kinds in MODELS.items() for kind in kinds}
SHARES = (0.25, 0.5)  # share of the experts in memory
WINDOWS = {"cold": slice(0, 1500), "warm": slice(5000, 7000)}  # tokens of the kind
FEWEST = 1000  # scored tokens of a window, or none
YARDSTICKS = ("lru", "lfu", "lfru", "ewma", "belady")
DRAWS = 2000
Misses = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Requests of one kind and of others; `names` of the one kind's, by their places, hold in every order."""

    trace: Trace
    names: dict[int, int]


def workload(args: argparse.Namespace, name: str, order: int) -> Workload:
    """Builds a workload: tokens of the model's other kinds, then one kind with some of the others among it."""
    (folder, kind), traces = KINDS[name], args.traces
    random = np.random.default_rng(order)
    files = {each: traces / folder / f"{each}.ids.csv.gz" for each in MODELS[folder]}
    requests = {each: load([file]).requests for each, file in files.items()}
    experts = load([*files.values()]).experts
    orders = {each: random.permutation(len(those)).tolist() for each, those in requests.items()}
    own = [requests[kind][i] for i in orders[kind]]
    others = in_turn([[requests[each][i] for i in orders[each]] for each in files if each != kind])
    ends = [window.stop for window in WINDOWS.values() if sum(map(len, own)) >= window.start + FEWEST]
    own = first(own, max(ends))
    before = first(others, args.before) if args.before else []
    between = first(others[len(before) :], args.between) if args.between else []
    early = len(first(own, WINDOWS["warm"].start)) - 1
    order_of = [*before, *own[:early], *between, *own[early:]]
    places = [len(before) + at + (len(between) if at >= early else 0) for at in range(len(own))]
    return Workload(Trace(order_of, experts), dict(zip(places, orders[kind], strict=False)))


def run(work: Workload, policy: CachePolicy, steps: Iterator[ReplayedStep]) -> dict[str, Any]:
    """Replays a workload. Returns each decoded token's request, its place in the kind, and its misses at each share.

    A step's misses count for its tokens.
    """
    trace = work.trace
    geometry = BoxSpec(1e-3, 1, 1e9, 1e9, 1.0, False).geometry(trace.layers, trace.experts, trace.top_k)
    replay = Replay(policy, geometry)
    replay.bounds = [ByteBelady(geometry, round(share * geometry.count) * geometry.largest_bytes) for share in SHARES]
    requests: list[int] = []
    places: list[int] = []
    missed: list[Misses] = []
    before, place = np.zeros(len(SHARES)), 0
    for step in steps:
        replay.step(step)
        now = np.array([bound.counts.misses for bound in replay.bounds], np.float64)
        for request in map(int, step.meta.requests):
            if request in work.names and step.meta.decode.all():
                requests.append(work.names[request])
                places.append(place)
                missed.append((now - before) / len(step.meta.requests))
        place += sum(
            int(count)
            for request, count in zip(step.meta.requests, step.meta.query_lens, strict=True)
            if int(request) in work.names
        )
        before = now
    return {"requests": np.array(requests), "places": np.array(places), "missed": np.stack(missed)}


def with_prompts(trace: Trace, share: float) -> Iterator[ReplayedStep]:
    """Yields requests one by one, the first part of each in one step."""
    for name, ids in enumerate(trace.requests):
        length = int(share * len(ids))
        if length:
            none, lengths = np.zeros(length, np.int64), np.array([length])
            meta = StepMeta((str(name),), lengths, np.zeros(1, np.bool_), none, none)
            yield ReplayedStep(meta, ids[:length].swapaxes(0, 1))
        for token in ids[length:]:
            yield ReplayedStep.of(TraceStep((name,), token[None]))


def run_all(args: argparse.Namespace) -> None:
    """Makes the runs that the folder lacks."""
    args.out.mkdir(parents=True, exist_ok=True)
    link_predictor(args.out)
    for order in range(args.orders):
        for kind in args.kinds:
            work = workload(args, kind, order)
            trace = work.trace
            decoded = Trace([ids[int(args.prompt * len(ids)) :] for ids in trace.requests], trace.experts)
            makers = {name: (SERVED | MAKERS)[name] for name in YARDSTICKS}
            makers |= {f"{args.label}.{seed}": learned(seed) for seed in range(args.seeds)}
            for name, make in makers.items():
                to, began_s = args.out / f"{kind}.{order}.{name}.npz", time.process_time()
                if not to.exists():
                    plain = map(ReplayedStep.of, trace.steps(args.batch))
                    steps = with_prompts(trace, args.prompt) if args.prompt else plain
                    np.savez_compressed(to, **run(work, make(decoded, args.batch), steps))
                    print(f"{to.stem}: {time.process_time() - began_s:.0f} s", flush=True)


def learned(seed: int) -> PolicyMaker:
    """Returns the policy's maker."""
    return lambda trace, batch: LearnedPolicy(trace.layers, trace.experts, trace.top_k, seed)


class Scored:
    """Misses in one window of one kind, over several orders."""

    def __init__(self, out: Path, kind: str, window: str, orders: int) -> None:
        """Reads the yardsticks' runs. Raises FileNotFoundError if one is missing."""
        self._out, self._kind, self._window, self._orders = out, kind, WINDOWS[window], range(orders)
        self.yards = {name: [self._missed(name, order)[1] for order in self._orders] for name in YARDSTICKS}
        self.tokens = [len(missed) for missed in self.yards["belady"]]

    def closed(self, label: str) -> tuple[Misses, Misses]:
        """Returns misses per token of `learned` [shares], and each request's part of the closed share [requests,
        shares].

        Both are means over orders and seeds.
        """
        total, parts = np.zeros(len(SHARES)), defaultdict[int, Misses](lambda: np.zeros(len(SHARES)))
        for order in self._orders:
            best, gap = self._gap(order)
            seeds = len(list(self._out.glob(f"{self._kind}.{order}.{label}.[0-9]*.npz")))
            if not seeds:
                raise FileNotFoundError(f"{self._out}: no run of {label} for {self._kind}, order {order}")
            for seed in range(seeds):
                requests, missed = self._missed(f"{label}.{seed}", order)
                share = 1 / (seeds * len(self._orders))
                total += missed.mean(0) * share
                for request in np.unique(requests).tolist():
                    parts[request] += ((best - missed)[requests == request].sum(0) / gap) * share
        return total, np.stack([parts[request] for request in sorted(parts)])

    def per_token(self, name: str) -> Misses:
        """Returns the misses per token of a yardstick [shares]."""
        mean: Misses = np.mean([missed.mean(0) for missed in self.yards[name]], axis=0)
        return mean

    def _gap(self, order: int) -> tuple[Misses, Misses]:
        """Returns the misses of the best of four [tokens, shares], and the gap to Belady's optimum [shares]."""
        each = np.stack([self.yards[name][order] for name in YARDSTICKS[:-1]])
        best = np.take_along_axis(each, each.sum(1).argmin(0)[None, None], 0)[0]
        return best, best.sum(0) - self.yards["belady"][order].sum(0)

    def _missed(self, name: str, order: int) -> tuple[IntArray, Misses]:
        with np.load(self._out / f"{self._kind}.{order}.{name}.npz") as kept:
            inside = (kept["places"] >= self._window.start) & (kept["places"] < self._window.stop)
            return kept["requests"][inside], kept["missed"][inside]


def drawn(parts: Misses, random: np.random.Generator) -> Misses:
    """Returns sums over bootstrapped requests, [draws, shares]."""
    sums: Misses = random.multinomial(len(parts), np.full(len(parts), 1 / len(parts)), DRAWS) @ parts
    return sums


def report(args: argparse.Namespace) -> None:
    """Prints a table for each window; with `--against`, the paired difference of closed shares."""
    for window, span in WINDOWS.items():
        heads = (*YARDSTICKS, args.label)
        print(f"\n{window}: tokens {span.start} to {span.stop} of the kind; misses a token at {SHARES}")
        print(f"| kind | {' | '.join(heads)} | closed | mean |{' more |' if args.against else ''}")
        print("|" + "---|" * (len(heads) + 3 + bool(args.against)))
        closed: list[Misses] = []
        more: list[Misses] = []
        random = np.random.default_rng(0)
        for kind in args.kinds:
            try:
                scored = Scored(args.out, kind, window, args.orders)
            except FileNotFoundError:
                continue
            if min(scored.tokens) < FEWEST * (1 - args.prompt):
                continue
            total, parts = scored.closed(args.label)
            rows = [*(scored.per_token(name) for name in YARDSTICKS), total]
            cells = [" / ".join(f"{each:.1f}" for each in row) for row in rows]
            cells += [" / ".join(f"{each:.3f}" for each in parts.sum(0))]
            means = parts.mean(1, keepdims=True)
            closed.append(np.append(means.sum(), drawn(means, random)))
            cells += [spread(closed[-1])]
            if args.against:
                difference = means - scored.closed(args.against)[1].mean(1, keepdims=True)
                more.append(np.append(difference.sum(), drawn(difference, random)))
                cells += [spread(more[-1])]
            print(f"| {kind} | {' | '.join(cells)} |")
        if closed:
            print(f"mean of {len(closed)} kinds: {spread(np.mean(closed, 0))}")
        if more:
            print(f"more than {args.against}: {spread(np.mean(more, 0))}")


def spread(values: Misses) -> str:
    """Formats the first value, and the interval of the others."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return f"{values[0]:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*KINDS], help=", ".join(KINDS))
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--before", type=int, default=3000, help="tokens of other kinds")
    parser.add_argument("--between", type=int, default=0, help="of them after 5,000 of the kind")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=float, default=0.0, help="share of each request that is its prompt (batch 1)")
    parser.add_argument("--as", dest="label", default="learned", help="what `learned` is kept as")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--against", help="a label to compare with")
    args = parser.parse_args()
    report(args) if args.report else run_all(args)


if __name__ == "__main__":
    main()
