"""Simulated large clusters [Prism, IV-C] with the daemon's placement policies and DeepSeek-V2-Lite's real routing.

    python -m tools.research.simulate DATA scale               # or bandwidth, policies [Prism, Fig. 8]
    python -m tools.research.simulate DATA testbed --log prism.jsonl  # compared with `placement.prism`

DATA holds the routing tables, LLMServingSim's profile and the prompts. results/simulate.md describes the studies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from tools.research.placement.compared_placements import POLICIES
from tools.research.simulate.bed.bed_fitting import BedCosts
from tools.research.simulate.bed.bed_runs import read_runs
from tools.research.simulate.bed.scoring import scored, summary
from tools.research.simulate.costs import Costs, measured
from tools.research.simulate.routed_workload import EXPERT_NUMBERS, Task, poisson, tasks_of, traced
from tools.research.simulate.study import Setting, outcome, servers_of
from tools.research.simulate.study_plots import draw

TEST_BED = "testbed"
console = Console(stderr=True)


class Run(NamedTuple):
    """A line of a plot, a place on it, and the setting there."""

    line: str
    place: float | str
    setting: Setting


def runs_of(args: argparse.Namespace) -> Iterator[Run]:
    """Yields the settings that a study varies."""
    base = Setting(share=args.share, mbit_s=args.mbit_s, delay_s=args.delay_ms / 1e3, prompts=args.prompts)
    if args.study == "scale":
        for every_s in args.every_s:
            for gpus in args.gpus:
                yield Run(f"every {every_s:g} s", gpus, replace(base, gpus=gpus, every_s=every_s))
    elif args.study == "bandwidth":
        for gpus in args.gpus:
            for mbit_s in (100.0, 250.0, 500.0, 1000.0):
                yield Run(f"{gpus} GPUs", mbit_s, replace(base, gpus=gpus, mbit_s=mbit_s, every_s=args.every_s[0]))
    else:
        for policy in POLICIES:
            for delay_ms in (0.1, 1.0, 5.0):
                setting = replace(base, gpus=args.gpus[0], policy=policy, delay_s=delay_ms / 1e3)
                yield Run(f"{delay_ms:g} ms", policy, replace(setting, every_s=args.every_s[0]))


def figures(run: Run, tasks: list[Task], costs: Costs, args: argparse.Namespace, placements: Any) -> dict[str, Any]:
    """Returns means over the seeds, and the spread of the mean latency between them."""
    rows = []
    for seed in range(args.seeds):
        setting = replace(run.setting, seed=seed)
        every_s = setting.every_s / len(servers_of(setting.gpus))
        rng = np.random.default_rng((seed, 7))
        times = traced(args.trace, every_s, setting.prompts) if args.trace else poisson(every_s, setting.prompts, rng)
        rows.append(outcome(setting, tasks, costs, times, placements))
    answer = {key: round(float(np.mean([row[key] for row in rows])), 6) for key in rows[0]}
    spread = max(row["mean_s"] for row in rows) - min(row["mean_s"] for row in rows)
    return {"line": run.line, "place": run.place} | answer | {"spread_s": round(spread, 6)}


def show(study: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=study)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", type=Path)
    p.add_argument("study", choices=("scale", "bandwidth", "policies", TEST_BED))
    p.add_argument("--gpus", type=lambda text: [int(each) for each in text.split(",")], default=[4, 16, 64, 256])
    p.add_argument("--every-s", type=numbers, default=[15.0, 8.0], help="between prompts at a server, on average")
    p.add_argument("--trace", type=Path, help="an Azure trace, instead of Poisson arrivals")
    p.add_argument("--prompts", type=int, default=1000)
    p.add_argument("--share", type=float, default=0.35, help="of the experts that a GPU has room for")
    p.add_argument("--mbit-s", type=float, default=500.0)
    p.add_argument("--delay-ms", type=float, default=0.1, help="of a link, one way")
    p.add_argument("--slower", type=float, default=1.0, help="GPUs take so many times as long")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--plot", type=Path)
    p.add_argument("--log", type=Path, nargs="+", default=[Path("prism.jsonl")], help="testbed: what was measured")
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-prism", help="likewise")
    p.add_argument("--json", action="store_true", help="only the JSON line, no table")
    return p


def hold(args: argparse.Namespace) -> dict[str, Any]:
    """Returns measured and simulated times of the logs' runs, by model, and prints them."""
    answer: dict[str, Any] = {}
    for model, runs in read_runs(args.log, args.data / "prompts", args.work).items():
        rows, costs = scored(runs)
        answer[model] = {"runs": rows, "costs": [each._asdict() for each in costs], "summary": summary(rows)}
        if not args.json:
            show(TEST_BED, rows)
            show("fitted", [{"costs": f"of half {n + 1}"} | rounded(each) for n, each in enumerate(costs)])
            show("errors", [answer[model]["summary"]])
    return answer


def rounded(costs: BedCosts) -> dict[str, str]:
    return {name: f"{value:.3g}" for name, value in costs._asdict().items()}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.study == TEST_BED:
        print(json.dumps(hold(args)))
        return 0
    tasks = tasks_of(args.data)
    costs = measured(args.data, EXPERT_NUMBERS).slower(args.slower)
    placements: dict[str, Any] = {}
    rows = [figures(run, tasks, costs, args, placements) for run in runs_of(args)]
    if not args.json:
        show(args.study, rows)
    if args.plot:
        draw(args.study, rows, args.plot)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
