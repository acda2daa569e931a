"""Orders of the waiting queue on the same arrivals near saturation: linear aging, [Gimbal, Algorithm 2], first come.

    python -m tools.research.routing.scheduling_study --trace conv.csv.gz --seeds 10 --json

The daemon's scheduler, block manager and chunk budget run on a simulated clock, with a linear cost of a step. Each seed
is another stretch of the trace, at the same share of saturation. Differences are paired by seed. One JSON object.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edgemoe.config.settings import EngineSettings
from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.scheduler import ChunkBudget, PrefillWork, Scheduler
from edgemoe.engine.sequence import Sequence
from edgemoe.types.request import Request, Sampling
from tools.bench.stats import interval
from tools.research.routing.queue_orders import QueueOrder, order

console = Console(stderr=True)
THRESHOLD_S = 5.0  # age at which a request goes first [Gimbal, Algorithm 2]
RULES: tuple[QueueOrder, ...] = ("sjf", "gimbal", "fcfs")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step: fixed, per token of prompt, per decoding sequence."""

    fixed_s: float
    prefill_s: float
    decode_s: float

    def step_s(self, prefill: int, decoding: int) -> float:
        return self.fixed_s + self.prefill_s * prefill + self.decode_s * decoding


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival: time, prompt tokens, output tokens. All [n]."""

    at_s: npt.NDArray[np.float64]
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]

    def at_rate(self, rate: float) -> Load:
        span_s = self.at_s[-1] - self.at_s[0]
        return replace(self, at_s=(self.at_s - self.at_s[0]) * (len(self.at_s) / rate / span_s))


def read_trace(path: Path, max_prompt: int) -> Load:
    """Reads an Azure trace."""
    with gzip.open(path, "rt") as file:
        rows = [(float(r["arrival_s"]), int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    at_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Load(at_s, np.minimum(prompt, max_prompt), np.maximum(output, 1))


def stretch_of(trace: Load, seed: int, count: int) -> Load:
    """Returns `count` consecutive requests from a place of the trace that the seed chooses."""
    start = int(np.random.default_rng(seed).integers(0, len(trace.at_s) - count))
    part = slice(start, start + count)
    return Load(trace.at_s[part], trace.prompt[part], trace.output[part])


class RuledScheduler(Scheduler):
    """Orders the queue by a rule that may be one for comparison."""

    def __init__(
        self, settings: EngineSettings, blocks: BlockManager, budget: ChunkBudget, rule: QueueOrder, aging: float
    ) -> None:
        """Uses `aging` in tokens per second; 0: the speed of prefill."""
        super().__init__(
            msgspec.structs.replace(settings, scheduler="fcfs" if rule == "gimbal" else rule), blocks, budget
        )
        self._rule, self._aging = rule, aging

    @property
    def aging_tokens_per_s(self) -> float:
        return self._aging or super().aging_tokens_per_s

    def _in_order(self, waiters: list[PrefillWork], now_s: float) -> list[PrefillWork]:
        if self._rule != "gimbal" or len(waiters) < 2:
            return super()._in_order(waiters, now_s)
        tokens = np.array([waiter.tokens for waiter in waiters])
        waited_s = now_s - np.array([waiter.seq.arrived_s for waiter in waiters])
        return [waiters[i] for i in order(tokens, waited_s, "gimbal", self.aging_tokens_per_s, THRESHOLD_S)]


def simulate(
    load: Load, settings: EngineSettings, costs: Costs, blocks: int, rule: QueueOrder = "sjf", aging: float = 0.0
) -> npt.NDArray[np.float64]:
    """Returns the seconds to the first token of each request, [n]."""
    manager = BlockManager(blocks, layers=1, experts=1, prefix_cache=False)
    chunk_budget = ChunkBudget(settings.step_tokens, settings.mixed_step_s)
    scheduler = RuledScheduler(settings, manager, chunk_budget, rule, aging)
    first_s = np.full(len(load.at_s), np.nan)
    now_s, arrived = 0.0, 0
    while np.isnan(first_s).any() or not scheduler.idle:
        while arrived < len(load.at_s) and load.at_s[arrived] <= now_s:
            scheduler.add(_sequence(arrived, load))
            arrived += 1
        works = scheduler.schedule(now_s)
        if not works:
            now_s = float(load.at_s[arrived])
            continue
        prefill = sum(w.tokens for w in works if not w.seq.decoding)
        step_s = costs.step_s(prefill, sum(w.seq.decoding for w in works))
        if prefill:
            chunk_budget.observe(prefill, step_s)
        now_s += step_s
        for work in works:
            manager.advance(work.seq, work.tokens)
            if not work.seq.uncomputed:
                _emit(scheduler, work.seq, now_s, first_s, load)
    return first_s - load.at_s


def _sequence(n: int, load: Load) -> Sequence:
    sampling = Sampling(max_tokens=int(load.output[n]) * 4)  # the client's limit, not its real output
    request = Request(id=str(n), prompt=tuple(range(int(load.prompt[n]))), sampling=sampling, seed=0)
    return Sequence(request, (), 1, float(load.at_s[n]), float("inf"))


def _emit(scheduler: Scheduler, seq: Sequence, now_s: float, first_s: npt.NDArray[np.float64], load: Load) -> None:
    """Gives the sequence a token, its first one at `first_s` [n], or ends it."""
    n = int(seq.request.id)
    seq.tokens.append(0)
    scheduler.fairness.add_service(seq.identity, 0, 1)
    if np.isnan(first_s[n]):
        first_s[n] = now_s
    if seq.emitted >= load.output[n]:
        scheduler.fairness.add_answer(seq.identity, seq.emitted)
        scheduler.remove(seq)


def saturation(load: Load, settings: EngineSettings, costs: Costs, blocks: int) -> float:
    """Returns requests served per second if all are present at the start."""
    everything = replace(load, at_s=np.zeros(len(load.at_s)))
    return len(load.at_s) / float(simulate(everything, settings, costs, blocks).max())


def paired(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> dict[str, float]:
    """Returns the mean change of `ours` from `theirs` in per cent, and its 95 % interval over seeds. Pure."""
    change = 100 * (ours / theirs - 1)
    mean, half = interval(change)
    return {"mean": round(mean, 1), "low": round(mean - half, 1), "high": round(mean + half, 1)}


def study(args: argparse.Namespace) -> dict[str, Any]:
    trace = read_trace(args.trace, args.max_prompt_tokens)
    costs = Costs(args.fixed_ms / 1e3, args.prefill_us / 1e6, args.decode_us / 1e6)
    settings = EngineSettings(
        max_sequences=args.max_sequences,
        step_tokens=args.step_tokens,
        max_queue=10**6,
    )
    blocks = args.kv_tokens // 16
    probe = stretch_of(trace, 10**6, args.requests)
    rate = args.load * saturation(probe, settings, costs, blocks)
    ttft: dict[str, list[npt.NDArray[np.float64]]] = {rule: [] for rule in RULES}
    for seed in track(range(args.seeds), "seeds", console=console):
        load = stretch_of(trace, seed, args.requests).at_rate(rate)
        for rule in RULES:
            ttft[rule].append(simulate(load, settings, costs, blocks, rule, args.aging_tokens_per_s))
    figures = {
        rule: {
            "mean_s": np.array([t.mean() for t in times]),
            "p99_s": np.array([np.percentile(t, 99) for t in times]),
            "max_s": np.array([t.max() for t in times]),
        }
        for rule, times in ttft.items()
    }
    return {
        "rate": round(rate, 3),
        "share_of_saturation": args.load,
        "kv_tokens": args.kv_tokens,
        "aging_tokens_per_s": args.aging_tokens_per_s,
        "seeds": args.seeds,
        "ttft": {r: {k: round(float(v.mean()), 3) for k, v in f.items()} for r, f in figures.items()},
        "sjf_against_fcfs": {k: paired(figures["sjf"][k], figures["fcfs"][k]) for k in ("mean_s", "p99_s")},
        "sjf_against_gimbal": {k: paired(figures["sjf"][k], figures["gimbal"][k]) for k in ("mean_s", "p99_s")},
        "gimbal_against_fcfs": {k: paired(figures["gimbal"][k], figures["fcfs"][k]) for k in ("mean_s", "p99_s")},
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"TTFT at {result['share_of_saturation']:.0%} of saturation ({result['rate']:g} requests/s)")
    for column in ("order", "mean s", "p99 s", "longest s", "mean against fcfs", "p99 against fcfs"):
        table.add_column(column, justify="right")
    for rule, figures in result["ttft"].items():
        against = result.get(f"{rule}_against_fcfs")
        cells = [f"{a['mean']:+.1f} % [{a['low']:+.1f}, {a['high']:+.1f}]" for a in against.values()] if against else []
        table.add_row(rule, *(f"{v:.2f}" for v in figures.values()), *cells)
    console.print(table)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trace", type=Path, required=True, help="an Azure .csv.gz trace")
    p.add_argument("--load", type=float, default=0.95, help="share of the saturation rate")
    p.add_argument("--seeds", type=int, default=10)
    p.add_argument("--requests", type=int, default=1000, help="per seed")
    p.add_argument("--fixed-ms", type=float, default=8.0, help="a step's fixed time")
    p.add_argument("--prefill-us", type=float, default=120.0, help="per token of prompt")
    p.add_argument("--decode-us", type=float, default=400.0, help="per decoding sequence")
    p.add_argument("--kv-tokens", type=int, default=65536)
    p.add_argument("--max-sequences", type=int, default=64)
    p.add_argument("--step-tokens", type=int, default=512)
    p.add_argument("--aging-tokens-per-s", type=float, default=0.0)
    p.add_argument("--max-prompt-tokens", type=int, default=8192)
    p.add_argument("--json", action="store_true", help="only the JSON line, no table")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    result = study(args)
    if not args.json:
        show(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
