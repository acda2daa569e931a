"""The simulator's error against the test bed, on runs that its costs were not fitted to."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tools.research.simulate.bed.bed_fitting import BedCosts, at_speed_of, fit, took_s
from tools.research.simulate.bed.bed_runs import BedRun

Key = tuple[Any, ...]
SAME = ("model", "setting", "pace")  # fields in which compared methods' runs agree
HALVES = 2


def halves(runs: Sequence[BedRun]) -> list[tuple[list[BedRun], list[BedRun]]]:
    """Yields twice: runs to fit to, and runs to score, with all of a method in one of them. Each is scored once."""
    methods = list(dict.fromkeys(run.record["method"] for run in runs))
    half = [[run for run in runs if methods.index(run.record["method"]) % HALVES == n] for n in range(HALVES)]
    if not all(half):
        raise SystemExit("runs of two methods at least are needed: one to fit costs to, one to score them on")
    return [(half[0], half[1]), (half[1], half[0])]


def scored(runs: Sequence[BedRun]) -> tuple[list[dict[str, Any]], list[BedCosts]]:
    """Returns a row for each run with its mean latency, measured and simulated, and each half's costs."""
    rows, found = [], []
    for seen, unseen in halves(runs):
        costs = fit(seen)
        found.append(costs)
        rows += [row_of(run, costs) for run in unseen]
    return sorted(rows, key=_key), found


def row_of(run: BedRun, costs: BedCosts) -> dict[str, Any]:
    record = run.record
    measured = float(run.latency_s.mean())
    simulated, at_speed = (float(took_s(run, each)[0].mean()) for each in (costs, at_speed_of(run, costs)))
    return {
        "model": record["model"],
        "setting": record["settings"][0],
        "pace": record["pace"],
        "method": record["method"],
        "seed": record["seed"],
        "measured_s": round(measured, 3),
        "simulated_s": round(simulated, 3),
        "error": round(simulated / measured - 1, 3),
        "error_at_speed": round(at_speed / measured - 1, 3),
    }


def _key(row: dict[str, Any]) -> Key:
    return tuple(row[name] for name in (*SAME, "method"))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns errors by run and by the means of equal runs, and the error of a second measurement."""
    by_key = _grouped(rows)
    means = {key: (_mean(each, "measured_s"), _mean(each, "simulated_s")) for key, each in by_key.items()}
    of_means = [abs(simulated / measured - 1) for measured, simulated in means.values()]
    alike = [[row["measured_s"] for row in each] for each in by_key.values()]
    again = [abs(a / b - 1) for each in alike for a, b in itertools.permutations(each, 2)]
    errors = [abs(row["error"]) for row in rows]
    return {
        "runs": len(rows),
        "error": round(float(np.mean(errors)), 3),
        "worst": round(float(np.max(errors)), 3),
        "error_at_speed": round(float(np.mean([abs(row["error_at_speed"]) for row in rows])), 3),
        "error_of_means": round(float(np.mean(of_means)), 3),
        "worst_of_means": round(float(np.max(of_means)), 3),
        "measured_again": round(float(np.mean(again)), 3) if again else None,
        "measured_again_worst": round(float(np.max(again)), 3) if again else None,
        "pairs_kept": _kept(means),
        "pairs_kept_again": _kept(
            {k: (e[0]["measured_s"], e[1]["measured_s"]) for k, e in by_key.items() if len(e) > 1}
        ),
    }


def _mean(rows: Iterable[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _grouped(rows: Iterable[dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    found = defaultdict[Key, list[dict[str, Any]]](list)
    for row in rows:
        found[_key(row)].append(row)
    return found


def _kept(pairs: dict[Key, tuple[float, float]]) -> list[int]:
    """Returns the number of pairs of methods with the same faster one in both figures, and of all pairs."""
    kept = of = 0
    for (a, first), (b, second) in itertools.combinations(pairs.items(), 2):
        if a[: len(SAME)] == b[: len(SAME)]:
            kept += (first[0] < second[0]) == (first[1] < second[1])
            of += 1
    return [kept, of]
