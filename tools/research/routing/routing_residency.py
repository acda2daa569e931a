"""The gain of marginal union by knowledge of the experts in place at each decode worker.

Half of each layer's experts are in place at a worker; any other takes `FAR` times as long in a step. The half is the
most frequent experts of one domain's prompts, or random. There are no clusters. Changes are in percent of
join-shortest-queue in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.offers import OfferAssignment, RoutingPolicy, RoutingTarget, WaitingRequest
from tools.research.simulate.decode_pool import DecodeCosts
from tools.research.simulate.decode_study import compared, figures, fitted, outcome, policy_of
from tools.research.simulate.decode_traffic import MODELS, Scene, Source, Traffic, scene_of, sources_of, step_costs

FAR = (4.0, 16.0)
HOMES = ("by domain", "by chance")


class Unaware:
    """Lets a policy decide as if all experts were in place everywhere."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy

    def takes(self, views: Sequence[RoutingTarget]) -> bool:
        return self._policy.takes(views)

    def assign(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        return self._policy.assign(offers, [replace(view, resident=None) for view in views], now_s)


def homes(sources: Sequence[Source], workers: int, how: str, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Returns the experts in place at each worker, half of each layer's [W, L, E]."""
    domains = sorted({each.domain for each in sources})
    shape = sources[0].prefill.shape
    answer = np.zeros((workers, *shape), np.bool_)
    for worker in range(workers):
        domain = domains[worker % len(domains)]
        wanted: npt.NDArray[np.floating] = np.sum([each.prefill for each in sources if each.domain == domain], axis=0)
        heat = wanted if how == "by domain" else rng.random(shape)
        best = np.argsort(-heat, axis=1)[:, : shape[1] // 2]
        np.put_along_axis(answer[worker], best, True, axis=1)
    return answer


def scene_with(sources: Sequence[Source], costs: DecodeCosts, traffic: Traffic, how: str, far: float) -> Scene:
    """Returns requests at a rate for workers with half of the experts in place each."""
    more_s = (far - 1) * costs.expert_s
    scene = scene_of(sources, replace(costs, expert_s=costs.expert_s + more_s / 2), traffic)
    in_place = homes(scene.recorded, traffic.workers, how, np.random.default_rng((traffic.seed, 31)))
    far_s = np.where(in_place, 0.0, more_s).astype(np.float32)
    return replace(scene, costs=replace(costs, far_s=far_s))


def table(sources: Sequence[Source], costs: DecodeCosts, how: str, far: float, seeds: range) -> list[dict[str, Any]]:
    """Returns a row for each policy."""
    runs = []
    for seed in seeds:
        known = fitted(scene_with(sources, costs, Traffic(seed=seed), how, far))
        run = {name: figures(known.scene, outcome(name, known)) for name in ("round robin", "JSQ")}
        name = "union, no clusters"
        unaware = Unaware(policy_of(name, known))
        run["union, unaware"] = figures(known.scene, outcome(name, known, policy=unaware))
        run["union"] = figures(known.scene, outcome(name, known))
        runs.append(run)
    return compared(runs)


def study(data: Path, seeds: range) -> dict[str, Any]:
    """Returns a table for each model, kind of homes, and cost of an expert not in place."""
    answer: dict[str, Any] = {}
    for model in MODELS:
        sources = sources_of(data, model)
        costs = step_costs(data, model, sources)
        for how in HOMES:
            for far in FAR:
                name = f"{model}, half of the experts in place {how}, others {far:g} times as dear"
                answer[name] = table(sources, costs, how, far, seeds)
    return answer
