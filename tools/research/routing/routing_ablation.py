"""The gain by each part of the default policy: the whole policy, and each part left out, on the same requests.

Engines are as in `routing_both`, with prefix caches. Half of each layer's experts are in place, chosen by one domain's
traffic; others take FAR times as long. Requests are Mooncake's conversations. A user keeps to one domain, and the last
prompt's experts predict the next. Changes are in percent of the default, paired over seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgemoe.policy.routing.gimbal import GimbalChooser, GimbalThresholds
from edgemoe.policy.routing.marginal_union import DecodeTimes, PromptForecast, UnionTerm
from edgemoe.policy.routing.offers import (
    OfferAssignment,
    PushRouting,
    RoundRobin,
    RoutingPolicy,
    RoutingTarget,
    WaitingRequest,
)
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.policy.routing.signatures import absence
from edgemoe.types.arrays import FloatArray
from tools.bench.stats import interval
from tools.research.routing.compared_routes import least_requests
from tools.research.routing.routing_known import before
from tools.research.routing.routing_residency import homes
from tools.research.simulate.decode_pool import DecodeCosts
from tools.research.simulate.decode_traffic import MODELS, Source, sources_of, step_costs
from tools.research.simulate.serving.cluster import Cluster, jobs_of
from tools.research.simulate.serving.engine_steps import BLOCK
from tools.research.simulate.serving.expert_times import Apart, experts_s, routed, step_costs_of
from tools.research.simulate.serving.prefixes import PrefixCache
from tools.research.simulate.serving.serving_workload import MOONCAKE_TOKENS, Load, at_rate, mooncake
from tools.research.simulate.serving.simulated_engine import Engine, EngineShape
from tools.research.simulate.serving.step_fitting import times_of

ENGINES, SLOTS, REQUESTS = 4, 16, 600
KV_TOKENS = {"ample": 400_000, "tight": 80_000}  # of an engine
RATES = (0.9, 1.0)  # of saturation
FAR = 4.0
MOST_PROMPT = 16_384
STRETCH, TURNS, STARTS = 4000, 3, 4000  # requests of the trace; least requests of a user; possible starts of a stretch
PULLED: dict[str, Any] = {"order": "sjf", "output_reserve": 0.25}
FIGURES = ("ttft_mean_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "experts", "hit_rate", "ended_per_s")


class Run(NamedTuple):
    """A seed's requests and their sources, the knowledge of each at offer and after prefill, and homes."""

    load: Load
    sources: list[Source]
    seen: list[FloatArray]
    far_s: list[FloatArray]  # by engine


@dataclass(frozen=True, slots=True)
class Part:
    """The default without a part of it: the replaced options of policy and engines."""

    limits: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    hidden: dict[str, Any] = field(default_factory=dict)  # replaced knowledge of engines
    union: bool = True


PARTS = {
    "default": Part(),
    "without marginal union": Part(union=False),
    "without residency": Part(hidden={"resident": None}),
    "without reserve of KV": Part({"output_reserve": 0.0}, {"output_reserve": 0.0}),
    "without load": Part({"crowding": 0.0}, hidden={"prefill_tokens": 0}),
    "without affinity": Part({"affinity": 0.0}),
    "without prefix hits": Part(hidden={"prefixes": frozenset()}),
    "without both of these": Part({"affinity": 0.0}, hidden={"prefixes": frozenset()}),
    "without aging": Part({"aging": 0.0}, {"aging_tokens_per_s": 0.0}),
}
OTHERS: dict[str, tuple[Callable[[], RoutingPolicy], dict[str, Any]]] = {
    "Gimbal": (lambda: PushRouting(GimbalChooser(GimbalThresholds())), {"order": "gimbal"}),
    "least requests": (lambda: PushRouting(least_requests), {}),
    "round robin": (lambda: PushRouting(RoundRobin()), {}),
}


