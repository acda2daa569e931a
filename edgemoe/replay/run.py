"""Replays a trace through one policy, for several capacities at once. Imports numba."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edgemoe.replay import box, libcachesim
from edgemoe.replay.box import Box, DoubleArray, Machine
from edgemoe.replay.cache import Cache
from edgemoe.replay.policies import MAKERS, make
from edgemoe.replay.trace import Ids, Trace, chosen
from edgemoe.types import CachePolicy


@dataclass(slots=True)
class Figures:
    """What one policy did at one capacity, over the part that is scored."""

    misses: int = 0
    demands: int = 0
    steps: int = 0
    box: DoubleArray = field(default_factory=lambda: np.zeros(box.FIGURES))


def replay(trace: Trace, name: str, slots: list[int], batch: int, score_from: float, machine: Machine) -> list[Figures]:
    """Figures for each capacity in `slots`; steps before `score_from` of the tokens are run, not scored."""
    if name not in MAKERS:
        return libcachesim.replay(trace, name, slots, batch, score_from)
    if name == "fifo":  # it has to see what its cache loads
        return [_Run(trace, make(name, trace, batch), [each], machine).go(batch, score_from)[0] for each in slots]
    return _Run(trace, make(name, trace, batch), slots, machine).go(batch, score_from)


class _Run:
    def __init__(self, trace: Trace, policy: CachePolicy, slots: list[int], machine: Machine) -> None:
        self.trace, self.policy = trace, policy
        self.caches = [Cache(trace.layers, trace.experts, each) for each in slots]
        self.boxes = [Box(trace.layers, trace.experts, each, machine) for each in slots]
        self._begin = getattr(policy, "begin", None)
        self._route = getattr(policy, "route", None)
        self._end = getattr(policy, "end", None)
        self._loaded = getattr(policy, "loaded", None)
        self._foretells = bool(getattr(policy, "foretells", False))

    def go(self, batch: int, score_from: float) -> list[Figures]:
        unscored = score_from * self.trace.tokens
        tokens, demands, steps = 0, 0, 0
        before: list[tuple[int, DoubleArray]] = []
        for step in self.trace.steps(batch):
            if not before and tokens >= unscored:
                before = self._taken()
            needed = self._step(step.requests, step.ids)
            tokens += len(step.requests)
            if before:
                demands, steps = demands + needed, steps + len(step.requests)
        after = self._taken()
        before = before or after
        return [
            Figures(misses - old, demands, steps, figures - old_figures)
            for (misses, figures), (old, old_figures) in zip(after, before, strict=True)
        ]

    def _taken(self) -> list[tuple[int, DoubleArray]]:
        return [(cache.misses, box.figures.copy()) for cache, box in zip(self.caches, self.boxes, strict=True)]

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
            for cache, box_ in zip(self.caches, self.boxes, strict=True):
                cache.run(layer, experts, rank)
                box_.run(layer, experts, rank, self._foretells)
        if self._end:
            self._end()
        return needed
