"""Gimbal's study on simulated engines: TTFT and TPOT of its parts, of pull and of baselines, and prefix hits.

Parts: `lengths` (five distributions, three rates, ample and tight KV), `age` (reports half a second old), `size` (8 to
64 engines, other slots), `prefix` (Mooncake's hashes). The simulator's error on measured requests comes first. Changes
are paired by seed, in per cent of round robin with first come, first served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgemoe.policy.routing.gimbal import GimbalChooser
from edgemoe.policy.routing.offers import PushRouting, RoundRobin, RoutingPolicy, fewest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from tools.bench.stats import interval
from tools.research.routing.compared_routes import PseudoCodeGimbal, least_requests
from tools.research.simulate.serving.cluster import Knowledge, cluster_of, jobs_of
from tools.research.simulate.serving.engine_steps import BLOCK
from tools.research.simulate.serving.serving_workload import (
    DISTRIBUTIONS,
    MOONCAKE_TOKENS,
    Load,
    Trace,
    at_rate,
    azure,
    drawn,
    mooncake,
)
from tools.research.simulate.serving.simulated_engine import EngineShape
from tools.research.simulate.serving.step_fitting import errors, fit, halves, of_one, read, times_of

BASE = "round robin"
CHANGES = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tokens_per_s")
RATES = (0.8, 0.9, 1.0)  # of saturation
KV_TOKENS = {"ample": 1 << 22, "tight": 40_000}  # of an engine
ENGINES, SLOTS, REQUESTS = 4, 32, 1000
SATURATING = 3000  # requests present at the start, for the rate of saturation
MOONCAKE_SLOTS, MOONCAKE_REQUESTS = 32, 2000
PULLED: dict[str, Any] = {"order": "sjf", "output_reserve": 0.25}


@dataclass(frozen=True, slots=True)
class Variant:
    """A routing policy, its changes to the engines, and its knowledge of them."""

    policy: Callable[[], RoutingPolicy]
    engine: dict[str, Any]
    knowledge: Knowledge = "exact"

    def told(self, knowledge: Knowledge) -> Variant:
        return replace(self, knowledge=knowledge)


class Setting(NamedTuple):
    """A cluster, and a seed's requests to it at one a second."""

    engines: int
    shape: EngineShape
    load: Callable[[int, int], Load]  # of a seed and a count
    key_tokens: int = 0
    requests: int = REQUESTS


def algorithm_1(published: bool = False) -> RoutingPolicy:
    return PushRouting(PseudoCodeGimbal() if published else GimbalChooser())


def pull(**limits: Any) -> RoutingPolicy:
    return PullRouting(replace(PullLimits(), **limits))


ALL: dict[str, Variant] = {
    BASE: Variant(lambda: PushRouting(RoundRobin()), {}),
    "SJF, 5 s": Variant(lambda: PushRouting(RoundRobin()), {"order": "gimbal"}),
    "algorithm 1": Variant(algorithm_1, {}),
    "Gimbal": Variant(algorithm_1, {"order": "gimbal"}),
    "Gimbal, published": Variant(lambda: algorithm_1(published=True), {"order": "gimbal"}),
    "aging and reserve": Variant(lambda: PushRouting(RoundRobin()), PULLED),
    "join shortest queue": Variant(lambda: PushRouting(fewest), {}),
    "least requests": Variant(lambda: PushRouting(least_requests), {}),
    "pull": Variant(pull, PULLED),
}
AHEAD = Variant(lambda: pull(ahead_tokens=4096, ahead_requests=2), PULLED)  # until the next report
AGED: dict[str, Variant] = {
    f"{name}, {how}": variant.told(how)
    for name, variant in (("least requests", ALL["least requests"]), ("Gimbal", ALL["Gimbal"]), ("pull", AHEAD))
    for how in ("exact", "corrected", "reports")
}
PARTS = {name: ALL[name] for name in (BASE, "SJF, 5 s", "algorithm 1", "Gimbal", "least requests", "pull")}
FEW = {name: ALL[name] for name in (BASE, "Gimbal", "join shortest queue", "least requests", "pull")}


def outcome(setting: Setting, variant: Variant, load: Load) -> dict[str, float]:
    """Returns figures of the requests under a variant."""
    shape = replace(setting.shape, **variant.engine)
    jobs = jobs_of(*load)
    cluster = cluster_of(setting.engines, shape, variant.policy(), variant.knowledge, setting.key_tokens)
    cluster.serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    end_s = max(job.end_s for job in jobs)
    caches = [engine.cache for engine in cluster.engines.values() if engine.cache]
    hits, probes = sum(cache.hits for cache in caches), sum(cache.probes for cache in caches)
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_mean_s": float(tpot_s.mean()),
        "tokens_per_s": sum(job.output for job in jobs) / end_s,
        "paused": float(sum(engine.paused for engine in cluster.engines.values())),
        "hit_blocks": float(hits),
        "hit_rate": hits / max(1, probes),
    }


