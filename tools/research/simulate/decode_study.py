"""Decode workers under every routing policy, in paired runs: the same requests at the same times.

A figure is the mean over seeds of the change from a baseline in the same run; `spread` is half its range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from edgemoe.policy.routing.eldr import BandChooser
from edgemoe.policy.routing.eldr_fitting import fit_clusters
from edgemoe.policy.routing.gimbal import GimbalChooser, GimbalThresholds
from edgemoe.policy.routing.marginal_union import DecodeTimes, PromptForecast, UnionChooser, UnionTerm
from edgemoe.policy.routing.offers import PushRouting, RoundRobin, RoutingPolicy, fewest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.policy.routing.signatures import ExpertClusters
from edgemoe.types.arrays import FloatArray
from tools.research.routing.compared_routes import Anywhere, BetterOfTwo, ByLabel, least_requests
from tools.research.simulate.decode_pool import DecodeOutcome
from tools.research.simulate.decode_router import place, serve
from tools.research.simulate.decode_traffic import Scene, recorded

SCORED = slice(15, 90)  # percent of the requests: without the start and the end of the run
BASELINES = ("random", "round robin", "least requests", "JSQ", "power of two", "domain", "Gimbal")
OURS = ("ELDR", "union, no clusters", "union", "pull", "pull + union")
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Knowledge before the run."""

    scene: Scene
    clusters: ExpertClusters
    times: DecodeTimes


def fitted(scene: Scene) -> Fitted:
    """Returns clusters of the recorded sequences, one for each worker."""
    traffic = scene.traffic
    capacity = np.full(traffic.workers, traffic.slots)
    clusters, _ = fit_clusters(recorded(scene.recorded), capacity, np.random.default_rng(traffic.seed))
    return Fitted(scene, clusters, DecodeTimes(scene.costs.step_s, scene.costs.expert_s))


def policy_of(name: str, known: Fitted) -> RoutingPolicy:
    """Returns a policy by its name."""
    workers = [place(w) for w in range(known.scene.traffic.workers)]
    random = Random(known.scene.traffic.seed)
    made: dict[str, Callable[[], RoutingPolicy]] = {
        "random": lambda: PushRouting(Anywhere(random)),
        "round robin": lambda: PushRouting(RoundRobin()),
        "least requests": lambda: PushRouting(least_requests),
        "JSQ": lambda: PushRouting(fewest),
        "power of two": lambda: PushRouting(BetterOfTwo(random)),
        "domain": lambda: PushRouting(ByLabel(_labels(known.scene, workers))),
        "Gimbal": lambda: PushRouting(GimbalChooser(GimbalThresholds())),
        "ELDR": lambda: PushRouting(BandChooser(known.clusters, workers)),
        "union, no clusters": lambda: PushRouting(UnionChooser(known.times)),
        "union": lambda: PushRouting(UnionChooser(known.times)),
        "pull": lambda: PullRouting(PullLimits()),
        "pull + union": lambda: PullRouting(PullLimits(), UnionTerm(known.times)),
    }
    return made[name]()


def outcome(
    name: str,
    known: Fitted,
    signature: Callable[[int], FloatArray] | None = None,
    policy: RoutingPolicy | None = None,
) -> DecodeOutcome:
    """Returns the results of the scene's requests under a policy, the named one or another."""
    clusters = None if name.endswith("no clusters") else known.clusters
    forecast = PromptForecast(known.scene.top_k, clusters)
    return serve(known.scene, policy or policy_of(name, known), forecast, signature)


def permuted(scene: Scene) -> Callable[[int], FloatArray]:
    """Returns another request's signature for each: a placebo."""
    other = np.random.default_rng(scene.traffic.seed + 1).permutation(len(scene.sources))
    return lambda n: scene.sources[int(other[n])].prefill


def figures(scene: Scene, met: DecodeOutcome) -> Figures:
    """Returns figures of a run's scored requests. Active experts are weighted by tokens."""
    count = len(scene.sources)
    part = slice(count * SCORED.start // 100, count * SCORED.stop // 100)
    tokens, tpot, domain = scene.lengths[part], met.tpot_s[part], scene.domains[part]
    answer = {
        "experts": float(np.average(met.active[part], weights=tokens)),
        "tpot_p50_ms": float(np.median(tpot) * 1e3),
        "tpot_p99_ms": float(np.quantile(tpot, 0.99) * 1e3),
        "tpot_mean_ms": float(tpot.mean() * 1e3),
        "batch": float(np.average(met.batch[part], weights=tokens)),
        "load_spread": met.spread,
        "wait_ms": float(met.wait_s[part].mean() * 1e3),
    }
    return answer | {
        f"tpot_p50_ms {each}": float(np.median(tpot[domain == each]) * 1e3) for each in sorted(set(domain))
    }


def compared(runs: list[dict[str, Figures]]) -> list[dict[str, Any]]:
    """Returns a row for each policy: changes in percent, experts against round robin, times against JSQ."""
    rows = []
    for name in runs[0]:
        row: dict[str, Any] = {"policy": name}
        for key, base, column in (
            ("experts", "round robin", "experts/rr"),
            ("experts", "JSQ", "experts/jsq"),
            ("tpot_p50_ms", "JSQ", "p50/jsq"),
            ("tpot_p99_ms", "JSQ", "p99/jsq"),
            ("tpot_mean_ms", "JSQ", "mean/jsq"),
        ):
            change = [100 * (run[name][key] / run[base][key] - 1) for run in runs]
            row[column] = round(float(np.mean(change)), 1)
            row[f"{column} spread"] = round((max(change) - min(change)) / 2, 1)
        domains = [key for key in runs[0][name] if key.startswith("tpot_p50_ms ")]
        worst = {key: float(np.mean([100 * (run[name][key] / run["JSQ"][key] - 1) for run in runs])) for key in domains}
        row["worst domain"] = round(max(worst.values()), 1)
        for key, digits in (("tpot_p50_ms", 2), ("batch", 1), ("load_spread", 2), ("wait_ms", 1)):
            row[key] = round(float(np.mean([run[name][key] for run in runs])), digits)
        rows.append(row)
    return rows


def _labels(scene: Scene, workers: list[str]) -> dict[str, frozenset[str]]:
    """Returns the workers of each request's domain: as many as its share of the tokens."""
    names = sorted(set(scene.domains.tolist()))
    tokens = np.array([scene.lengths[scene.domains == name].sum() for name in names], np.float64)
    number = np.ones(len(names), np.int64)
    for _ in range(len(workers) - len(names)):
        number[int(np.argmax(tokens / number))] += 1
    ends = np.cumsum(number)
    own = {name: frozenset(workers[end - n : end]) for name, n, end in zip(names, number, ends, strict=True)}
    return {str(n): own[domain] for n, domain in enumerate(scene.domains.tolist())}
