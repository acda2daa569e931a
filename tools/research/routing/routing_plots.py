"""Plots of a routing study, from the JSON of `tools.research.routing.compare --json`.

    python -m tools.research.routing.routing_plots gimbal FOUND.json plots/routing_gimbal.png
    python -m tools.research.routing.routing_plots eldr FOUND.json plots/routing_eldr.png

`gimbal`: mean TTFT by rate and policy, relative to round robin, with 95 % intervals. `eldr`: experts and TPOT.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

LENGTHS = re.compile(r"lengths random, (\w+) KV, (\d+)%")
POOL = "8 workers, batch 8"
POLICIES = ("SJF, 5 s", "algorithm 1", "Gimbal", "join shortest queue", "least requests", "pull")
EXPERTS = (
    ("experts/rr", "active experts, against round robin"),
    ("p50/jsq", "median TPOT, against JSQ"),
    ("p99/jsq", "p99 TPOT, against JSQ"),
)


def by_rate(found: dict[str, Any]) -> Figure:
    """Plots mean TTFT of Gimbal's parts, of pull and of baselines."""
    settings = [(*match.groups(), rows) for name, rows in found.items() if (match := LENGTHS.match(name))]
    kinds = list(dict.fromkeys(kv for kv, _, _ in settings))
    figure = Figure(figsize=(4.5 * len(kinds), 4.0), layout="constrained")
    for axes, kv in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        mine = [(float(rate), rows) for kind, rate, rows in settings if kind == kv]
        for number, policy in enumerate(POLICIES):
            points = [(rate, _row(rows, policy)) for rate, rows in mine]
            change = [[float(part) for part in row["ttft_mean_s_change"].split("±")] for _, row in points]
            places = [rate + 0.4 * (number - (len(POLICIES) - 1) / 2) for rate, _ in points]
            axes.errorbar(
                places, [mean for mean, _ in change], [half for _, half in change], marker="o", capsize=2, label=policy
            )
        axes.set(title=f"{kv} KV", xlabel="% of the rate that saturates", xticks=[rate for rate, _ in mine])
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.set_ylabel("mean TTFT, % against round robin")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def by_policy(found: dict[str, Any]) -> Figure:
    """Plots decode workers' loads and times under each policy, a row for each model; whiskers are half the range of
    seeds.
    """
    figure = Figure(figsize=(12, 3.2 * len(found)), layout="constrained")
    for line, (model, tables) in zip(
        figure.subplots(len(found), len(EXPERTS), squeeze=False), found.items(), strict=True
    ):
        rows = tables[POOL]
        for axes, (column, label) in zip(line, EXPERTS, strict=True):
            axes.barh(
                [row["policy"] for row in rows],
                [row[column] for row in rows],
                xerr=[row[f"{column} spread"] for row in rows],
                color=["tab:gray" if "placebo" in row["policy"] else "tab:blue" for row in rows],
                capsize=2,
            )
            axes.set_xlabel(f"{label}, %")
            axes.axvline(0, color="black", linewidth=0.8)
            axes.grid(alpha=0.3, axis="x")
            axes.invert_yaxis()
            axes.tick_params(axis="y", labelleft=axes is line[0])
        line[1].set_title(f"{model}, {POOL}")
    return figure


DRAWN: dict[str, Callable[[dict[str, Any]], Figure]] = {"gimbal": by_rate, "eldr": by_policy}


def _row(rows: list[dict[str, Any]], policy: str) -> dict[str, Any]:
    return next(row for row in rows if row["policy"] == policy)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=sorted(DRAWN))
    parser.add_argument("found", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args(argv)
    DRAWN[args.study](json.loads(args.found.read_text())).savefig(args.png, dpi=80)
    return 0


if __name__ == "__main__":
    sys.exit(main())
