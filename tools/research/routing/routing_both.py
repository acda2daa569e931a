"""Gimbal and ELDR together: whole engines with steps as long as their distinct experts need, under each and both.

Lengths and arrivals are from the Azure chat trace, routes from recorded sequences; requests of one source are kept
apart. Changes are in percent of round robin with first come, first served, paired over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.policy.routing.eldr import BandChooser, BandRouting, LocalityBand
from edgemoe.policy.routing.eldr_fitting import fit_clusters
from edgemoe.policy.routing.gimbal import GimbalChooser, GimbalThresholds
from edgemoe.policy.routing.marginal_union import DecodeTimes, PromptForecast, UnionChooser, UnionTerm
from edgemoe.policy.routing.offers import PushRouting, RoundRobin, RoutingPolicy, fewest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.policy.routing.signatures import ExpertClusters, absence
from edgemoe.types.arrays import FloatArray
from tools.research.routing.compared_routes import least_requests
from tools.research.simulate.decode_pool import DecodeCosts
from tools.research.simulate.decode_traffic import FIT_SHARE, MODELS, Source, recorded, sources_of, step_costs
from tools.research.simulate.serving.cluster import cluster_of, jobs_of
from tools.research.simulate.serving.engine_steps import BLOCK
from tools.research.simulate.serving.expert_times import Apart, experts_s, routed, step_costs_of
from tools.research.simulate.serving.serving_workload import Load, Trace, at_rate, azure, drawn
from tools.research.simulate.serving.simulated_engine import EngineShape
from tools.research.simulate.serving.step_fitting import times_of

ENGINES, SLOTS, REQUESTS = 4, 16, 600
KV_TOKENS = {"ample": 1 << 22, "tight": 20_000}  # of an engine
RATES = (0.6, 0.9, 1.0)  # of saturation
PULLED: dict[str, Any] = {"order": "sjf", "output_reserve": 0.25}
Run = tuple[Load, list[Source], ExpertClusters]


def variants(clusters: ExpertClusters, times: DecodeTimes) -> dict[str, tuple[RoutingPolicy, dict[str, Any]]]:
    """Returns policies, and their changes to the engines."""
    places = [f"{n:03}" for n in range(ENGINES)]
    alone = replace(PullLimits(), crowding=0.0)
    band = LocalityBand(fewest)
    band.follow(clusters, places)
    return {
        "round robin": (PushRouting(RoundRobin()), {}),
        "JSQ": (PushRouting(fewest), {}),
        "least requests": (PushRouting(least_requests), {}),
        "Gimbal": (PushRouting(GimbalChooser(GimbalThresholds())), {"order": "gimbal"}),
        "ELDR": (PushRouting(BandChooser(clusters, places)), {}),
        "ELDR, to free slots": (BandRouting(band, PullRouting(PullLimits())), PULLED),  # as in daemons
        "union": (PushRouting(UnionChooser(times)), {}),
        "pull": (PullRouting(PullLimits()), PULLED),
        "pull + union": (PullRouting(alone, UnionTerm(times)), PULLED),
        "pull + union, crowding": (PullRouting(PullLimits(), UnionTerm(times)), PULLED),
    }


def run_of(trace: Trace, sources: Sequence[Source], top_k: int, seed: int) -> Run:
    """Returns requests at one a second, the source of each, and clusters of other sources."""
    rng = np.random.default_rng((seed, 23))
    load = drawn(trace, "random", REQUESTS, rng)
    order = rng.permutation(len(sources))
    fit = int(len(sources) * FIT_SHARE)
    clusters, _ = fit_clusters(recorded([sources[n] for n in order[:fit].tolist()]), np.full(ENGINES, SLOTS), rng)
    rounds = [rng.permutation(order[fit:]) for _ in range(-(-REQUESTS // (len(sources) - fit)))]
    mine = [sources[n] for n in np.concatenate(rounds)[:REQUESTS].tolist()]
    forecast = PromptForecast(top_k, clusters)
    expected = float(np.mean(load.output))
    offered = [
        replace(one, signature=each.prefill, chance=forecast.chance(each.prefill), expected_tokens=expected)
        for one, each in zip(load.offered, mine, strict=True)
    ]
    return Load(offered, load.output), mine, clusters


def outcome(run: Run, costs: DecodeCosts, rate: float, kv_tokens: int, name: str) -> dict[str, float]:
    """Returns figures of requests at a rate."""
    load, sources, clusters = run
    policy, engine = variants(clusters, DecodeTimes(costs.step_s, costs.expert_s))[name]
    return served(at_rate(load, rate), sources, costs, policy, kv_tokens, engine)


def served(
    load: Load,
    sources: Sequence[Source],
    costs: DecodeCosts,
    policy: RoutingPolicy,
    kv_tokens: int,
    engine: dict[str, Any],
    seen: Sequence[FloatArray] = (),
) -> dict[str, float]:
    """Returns figures of these requests; `seen` has better chances of each one's experts, as its engine knows them."""
    shape = EngineShape(step_costs_of(costs), SLOTS, kv_tokens // BLOCK, more_s=experts_s, data=routed(sources, costs))
    apart = Apart(policy, sources)
    cluster = cluster_of(ENGINES, replace(shape, **engine), apart)
    apart.engines = cluster.engines
    jobs = jobs_of(*load)
    for job, chance in zip(jobs, seen, strict=False):
        job.absent = absence(chance)
    cluster.serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    ends = np.sort([job.end_s for job in jobs])
    fifth = len(ends) // 5
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "tpot_p50_s": float(np.median(tpot_s)),
        "tpot_p99_s": float(np.quantile(tpot_s, 0.99)),
        "ended_per_s": float(3 * fifth / (ends[4 * fifth - 1] - ends[fifth - 1])),
    }


def compared(runs: Sequence[Run], costs: DecodeCosts, rate: float, kv_tokens: int) -> list[dict[str, Any]]:
    """Returns a row for each variant: figures, and changes against the first."""
    names = list(variants(runs[0][2], DecodeTimes(1.0, 1.0)))
    return changes({name: [outcome(run, costs, rate, kv_tokens, name) for run in runs] for name in names})


def changes(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Returns a row for each variant, of its figures in each run, and changes against the first."""
    base, rows = next(iter(found.values())), []
    for name, ours in found.items():
        row: dict[str, Any] = {"policy": name}
        for key in ("ttft_mean_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"):
            change = [100 * (mine[key] / theirs[key] - 1) for mine, theirs in zip(ours, base, strict=True)]
            row[key] = round(float(np.mean([each[key] for each in ours])), 4)
            row[f"{key} %"] = round(float(np.mean(change)), 1)
            row[f"{key} % spread"] = round((max(change) - min(change)) / 2, 1)
        rows.append(row)
    return rows


def study(data: Path, seeds: range, models: Sequence[str] = tuple(MODELS)) -> dict[str, Any]:
    """Returns a table for each model, KV and rate."""
    trace: Trace = azure(data)
    answer: dict[str, Any] = {}
    for model in models:
        sources = sources_of(data, model)
        costs = step_costs(data, model, sources)
        runs = [run_of(trace, sources, sources[0].routes.shape[2], seed) for seed in seeds]
        for kv, tokens in KV_TOKENS.items():
            full = outcome(runs[0], costs, 1e9, tokens, "round robin")["ended_per_s"]
            for share in RATES:
                answer[f"{model}, {kv} KV, {share:g} of {full:.1f}/s"] = compared(runs, costs, share * full, tokens)
    return answer
