"""Replays routing through one policy, for several capacities at once. Imports numba and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from edgemoe.errors import ConfigError
from edgemoe.replay.bound import ByteBelady
from edgemoe.replay.box import BoxSpec, ReplayBox, TraceRanks
from edgemoe.replay.replay_policies import MAKERS, PolicyMaker
from edgemoe.replay.trace import Ids, ReplayCounts, Trace, TraceStep, chosen
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import CachePolicy, ExpertGeometry
from edgemoe.types.step import StepMeta


@dataclass(slots=True)
class ReplayMetrics:
    """Misses, demands and box counts of one policy at one capacity, over the scored part."""

    misses: int = 0  # of a tier that loads on demand
    missed_bytes: int = 0
    demands: int = 0
    demanded_bytes: int = 0
    steps: int = 0
    box: ReplayCounts = field(default_factory=ReplayCounts)  # of a box that prefetches where that was asked for


class ReplayedStep(NamedTuple):
    """A recorded step: its sequences, and the experts that its gates chose."""

    meta: StepMeta
    ids: Ids  # [L, T, k]
    hints: FloatArray | None = None  # [L, T, E] each layer's gate logits from a layer early

    @classmethod
    def of(cls, step: TraceStep) -> ReplayedStep:
        """Returns the step of a trace, in which every request decodes one token."""
        n = len(step.requests)
        ones, zeros = np.ones(n, np.int64), np.zeros(n, np.int64)
        meta = StepMeta(tuple(map(str, step.requests)), ones, np.ones(n, np.bool_), zeros, zeros)
        return cls(meta, step.ids.swapaxes(0, 1))


class Replay:
    """Drives one policy, and the boxes and bounds that go by its ranks, through steps.

    A policy with `observe_residents` learns before each layer which experts the first bound or box holds.
    """

    def __init__(self, policy: CachePolicy, geometry: ExpertGeometry) -> None:
        self.policy: Any = policy
        self.ranks = TraceRanks(policy, (geometry.layers, geometry.experts))
        self.boxes: list[ReplayBox] = []
        self.bounds: list[ByteBelady] = []
        self._geometry = geometry
        self._begin, self._end = getattr(policy, "begin", None), getattr(policy, "end", None)
        self._route, self._prefilled = getattr(policy, "route", None), getattr(policy, "add_prompts", None)
        self._observe = getattr(policy, "observe_residents", None)

    def add(self, capacity_bytes: int, machine: BoxSpec, *, prefetch: bool, plans: bool = True) -> ReplayBox:
        """Returns a new box; one that prefetches does so by hints, and by the policy's plans if it makes `plans`."""
        box = ReplayBox(self._geometry, capacity_bytes, machine, self.ranks, prefetch=prefetch)
        if prefetch and plans:
            self.policy.predictive.attach(box.residency, box.loader, self._geometry)
        self.boxes.append(box)
        return box

    def step(self, step: ReplayedStep) -> list[int]:
        """Runs one step. Returns how many experts decoding demanded of each layer."""
        meta = step.meta
        decode = np.flatnonzero(meta.decode)
        decoded = step.ids[:, (np.cumsum(meta.query_lens) - 1)[decode]]
        if self._begin:
            self._begin([meta.requests[i] for i in decode.tolist()])
        for box in self.boxes:
            box.begin(meta)
        tokens = torch.from_numpy(step.ids.astype(np.int64)).unbind(0)
        hints = [None] * len(tokens) if step.hints is None else [*torch.from_numpy(step.hints)[1:].unbind(0), None]
        needed = []
        for layer, (ids, hint) in enumerate(zip(tokens, hints, strict=True)):
            needed.append(self._demand(layer, decoded[layer]))
            for box in self.boxes:
                box.run(layer, ids, hint)
        routings = [box.end() for box in self.boxes]
        if self._prefilled and not meta.decode.all():
            self._prefilled(meta, step.ids)
        if self._end:
            self._end(*routings[:1])
        for box in self.boxes:
            box.rest()
        return needed

    def _demand(self, layer: int, routed: Ids) -> int:
        """Reports the routing of decoding tokens [S, k] to the policy and the bounds. Counts the distinct experts."""
        experts = chosen(routed) if len(routed) else np.empty(0, np.int64)
        if len(experts):
            if self._observe:
                cache = (self.bounds or self.boxes)[0]
                self._observe(cache.resident, cache.capacity_bytes * self._geometry.count // self._geometry.all_bytes)
            if self._route:
                self._route(routed)
            self.policy.touch(layer, experts)
        self.ranks.ranks = self.policy.rank(layer)
        for bound in self.bounds:
            bound.run(layer, experts, self.ranks.ranks)
        return len(experts)


def replay(
    trace: Trace,
    name: str,
    slots: list[int],
    batch: int,
    score_from: float,
    machine: BoxSpec,
    more: Mapping[str, PolicyMaker] | None = None,
) -> list[ReplayMetrics]:
    """Returns the metrics for each capacity in `slots`; the first `score_from` of the tokens run unscored.

    `more` are policies besides the named ones, or in their place. Where experts have different sizes, a capacity counts
    experts of mean size, and `belady` is the bound by bytes. Raises ConfigError for an unknown name.
    """
    makers = {**MAKERS, **(more or {})}
    if name not in makers:
        raise ConfigError(f"there is no policy {name!r} to replay; there are {', '.join(makers)}")
    geometry = machine.geometry(trace.layers, trace.experts, trace.top_k)
    capacities = [each * geometry.all_bytes // geometry.count for each in slots]
    policy, scoring, bound = makers[name](trace, batch), (batch, score_from), name == "belady"
    if not hasattr(policy, "observe_residents"):
        return _scored(trace, policy, capacities, scoring, machine, bound)
    return [_scored(trace, makers[name](trace, batch), [each], scoring, machine, bound)[0] for each in capacities]


def _scored(
    trace: Trace,
    policy: CachePolicy,
    capacities: Sequence[int],
    scoring: tuple[int, float],
    machine: BoxSpec,
    bound: bool,
) -> list[ReplayMetrics]:
    """Replays with a box on demand for each capacity, and with a prefetching box if the policy predicts.

    With `bound` a Belady bound takes the place of the boxes; RAM holds every expert then.
    """
    (batch, score_from), geometry = scoring, machine.geometry(trace.layers, trace.experts, trace.top_k)
    run, metrics, sizes = Replay(policy, geometry), [ReplayMetrics() for _ in capacities], geometry.strides_bytes
    if bound:
        run.bounds = [ByteBelady(geometry, each, machine.link_bytes_per_s) for each in capacities]
    judges: Sequence[ReplayBox | ByteBelady] = run.bounds
    boxes: Sequence[ReplayBox | ByteBelady] = run.bounds
    with ExitStack() as open_:
        if not bound:
            judges = boxes = [
                open_.enter_context(closing(run.add(each, machine, prefetch=False))) for each in capacities
            ]
            if machine.prefetch and getattr(policy, "foretells", False):
                boxes = [open_.enter_context(closing(run.add(each, machine, prefetch=True))) for each in capacities]
        tokens, before = 0, list[tuple[ReplayCounts, ReplayCounts]]()
        for step in trace.steps(batch):
            if not before and tokens >= score_from * trace.tokens:
                before = _counts(judges, boxes)
            needed = run.step(ReplayedStep.of(step))
            tokens += len(step.requests)
            if before:
                needed_bytes = int(np.dot(needed, sizes))
                for each in metrics:
                    each.demands, each.demanded_bytes = each.demands + sum(needed), each.demanded_bytes + needed_bytes
                    each.steps += len(step.requests)
        after = _counts(judges, boxes)
    for each, (judged, box), (judged_before, box_before) in zip(metrics, after, before or after, strict=True):
        missed = judged.since(judged_before)
        each.misses, each.missed_bytes, each.box = missed.misses, missed.missed_bytes, box.since(box_before)
    return metrics


def _counts(
    judges: Sequence[ReplayBox | ByteBelady], boxes: Sequence[ReplayBox | ByteBelady]
) -> list[tuple[ReplayCounts, ReplayCounts]]:
    return [(judge.counts, box.counts) for judge, box in zip(judges, boxes, strict=True)]
