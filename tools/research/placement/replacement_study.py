"""Experts of every layer on a few devices or nodes, by load and successions, on DeepSeek-V2-Lite's routing.

    python -m tools.research.placement.replacement_study DATA --devices 2,4 --json

Every policy sees a task's first half and is scored on the second. results/replacement.md defines the figures. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.experts.compute.device_spread import spread
from edgemoe.experts.tiers.assignments import deal_to_devices
from edgemoe.policy.placement.gimbal_placement import cut_between, gimbal
from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.problem import PlacementProblem
from edgemoe.policy.placement.route_score import Routes, score
from edgemoe.types.arrays import IntArray
from tools.research.placement.compared_placements import columns
from tools.research.placement.placement_study import activations_of, counted, passed_in, passed_told
from tools.research.placement.relocate import anchored, published, relocate
from tools.research.placement.relocation_oracle import optimum
from tools.research.placement.traffic import ExpertTraffic, RelocationPrices, TrafficCounts, cost, cut, loads
from tools.research.simulate.routed_workload import EXPERTS, TASKS, Task, tasks_of

PAIRS = 32  # strongest pairs on the anchor, for the published form
SHARE = 0.5  # share of the anchor's room at the start of the search
PRICES = (1.0, 4.0, 16.0)  # of uneven load, in traffic
SMALL_LAYERS, SMALL_EXPERTS = 3, 6
CAPACITIES = (1.1, 1.45)
CACHED, CACHED_TOKENS = 0.25, 2000


def counts(routes: tuple[Any, ...]) -> ExpertTraffic:
    """Counts sequences one after the other; later ones weigh more."""
    every = TrafficCounts(routes[0].shape[1], EXPERTS, decay=0.99)
    for sequence in routes:
        every.observe(sequence)
    return every.traffic()


def scored(home: IntArray, traffic: ExpertTraffic, devices: int) -> dict[str, float]:
    each = loads(home, traffic.chosen, devices)
    return {
        "cut": round(cut(home, traffic) / float(traffic.passed.sum()), 4),
        "fullest": round(float((each.max(axis=1) / each.mean(axis=1)).mean()), 4),
    }


def busiest(home: IntArray, tokens: Routes, devices: int) -> float:
    """Returns a token's experts of a layer on the device with most, relative to an even share; the mean."""
    where = home[np.arange(len(home))[:, None], tokens]  # [T, L, k]
    most = np.stack([(where == device).sum(axis=2) for device in range(devices)]).max(axis=0)
    return round(float(most.mean()) * devices / tokens.shape[2], 4)


def misses(home: IntArray, tokens: Routes, devices: int) -> float:
    """Returns the share of chosen experts that miss a device's LRU cache."""
    room = int(CACHED * home.size / devices)
    caches = [OrderedDict[tuple[int, int], None]() for _ in range(devices)]
    missed = 0
    for token in tokens.tolist():
        for layer, chosen in enumerate(token):
            for expert in chosen:
                cache = caches[home[layer, expert]]
                missed += (layer, expert) not in cache
                cache[layer, expert] = None
                cache.move_to_end((layer, expert))
                if len(cache) > room:
                    cache.popitem(last=False)
    return round(missed / tokens.size, 4)


def spread_out(tokens: Routes, devices: int) -> IntArray:
    """Places experts as a box does that has counted these tokens [T, L, k]."""
    layers = tokens.shape[1]
    pairs = counted(tokens, EXPERTS, successions=False).pairs
    return spread(pairs, deal_to_devices((layers, EXPERTS), [1] * devices), [EXPERTS] * layers)


