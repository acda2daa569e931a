"""Simulated engines behind one router, event by event: requests arrive, policies assign them, engines step.

A router's knowledge is exact, or a report every REPORT_S with or without a correction for dispatches
(`RecentDispatches`). A policy is asked on arrivals and reports, and, with exact knowledge, when an engine has ended or
prefilled a request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edgemoe.engine.fairness import FairnessAccounts
from edgemoe.policy.routing.offers import RecentDispatches, RoutingPolicy, RoutingTarget, WaitingRequest
from edgemoe.types.request import NOBODY
from tools.research.simulate.serving.prefixes import PrefixCache
from tools.research.simulate.serving.simulated_engine import Engine, EngineShape, Job

REPORT_S = 0.5
Knowledge = Literal["exact", "corrected", "reports"]


@dataclass(slots=True)
class Cluster:
    """Owns the engines, the leader's waiting requests, and the clock."""

    engines: dict[str, Engine]
    policy: RoutingPolicy
    knowledge: Knowledge = "exact"
    offers: dict[str, Job] = field(default_factory=dict)
    lengths: FairnessAccounts = field(default_factory=FairnessAccounts)
    _dispatches: RecentDispatches = field(default_factory=RecentDispatches)
    _reports: list[RoutingTarget] = field(default_factory=list)
    _seen: dict[str, RoutingTarget] = field(default_factory=dict)  # engines that have not changed since their last view

    def serve(self, jobs: Sequence[Job]) -> None:
        """Runs the requests, in order of arrival, to their ends."""
        coming, report_s = list(reversed(jobs)), 0.0
        self.lengths.add_request(NOBODY)
        while coming or self.offers or any(engine.busy for engine in self.engines.values()):
            next_s = min(coming[-1].offered.arrived_s if coming else math.inf, report_s)
            engine = min((e for e in self.engines.values() if e.busy), key=lambda e: e.now_s, default=None)
            if engine is not None and engine.now_s < next_s:
                self._step(engine, next_s)
            elif next_s == report_s:
                report_s = self._report(report_s)
            else:
                job = coming.pop()
                if not job.offered.expected_tokens:
                    job.offered = replace(job.offered, expected_tokens=self._expected)
                self.offers[job.offered.request] = job
                self._assign(next_s)

    def _step(self, engine: Engine, until_s: float) -> None:
        if self.offers and self.knowledge == "exact":
            self._assign(engine.now_s)
        self._seen.pop(engine.place, None)
        engine.admit(self._expected)
        for job in engine.run(until_s):
            self.lengths.add_answer(NOBODY, job.output)

    def _report(self, now_s: float) -> float:
        if self.knowledge == "exact":
            return math.inf
        self._reports = [engine.view(self._expected, now_s) for engine in self.engines.values()]
        for engine, view in zip(self.engines.values(), self._reports, strict=True):
            engine.reported()
            self._dispatches.on_engine_view(view)
        self._assign(now_s)
        return now_s + REPORT_S

    @property
    def _expected(self) -> float:
        return self.lengths.expected_output(NOBODY, 1 << 20)

    def _views(self, now_s: float) -> list[RoutingTarget]:
        if self.knowledge == "exact":
            for place, engine in self.engines.items():
                if place not in self._seen:
                    self._seen[place] = engine.view(self._expected, now_s)
            return [self._seen[place] for place in self.engines]
        return self._dispatches.views() if self.knowledge == "corrected" else self._reports

    def _assign(self, now_s: float) -> None:
        if not self.offers:
            return
        offers = [job.offered for job in self.offers.values()]
        for request, place in self.policy.assign(offers, self._views(now_s), now_s):
            job = self.offers.pop(request)
            self.engines[place].add(job, now_s)
            self._seen.pop(place, None)
            self._dispatches.dispatch(job.offered, place, now_s)


def cluster_of(
    engines: int, shape: EngineShape, policy: RoutingPolicy, knowledge: Knowledge = "exact", key_tokens: int = 0
) -> Cluster:
    """Returns a cluster of equal engines; `key_tokens` above 0 gives each a prefix cache."""
    caches = [PrefixCache(key_tokens) if key_tokens else None for _ in range(engines)]
    named = {f"{n:03}": Engine(f"{n:03}", shape, cache) for n, cache in enumerate(caches)}
    return Cluster(named, policy, knowledge)


def jobs_of(offered: Sequence[WaitingRequest], output: Sequence[int]) -> list[Job]:
    """Returns the requests of a run; `output` is the length of each answer, unknown to policies."""
    return [Job(one, int(tokens)) for one, tokens in zip(offered, output, strict=True)]
