"""Replays a trace through one policy, for several capacities at once. Imports numba."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgemoe.errors import ConfigError
from edgemoe.replay import box, libcachesim
from edgemoe.replay.box import BoxSpec, DoubleArray, ReplayBox
from edgemoe.replay.cache import Cache
from edgemoe.replay.policies import MAKERS, Maker
from edgemoe.replay.sized_cache import ByteBelady, SizedCache, geometry_of
from edgemoe.replay.trace import Ids, Trace, chosen
from edgemoe.types.experts import CachePolicy


@dataclass(slots=True)
class ReplayMetrics:
    """What one policy did at one capacity, over the part that is scored."""

    misses: int = 0
    missed_bytes: int = 0
    demands: int = 0
    demanded_bytes: int = 0
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

    `more` are policies besides those that have names of their own. Where experts have different sizes, a capacity is so
    many of mean size, and `belady` is the bound by bytes. Raises ConfigError for a name that is none.
    """
    makers = {**MAKERS, **(more or {})}
    if name not in makers:
        if machine.layer_bytes:
            raise ConfigError(f"libcachesim's policies know one size of experts; replay {name!r} with one")
        return libcachesim.replay(trace, name, slots, batch, score_from, machine.expert_bytes)
    make = makers[name]
    if name == "fifo":  # it has to see what its cache loads
        return [_Run(trace, make(trace, batch), [each], machine).go(batch, score_from)[0] for each in slots]
    return _Run(trace, make(trace, batch), slots, machine, bound=name == "belady").go(batch, score_from)


class _Run:
    def __init__(
        self, trace: Trace, policy: CachePolicy, slots: list[int], machine: BoxSpec, *, bound: bool = False
    ) -> None:
        self.trace, self.policy = trace, policy
        self.caches: Sequence[Cache | SizedCache | ByteBelady]
        self.caches = _sized(trace, slots, machine, bound) or [Cache(trace.layers, trace.experts, n) for n in slots]
        self.machine = machine
        self._sizes = machine.layer_bytes or (machine.expert_bytes,) * trace.layers
        self._begin = getattr(policy, "begin", None)
        self._route = getattr(policy, "route", None)
        self._end = getattr(policy, "end", None)
        self._loaded = getattr(policy, "loaded", None)
        self._foretells = bool(getattr(policy, "foretells", False))
        prefetches = machine.prefetches and self._foretells
        if machine.layer_bytes and machine.ram_share < 1:
            raise ConfigError("experts of different sizes are replayed with RAM for all of them; leave --ram out")
        if machine.layer_bytes and prefetches:
            raise ConfigError("experts of different sizes are replayed on demand only; add --no-prefetch")
        simple = machine.ram_share >= 1 and not prefetches  # misses tell all
        self.boxes = [] if simple else [ReplayBox(trace.layers, trace.experts, each, machine) for each in slots]

    def go(self, batch: int, score_from: float) -> list[ReplayMetrics]:
        unscored = score_from * self.trace.tokens
        tokens, demands, demanded_bytes, steps = 0, 0, 0, 0
        before: list[tuple[int, int, DoubleArray | None]] = []
        for step in self.trace.steps(batch):
            if not before and tokens >= unscored:
                before = self._taken()
            needed = self._step(step.requests, step.ids)
            tokens += len(step.requests)
            if before:
                demands, steps = demands + sum(needed), steps + len(step.requests)
                demanded_bytes += sum(n * size for n, size in zip(needed, self._sizes, strict=True))
        after = self._taken()
        layer_steps = steps // batch * self.trace.layers
        metrics = []
        for (misses, size, totals), (misses_before, size_before, totals_before) in zip(
            after, before or after, strict=True
        ):
            missed, missed_bytes = misses - misses_before, size - size_before
            if totals is None or totals_before is None:
                moved = missed_bytes / self.machine.expert_bytes
                totals, totals_before = self.machine.metrics(moved, layer_steps), np.zeros(box.METRICS)
            metrics.append(ReplayMetrics(missed, missed_bytes, demands, demanded_bytes, steps, totals - totals_before))
        return metrics

    def _taken(self) -> list[tuple[int, int, DoubleArray | None]]:
        totals: list[DoubleArray | None] = [box_.metrics.copy() for box_ in self.boxes]
        totals = totals or [None] * len(self.caches)
        return [
            (cache.misses, self._missed_bytes(cache), metrics)
            for cache, metrics in zip(self.caches, totals, strict=True)
        ]

    def _missed_bytes(self, cache: Cache | SizedCache | ByteBelady) -> int:
        return cache.misses * self.machine.expert_bytes if isinstance(cache, Cache) else cache.missed_bytes

    def _step(self, requests: tuple[int, ...], ids: Ids) -> list[int]:
        """One token of each request, [S, L, k]; how many experts it needed of each layer."""
        needed = []
        if self._begin:
            self._begin(requests)
        for layer in range(self.trace.layers):
            routed = ids[:, layer]
            experts = chosen(routed)
            needed.append(len(experts))
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
        for cache in self.caches:
            if isinstance(cache, SizedCache):
                cache.step_ended()
        if self._end:
            self._end()
        return needed


def _sized(trace: Trace, slots: list[int], machine: BoxSpec, bound: bool) -> Sequence[Cache | SizedCache | ByteBelady]:
    """Returns a cache for each capacity where experts have different sizes, else none."""
    if not machine.layer_bytes:
        return []
    geometry = geometry_of(machine.layer_bytes, trace.experts)
    capacities = [each * geometry.all_bytes // geometry.count for each in slots]
    return [ByteBelady(geometry, each) if bound else SizedCache(geometry, each) for each in capacities]
