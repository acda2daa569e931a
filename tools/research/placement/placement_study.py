"""Placement policies on real routing: three servers with one task each, placed by past tokens, scored on later ones.

    python -m tools.research.placement.placement_study DATA --capacity 1.1,1.45,1.8 --json

DATA has DeepSeek-V2-Lite's routing tables (`intent.ids.csv.gz`, `law...`, `translation...`). results/placement.md
defines the figures. With `--scale NODES` the policies are timed on invented routing of 58 layers of 256 experts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from edgemoe.cluster.control.messages import BoxReport
from edgemoe.cluster.control.planning.observation import observe, successions
from edgemoe.experts.activity import ActivityCounter
from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.gimbal_placement import cut_between, gimbal
from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values
from edgemoe.policy.placement.rendezvous import rendezvous, routes_for
from edgemoe.policy.placement.route_score import Routes, heaviest_pairs, remote_calls, score
from edgemoe.policy.placement.uniform import uniform
from edgemoe.replay.trace import load
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import StepMeta, StepRouting
from edgemoe.worker.cluster_member import MOST_PAIRS
from tools.research.placement.call_latency import LayerCosts, latency
from tools.research.placement.compared_placements import columns, redundance
from tools.research.placement.eplb import eplb
from tools.research.placement.prism_paper import published
from tools.research.placement.rendezvous_bound import least_rendezvous
from tools.research.placement.smartmoe import smartmoe
from tools.research.placement.traffic import TrafficCounts

TASKS = ("intent", "law", "translation")
DEVICES = ((1,), (1,), (1, 1))  # of each server, in equal parts
EXPERTS = 64
console = Console(stderr=True)


def read(folder: Path) -> tuple[list[Routes], list[Routes]]:
    """Returns each task's tokens [T, L, k]: the first half, and the second."""
    found = next(iter(folder.rglob(f"{TASKS[0]}.ids.csv.gz")), None)
    if found is None:
        raise SystemExit(f"{folder} has no {TASKS[0]}.ids.csv.gz")
    tokens = [np.concatenate(load([found.with_name(f"{t}.ids.csv.gz")], experts=EXPERTS).requests) for t in TASKS]
    return [each[: len(each) // 2] for each in tokens], [each[len(each) // 2 :] for each in tokens]


def activations_of(routes: Sequence[Routes], experts: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Counts how often each node's tokens chose each expert, [N, L, E]."""
    return np.array(
        [[np.bincount(each[:, layer].ravel(), minlength=experts) for layer in range(each.shape[1])] for each in routes],
        np.float64,
    )


def passed_in(routes: Sequence[Routes], experts: int) -> Values:
    """Counts the successions of an expert and one of the next layer, [L - 1, E, E]."""
    counts = TrafficCounts(routes[0].shape[1], experts, decay=1.0)
    for tokens in routes:
        counts.observe(tokens)
    return counts.traffic().passed


def counted(tokens: Routes, experts: int, *, successions: bool) -> ActivityCounter:
    """Returns the counts of an engine that ran these tokens [T, L, k]."""
    _, layers, top_k = tokens.shape
    counter = ActivityCounter(
        ExpertGeometry(layers, experts, top_k, 1, 1, "float32"), lambda: 0.0, successions=successions
    )
    nothing = np.zeros(len(tokens), np.int64)
    meta = StepMeta(("",), np.array([len(tokens)]), np.array([True]), nothing, nothing)
    ids = np.ascontiguousarray(tokens.transpose(1, 0, 2), np.int16)
    counter.add(StepRouting(meta, ids, np.zeros(ids.shape, np.float32), {}, 0.0, 0.0))
    return counter


def passed_told(routes: Sequence[Routes], experts: int) -> Values:
    """Returns the successions that a leader derives from reports of nodes with these tokens, [L - 1, E, E]."""
    reports = []
    for tokens in routes:
        told = counted(tokens, experts, successions=True).shares(MOST_PAIRS)
        reports.append(BoxReport("", told.tokens, told.chosen.tobytes(), passed=told.passed.tobytes()))
    return successions(reports, observe(reports, routes[0].shape[1], experts))


def methods(
    routes: Sequence[Routes], pairs: Sequence[IntArray], experts: int
) -> dict[str, Callable[[PlacementProblem], Placement]]:
    """Returns the policies by name; some also use `routes` or `pairs`."""
    top_k, passed = routes[0].shape[2], passed_told(routes, experts)
    return {
        "uniform": uniform,
        "redundance": lambda problem: redundance(problem, np.random.default_rng(0)),
        "smartmoe": smartmoe,
        "eplb": eplb,
        "published": published,
        "prism": prism,
        "columns": lambda problem: columns(problem, passed),
        "gimbal": lambda problem: gimbal(problem, passed),
        "exact": exact,
        "rendezvous": lambda problem: rendezvous(problem, routes_for(problem, pairs, top_k, np.random.default_rng(0))),
        "routes": lambda problem: rendezvous(problem, routes),
    }


def timed(policy: Callable[[PlacementProblem], Placement], problem: PlacementProblem) -> tuple[Placement, float, float]:
    """Returns a policy's placement, with wall and processor seconds of a second run."""
    policy(problem)
    wall, core = time.perf_counter(), time.process_time()
    answer = policy(problem)
    return answer, time.perf_counter() - wall, time.process_time() - core


def study(args: argparse.Namespace, capacity: float) -> dict[str, Any]:
    """Scores every policy at one capacity."""
    seen, unseen = read(args.data)
    activations = activations_of(seen, EXPERTS)
    parts = sum(map(len, DEVICES))
    slots = tuple(tuple(int(capacity * activations[0].size / parts) for _ in each) for each in DEVICES)
    problem = PlacementProblem(slots, activations)
    pairs = [heaviest_pairs(each, EXPERTS, args.pairs) for each in seen]
    rows: dict[str, Any] = {}
    passed = passed_in(unseen, EXPERTS)
    for name, policy in methods(seen, pairs, EXPERTS).items():
        placement, wall_s, core_s = timed(policy, problem)
        rows[name] = {key: round(value, 4) for key, value in asdict(score(placement, unseen)).items()}
        rows[name]["cut"] = round(cut_between(placement, passed) / float(passed.sum()), 4)
        rows[name]["seen_share"] = round(remote_calls(placement, activations) / activations.sum(), 4)
        rows[name]["seen_rendezvous"] = round(score(placement, seen).rendezvous, 4)
        rows[name]["layer_ms"] = [round(each, 3) for each in layer_ms(placement, unseen, args)]
        rows[name] |= {"solve_s": round(wall_s, 3), "solve_core_s": round(core_s, 3)}
    rows["bound"] = {"seen_rendezvous": round(least_rendezvous(seen, EXPERTS, problem.room.tolist()), 4)}
    return rows


def layer_ms(placement: Placement, routes: Sequence[Routes], args: argparse.Namespace) -> list[float]:
    """Returns mean milliseconds of a layer for each link delay of `--link-ms`, one token a batch."""
    nodes = len(routes)
    answer = []
    for link_ms in args.link_ms:
        calls = np.where(np.eye(nodes, dtype=bool), 0.0, link_ms)
        costs = LayerCosts(calls, np.zeros((nodes, nodes)), np.full(nodes, args.expert_ms), np.zeros(nodes))
        some = [each[:: max(1, len(each) // args.batches)] for each in routes]
        spent = sum(latency(placement, n, list(each[:, None]), costs) for n, each in enumerate(some))
        answer.append(spent / sum(each.shape[0] * each.shape[1] for each in some))
    return answer


def invented(nodes: int, tokens: int, seed: int = 0) -> list[Routes]:
    """Draws routes of 58 layers of 256 experts, 8 a token: nodes have preferences, and tokens are of eight kinds."""
    layers, experts, top_k = 58, 256, 8
    rng = np.random.default_rng(seed)
    common, kinds = rng.normal(0, 0.7, (layers, experts)), rng.normal(0, 0.8, (8, layers, experts))
    routes = np.empty((nodes, tokens, layers, top_k), np.int16)
    for node in range(nodes):
        liking = common + rng.normal(0, 0.8, (layers, experts))
        for token in range(tokens):
            scores = liking + kinds[rng.integers(8)] + rng.gumbel(0, 1, (layers, experts))
            routes[node, token] = np.argpartition(-scores, top_k, axis=1)[:, :top_k]
    return list(routes)


def scale(nodes: int, capacity: float, tokens: int, most_pairs: int) -> dict[str, Any]:
    """Times every policy on many nodes, with memories as 1 : 2 : 3 in turn."""
    seen, unseen = np.split(np.array(invented(nodes, 2 * tokens)), 2, axis=1)
    activations = activations_of(list(seen), 256)
    parts = [1 + node % 3 for node in range(nodes)]
    slots = tuple((-int(-capacity * activations[0].size * part // sum(parts)),) for part in parts)
    problem = PlacementProblem(slots, activations)
    pairs = [heaviest_pairs(each, 256, most_pairs) for each in seen]
    rows: dict[str, Any] = {}
    for name, policy in methods(list(seen), pairs, 256).items():
        placement, wall_s, core_s = timed(policy, problem)
        rows[name] = {key: round(value, 4) for key, value in asdict(score(placement, list(unseen))).items()}
        rows[name] |= {"solve_s": round(wall_s, 3), "solve_core_s": round(core_s, 3)}
        console.print(nodes, name, rows[name])
    return rows


def show(title: str, rows: dict[str, Any]) -> None:
    table = Table(title=title)
    columns = list(next(iter(rows.values())))
    for column in ("policy", *columns):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(str(row.get(column, "")) for column in columns))
    console.print(table)


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", type=Path, help="a folder with the tables, at any depth")
    p.add_argument("--capacity", type=numbers, default=[1.1, 1.45, 1.8], help="in total, as multiples of the experts")
    p.add_argument("--pairs", type=int, default=1000, help="of the pairs, the heaviest that are told per layer")
    p.add_argument("--link-ms", type=numbers, default=[0.2, 0.7, 5.0], help="a call's round trip")
    p.add_argument("--expert-ms", type=float, default=0.05, help="computing one expert")
    p.add_argument("--batches", type=int, default=300, help="tokens of each server whose time is summed")
    p.add_argument("--scale", type=int, default=0, metavar="NODES", help="time the policies on so many nodes instead")
    p.add_argument("--tokens", type=int, default=100, help="with --scale: of each node")
    p.add_argument("--json", action="store_true", help="only the JSON line, no table")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    result = {}
    for capacity in args.capacity:
        rows = scale(args.scale, capacity, args.tokens, args.pairs) if args.scale else study(args, capacity)
        result[f"{capacity:g}"] = rows
        if not args.json:
            show(f"memory for {capacity:g} times the experts", rows)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