def placements(seen: ExpertTraffic, others: ExpertTraffic, devices: int) -> dict[str, IntArray]:
    """Returns every policy's placement by its knowledge."""
    start = anchored(seen, devices, 0, SHARE)
    answer = {
        "by number": np.tile(np.arange(EXPERTS) * devices // EXPERTS, (len(seen.chosen), 1)),
        "by load": anchored(seen, devices, 0, 0.0),
        "published": published(seen, devices, 0, PAIRS),
        "anchored": start,
    }
    for price in PRICES:
        weights = RelocationPrices(uneven=price)
        answer[f"relocated, load at {price:g}"] = relocate(start, seen, devices, weights)
        if price == PRICES[1]:
            offline = relocate(anchored(others, devices, 0, SHARE), others, devices, weights)
            answer[f"offline, load at {price:g}"] = offline
    return answer


def gaps(traffic: ExpertTraffic, devices: int, price: float) -> dict[str, Any]:
    """Returns the costs of the exchanges and of the literal form relative to the optimum, on a small part."""
    layers = slice(0, SMALL_LAYERS)
    best = np.sort(np.argsort(-traffic.chosen[layers].sum(axis=0))[:SMALL_EXPERTS])
    small = ExpertTraffic(traffic.chosen[layers][:, best], traffic.passed[: SMALL_LAYERS - 1][:, best][:, :, best])
    weights = RelocationPrices(uneven=price)
    free = optimum(small, devices, weights, limit_s=40.0)
    columns = optimum(small, devices, weights, per_layer=False, limit_s=40.0)
    assert free is not None
    assert columns is not None
    least = cost(free.home, small, devices, weights)
    ours = relocate(anchored(small, devices, 0, SHARE), small, devices, weights)
    found = {"relocated": ours, "published": published(small, devices, 0, 2), "best columns": columns.home}
    each = {name: round(100 * (cost(home, small, devices, weights) / least - 1), 1) for name, home in found.items()}
    return {"proved": free.proved and columns.proved} | each


def study(tasks: list[Task], devices: int) -> dict[str, Any]:
    """Returns means over the tasks."""
    rows: dict[str, list[dict[str, float]]] = {}
    small = []
    for n in range(len(TASKS)):
        seen, unseen = counts(tasks[n].seen), counts(tasks[n].unseen)
        others = counts(tuple(each for m, task in enumerate(tasks) if m != n for each in task.seen))
        known, tokens = np.concatenate(tasks[n].seen), np.concatenate(tasks[n].unseen)
        dealt = {"as dealt at first": deal_to_devices((known.shape[1], EXPERTS), [1] * devices)}
        dealt["spread"] = spread_out(known, devices)
        for name, home in (placements(seen, others, devices) | dealt).items():
            own = {"busiest": busiest(home, tokens, devices), "misses": misses(home, tokens[:CACHED_TOKENS], devices)}
            rows.setdefault(name, []).append(scored(home, unseen, devices) | own)
            if name.startswith("relocated"):
                weights = RelocationPrices(uneven=float(name.split()[-1]))
                again = relocate(home, unseen, devices, weights)
                dear = relocate(home, unseen, devices, weights, move_cost=0.01 * float(unseen.chosen.mean()) * 6)
                rows[name][-1] |= {"moved": float((again != home).mean()), "moved_dear": float((dear != home).mean())}
        small.append(gaps(seen, devices, PRICES[1]))
    means = {
        name: {key: round(float(np.mean([row[key] for row in each])), 4) for key in each[0]}
        for name, each in rows.items()
    }
    return {"placements": means, "oracle": small}


def between_nodes(tasks: list[Task], capacity: float) -> dict[str, dict[str, float]]:
    """Returns means over the task left out; memory holds all experts `capacity` times."""
    rows: dict[str, list[dict[str, float]]] = {}
    for out in range(len(TASKS)):
        seen, unseen = ([np.concatenate(getattr(t, half)) for t in tasks] for half in ("seen", "unseen"))
        other = seen.pop(out)
        unseen.pop(out)
        activations = activations_of(seen, EXPERTS)
        slots = tuple((int(capacity * activations[0].size * part / 3),) for part in (1, 2))
        problem, then = PlacementProblem(slots, activations), passed_in(unseen, EXPERTS)
        known = {"online": passed_told(seen, EXPERTS), "offline": passed_told([other], EXPERTS)}
        for name in ("prism", "columns", *known):
            if name in known:
                placement = gimbal(problem, known[name])
            else:
                placement = prism(problem) if name == "prism" else columns(problem, known["online"])
            row = {"cut": cut_between(placement, then) / float(then.sum()), **asdict(score(placement, unseen))}
            rows.setdefault(name, []).append(row)
    return {
        name: {key: round(float(np.mean([row[key] for row in each])), 4) for key in each[0]}
        for name, each in rows.items()
    }


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", type=Path)
    p.add_argument("--devices", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4])
    p.add_argument("--json", action="store_true", help="only the JSON line")
    args = p.parse_args(argv)
    tasks = tasks_of(args.data)
    found = {str(devices): study(tasks, devices) for devices in args.devices}
    nodes = {f"{capacity:g}": between_nodes(tasks, capacity) for capacity in CAPACITIES}
    if not args.json:
        for devices, one in found.items():
            for name, row in one["placements"].items():
                print(f"{devices} devices, {name}: {row}")
        for capacity, each in nodes.items():
            for name, row in each.items():
                print(f"nodes, {capacity} times the experts, {name}: {row}")
    print(json.dumps(found | {"nodes": nodes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
