"""Replays a trace through one policy, for several capacities at once. Imports numba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edgemoe.replay import box, libcachesim
from edgemoe.replay.box import BoxSpec, DoubleArray, ReplayBox
from edgemoe.replay.cache import Cache
from edgemoe.replay.policies import MAKERS, Maker
from edgemoe.replay.trace import Ids, Trace, chosen
from edgemoe.types.experts import CachePolicy


@dataclass(slots=True)
class ReplayMetrics:
    """What one policy did at one capacity, over the part that is scored."""

    misses: int = 0
    demands: int = 0
    steps: int = 0
    box: DoubleArray = field(default_factory=lambda: np.zeros(box.METRICS))


def replay(
    trace: Trace,
    name: str,
    slots: list[int],
    batch: int,
    score_from: float,
    machine: BoxSpec,
    more: Mapping[str, Maker] | None = None,
) -> list[ReplayMetrics]:
    """Figures for each capacity in `slots`; steps before `score_from` of the tokens are run, not scored.

    `more` are policies besides those that have names of their own. Raises ConfigError for a name that is none.
    """
    makers = {**MAKERS, **(more or {})}
    if name not in makers:
        return libcachesim.replay(trace, name, slots, batch, score_from)
    make = makers[name]
    if name == "fifo":  # it has to see what its cache loads
        return [_Run(trace, make(trace, batch), [each], machine).go(batch, score_from)[0] for each in slots]
    return _Run(trace, make(trace, batch), slots, machine).go(batch, score_from)


class _Run:
    def __init__(self, trace: Trace, policy: CachePolicy, slots: list[int], machine: BoxSpec) -> None:
        self.trace, self.policy = trace, policy
        self.caches = [Cache(trace.layers, trace.experts, each) for each in slots]
        self.machine = machine
        self._begin = getattr(policy, "begin", None)
        self._route = getattr(policy, "route", None)
        self._end = getattr(policy, "end", None)
        self._loaded = getattr(policy, "loaded", None)
        self._foretells = bool(getattr(policy, "foretells", False))
        simple = machine.ram_share >= 1 and not (machine.prefetches and self._foretells)  # misses tell all
        self.boxes = [] if simple else [ReplayBox(trace.layers, trace.experts, each, machine) for each in slots]

    def go(self, batch: int, score_from: float) -> list[ReplayMetrics]:
        unscored = score_from * self.trace.tokens
        tokens, demands, steps = 0, 0, 0
        before: list[tuple[int, DoubleArray | None]] = []
        for step in self.trace.steps(batch):
            if not before and tokens >= unscored:
                before = self._taken()
            needed = self._step(step.requests, step.ids)
            tokens += len(step.requests)
            if before:
                demands, steps = demands + needed, steps + len(step.requests)
        after = self._taken()
        layer_steps = steps // batch * self.trace.layers
        metrics = []
        for (misses, totals), (misses_before, totals_before) in zip(after, before or after, strict=True):
            missed = misses - misses_before
            if totals is None or totals_before is None:
                totals, totals_before = self.machine.metrics(missed, layer_steps), np.zeros(box.METRICS)
            metrics.append(ReplayMetrics(missed, demands, steps, totals - totals_before))
        return metrics

    def _taken(self) -> list[tuple[int, DoubleArray | None]]:
        totals: list[DoubleArray | None] = [box_.metrics.copy() for box_ in self.boxes]
        totals = totals or [None] * len(self.caches)
        return [(cache.misses, metrics) for cache, metrics in zip(self.caches, totals, strict=True)]

    def _step(self, requests: tuple[int, ...], ids: Ids) -> int:
        """One token of each request, [S, L, k]; how many experts it needed."""
        needed = 0
        if self._begin:
            self._begin(requests)
        for layer in range(self.trace.layers):
            routed = ids[:, layer]
            experts = chosen(routed)
            needed += len(experts)
            if self._route:
                self._route(routed)
            if self._loaded:
                self._loaded(layer, self.caches[0].missing(layer, experts))
            self.policy.touch(layer, experts)
            rank = self.policy.rank(layer)
            for cache in self.caches:
                cache.run(layer, experts, rank)
            for box_ in self.boxes:
                box_.run(layer, experts, rank, self._foretells)
        if self._end:
            self._end()
        return needed