class Hiding:
    """Hides a part of the knowledge of engines from a policy."""

    def __init__(self, policy: RoutingPolicy, hidden: dict[str, Any]) -> None:
        self._policy, self._hidden = policy, hidden

    def takes(self, views: Sequence[RoutingTarget]) -> bool:
        return self._policy.takes([replace(view, **self._hidden) for view in views])

    def assign(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        return self._policy.assign(offers, [replace(view, **self._hidden) for view in views], now_s)


def policy_of(name: str, times: DecodeTimes) -> tuple[RoutingPolicy, dict[str, Any]]:
    """Returns a policy, and its changes to the engines."""
    if name in OTHERS:
        make, engine = OTHERS[name]
        return make(), engine
    part = PARTS[name]
    pull = PullRouting(replace(PullLimits(), **part.limits), *([UnionTerm(times)] if part.union else []))
    return Hiding(pull, part.hidden) if part.hidden else pull, PULLED | part.engine


def returning(load: Load) -> Load:
    """Returns the requests of users with TURNS requests or more, at one a second."""
    asks = Counter(one.user for one in load.offered)
    pairs = zip(load.offered, load.output, strict=True)
    kept = [(one, tokens) for one, tokens in pairs if asks[one.user] >= TURNS][:REQUESTS]
    first, last = kept[0][0].arrived_s, kept[-1][0].arrived_s
    scale = len(kept) / max(1e-9, last - first)
    offered = [
        replace(one, request=str(n), arrived_s=(one.arrived_s - first) * scale) for n, (one, _) in enumerate(kept)
    ]
    return Load(offered, [tokens for _, tokens in kept])


def run_of(data: Path, sources: Sequence[Source], costs: DecodeCosts, seed: int) -> Run:
    """Returns requests at one a second, each user's of one domain."""
    rng = np.random.default_rng((seed, 41))
    load = returning(mooncake(data, "conversation", STRETCH, int(rng.integers(STARTS)), MOST_PROMPT))
    domains = sorted({each.domain for each in sources})
    of = {domain: [each for each in sources if each.domain == domain] for domain in domains}
    kinds: dict[str, str] = {}
    mine, turn = list[Source](), dict.fromkeys(domains, 0)
    for one in load.offered:
        domain = kinds.setdefault(one.user, domains[int(rng.integers(len(domains)))])
        mine.append(of[domain][turn[domain] % len(of[domain])])
        turn[domain] += 1
    forecast = PromptForecast(sources[0].routes.shape[2])
    expected = float(np.mean(load.output))
    known = [forecast.chance(counts) for counts in before(mine, "user", rng)]
    offered = [replace(one, chance=p, expected_tokens=expected) for one, p in zip(load.offered, known, strict=True)]
    places = homes(sources, ENGINES, "by domain", rng)
    far_s = [np.where(place, 0.0, (FAR - 1) * costs.expert_s).astype(np.float32) for place in places]
    return Run(Load(offered, load.output), mine, [forecast.chance(each.prefill) for each in mine], far_s)


def outcome(run: Run, costs: DecodeCosts, rate: float, kv_tokens: int, name: str) -> dict[str, float]:
    """Returns figures of requests at a rate."""
    policy, changed = policy_of(name, DecodeTimes(costs.step_s, costs.expert_s))
    shape = EngineShape(step_costs_of(costs), SLOTS, kv_tokens // BLOCK, more_s=experts_s)
    apart = Apart(policy, run.sources)
    data = [routed(run.sources, costs, far_s) for far_s in run.far_s]
    engines = [
        Engine(f"{n:03}", replace(shape, data=data[n], resident=far_s, **changed), PrefixCache(MOONCAKE_TOKENS))
        for n, far_s in enumerate(run.far_s)
    ]
    apart.engines = {engine.place: engine for engine in engines}
    jobs = jobs_of(*at_rate(run.load, rate))
    for job, chance in zip(jobs, run.seen, strict=True):
        job.absent = absence(chance)
    Cluster(apart.engines, apart).serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    ends = np.sort([job.end_s for job in jobs])
    fifth = len(ends) // 5
    caches = [engine.cache for engine in engines if engine.cache]
    tokens, experts = np.sum([each.counted for each in data], axis=0)
    layers = run.far_s[0].shape[0]
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "tpot_p50_s": float(np.median(tpot_s)),
        "tpot_p99_s": float(np.quantile(tpot_s, 0.99)),
        "experts": float(experts / max(1.0, tokens) / layers),
        "hit_rate": sum(cache.hits for cache in caches) / max(1, sum(cache.probes for cache in caches)),
        "ended_per_s": float(3 * fifth / (ends[4 * fifth - 1] - ends[fifth - 1])),
    }


def rows_of(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Returns a row for each policy: figures, and changes against the first."""
    base, rows = next(iter(found.values())), []
    for name, ours in found.items():
        row: dict[str, Any] = {"policy": name}
        for key in FIGURES:
            row[key] = round(float(np.mean([each[key] for each in ours])), 4)
            if ours is not base:
                change = [100 * (mine[key] / theirs[key] - 1) for mine, theirs in zip(ours, base, strict=True)]
                mean, half = interval(change)
                row[f"{key} %"] = f"{mean:+.1f} ± {half:.1f}"
        rows.append(row)
    return rows


def study(data: Path, seeds: range, models: Sequence[str] = tuple(MODELS)) -> dict[str, Any]:
    """Returns a table for each model, KV and rate."""
    answer: dict[str, Any] = {}
    for model in models:
        sources = sources_of(data, model)
        costs = step_costs(data, model, sources)
        runs = [run_of(data, sources, costs, seed) for seed in seeds]
        for kv, tokens in KV_TOKENS.items():
            full = outcome(runs[0], costs, 1e9, tokens, "round robin")["ended_per_s"]
            for share in RATES:
                names = (*PARTS, *OTHERS)
                found = {name: [outcome(run, costs, share * full, tokens, name) for run in runs] for name in names}
                answer[f"{model}, {kv} KV, {share:g} of {full:.1f}/s"] = rows_of(found)
    return answer