def saturation(setting: Setting, count: int) -> float:
    """Returns round robin's requests per second if all are present at the start, between a fifth and four fifths."""
    jobs = jobs_of(*at_rate(setting.load(1 << 20, count), 1e9))
    cluster_of(setting.engines, setting.shape, PushRouting(RoundRobin()), key_tokens=setting.key_tokens).serve(jobs)
    ends = np.sort([job.end_s for job in jobs])
    fifth = count // 5
    return float(3 * fifth / (ends[4 * fifth - 1] - ends[fifth - 1]))


def compared(setting: Setting, variants: dict[str, Variant], rate: float, seeds: range) -> list[dict[str, Any]]:
    """Returns figures of every variant, and paired changes from the first, with 95 % intervals."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for seed in seeds:
        load = at_rate(setting.load(seed, setting.requests), rate)
        for name, variant in variants.items():
            found[name].append(outcome(setting, variant, load))
    base = next(iter(found.values()))
    answer: list[dict[str, Any]] = []
    for name, ours in found.items():
        answer.append({"policy": name} | {key: round(float(np.mean([row[key] for row in ours])), 4) for key in ours[0]})
        for key in CHANGES if ours is not base else ():
            change = [100 * (mine[key] / theirs[key] - 1) for mine, theirs in zip(ours, base, strict=True)]
            mean, half = interval(change)
            answer[-1][f"{key}_change"] = f"{mean:+.1f} ± {half:.1f}"
    return answer


def lengths(trace: Trace, distribution: str) -> Callable[[int, int], Load]:
    return lambda seed, count: drawn(trace, distribution, count, np.random.default_rng((seed, 11)))


def of_lengths(trace: Trace, shape: EngineShape, seeds: range) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields five distributions at three rates, with ample and tight KV; and the effect of old reports."""
    for kv, tokens in KV_TOKENS.items():
        sized = replace(shape, blocks=tokens // BLOCK)
        for distribution in DISTRIBUTIONS:
            setting = Setting(ENGINES, sized, lengths(trace, distribution))
            full = saturation(setting, SATURATING)
            variants = ALL if distribution == "random" else PARTS
            for share in RATES:
                where = f"{kv} KV, {share:.0%} of {full:.1f} requests/s"
                yield f"lengths {distribution}, {where}", compared(setting, variants, share * full, seeds)
                if distribution == "random" and share > RATES[0]:
                    yield f"age, {where}", compared(setting, {BASE: ALL[BASE]} | AGED, share * full, seeds)


def sizes(trace: Trace, shape: EngineShape, seeds: range) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields other numbers of engines, with as many requests for each, and other numbers of slots."""
    for engines, slots in ((8, SLOTS), (16, SLOTS), (32, SLOTS), (64, SLOTS), (ENGINES, 16), (ENGINES, 64)):
        setting = Setting(ENGINES, replace(shape, slots=slots), lengths(trace, "random"))
        full = saturation(setting, SATURATING) * engines / ENGINES
        setting = setting._replace(
            engines=engines, requests=REQUESTS * engines // ENGINES // (2 if engines > 16 else 1)
        )
        yield (
            f"size {engines} engines of {slots} slots, 90 %",
            compared(setting, FEW, 0.9 * full, seeds[: max(2, len(seeds) // 3)]),
        )


def prefixes(data: Path, shape: EngineShape, seeds: range) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields prefix hits with Mooncake's hashes, in caches of two sizes."""
    for name in ("conversation", "synthetic"):
        for kv_tokens in (200_000, 800_000):
            sized = replace(shape, slots=MOONCAKE_SLOTS, blocks=kv_tokens // BLOCK)
            most = {"conversation": 5000, "synthetic": 500}[name]

            def load(seed: int, count: int, name: str = name, most: int = most) -> Load:
                return mooncake(data, name, count, int(np.random.default_rng(seed).integers(0, most)))

            setting = Setting(ENGINES, sized, load, MOONCAKE_TOKENS, MOONCAKE_REQUESTS)
            full = saturation(setting, MOONCAKE_REQUESTS)
            yield (
                f"prefix {name}, KV of {kv_tokens} tokens, 90 %",
                compared(setting, FEW, 0.9 * full, seeds[: max(2, len(seeds) // 2)]),
            )


def study(data: Path, seeds: range) -> dict[str, Any]:
    """Returns all figures, by part and setting."""
    measured = read(data)
    seen, unseen = halves(measured)
    costs, front_s = fit(measured, seen)
    shape, trace = EngineShape(of_one(costs), SLOTS), azure(data)
    parts = (of_lengths(trace, shape, seeds), sizes(trace, shape, seeds), prefixes(data, shape, seeds))
    fitted = costs._asdict() | {"front_s": front_s}
    return {"fit": fitted, "off by %": errors(measured, costs, front_s, unseen)} | dict(chain.from_iterable(parts))
