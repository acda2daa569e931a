"""Marginal union: sends a request to the engine whose decode steps it lengthens least.

A decode step takes as long as the distinct experts that it loads. Request r chooses expert e of a layer with
probability p_r(e). The running requests of engine w load it with probability 1 - prod(1 - p).
docs/design/routing.md has the formulas (1) and (2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgemoe.policy.routing.offers import RoutingTarget, Values, WaitingRequest, fewest
from edgemoe.policy.routing.signatures import Counts, ExpertClusters
from edgemoe.types.arrays import FloatArray

PRIOR_TOKENS = 32.0  # weight of the prior, in tokens of a prompt
MOST_CERTAIN = 0.999  # bounds a probability, so that an added request can be removed again


def chances(counts: Counts, tokens: float, prior: FloatArray) -> FloatArray:
    """Returns the chance that a decoded token chooses each expert [L, E].

    `counts` [L, E] are of `tokens` prefilled tokens. `prior` [L, E] has the chances of other requests' decoded tokens.
    """
    expected = (counts + PRIOR_TOKENS * prior) / (tokens + PRIOR_TOKENS)
    return np.clip(expected, 0.0, MOST_CERTAIN).astype(np.float32)


class ExpectedStep(NamedTuple):
    """The time of an engine's step, and of the experts that it does not load yet."""

    left_s: FloatArray  # [L * E] time of loading each expert, times the chance that no request there loads it
    now_s: float  # T
    running: int

    def cost_s(self, chance: FloatArray) -> float:
        """Returns (2) of a request with these chances [L, E]."""
        # not by BLAS, whose threads wait for each other for up to half a second on a box with no core to spare
        added_s = float(np.einsum("k,k->", self.left_s, chance.reshape(-1)))
        return self.now_s + (self.running + 1) * added_s


def step_of(seconds: FloatArray, absent: FloatArray, running: int, step_s: float) -> ExpectedStep:
    """Builds the step of an engine: `step_s` without experts, and `seconds` [L, E] for each expert that it loads.

    `absent` [L, E] is the log of the chance that no running request loads the expert.
    """
    left = seconds * np.exp(absent)
    return ExpectedStep(left.reshape(-1), step_s + float(seconds.sum()) - float(left.sum()), running)


class DecodeTimes(NamedTuple):
    """Times of a decode step with all experts in place, of an engine that reports none."""

    step_s: float
    expert_s: float  # for each distinct expert of each layer


MOST_ENGINES = 256  # that a term remembers
SURE = 1 - 2**-20  # the highest chance that enters a logarithm
UNMEASURED = DecodeTimes(0.0, 0.0)  # of engines that have not measured their steps: experts cost nothing there


class PromptForecast:
    """Forecasts the experts of decoded tokens from a prompt's expert counts."""

    def __init__(self, top_k: int, clusters: ExpertClusters | None = None) -> None:
        self._top_k, self._clusters = top_k, clusters

    def chance(self, counts: Counts) -> FloatArray:
        """Returns how likely a decoded token chooses each expert [L, E], by prefill counts [L, E], all 0 at worst."""
        layers, experts = counts.shape
        prior = np.full((layers, experts), self._top_k / experts, np.float32)
        if self._clusters is not None:
            near = self._clusters.similarity(counts)
            decode = self._clusters.decode
            prior = decode[int(near.argmax())] if near.any() else decode.mean(axis=0)
        return chances(counts, float(counts.sum()) / (layers * self._top_k), prior)


class UnionChooser:
    """Chooses the engine where a request costs all that decode least; the one with fewest where nothing is known."""

    def __init__(self, times: DecodeTimes) -> None:
        self._times = times

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        if offered.chance is None:
            return fewest(offered, open_, now_s)
        chance, times = offered.chance, self._times
        return min(
            open_,
            key=lambda view: (engine_step(view, chance, times).cost_s(chance), view.requests / max(1, view.slots)),
        )


class UnionTerm:
    """The costs of decoding requests at each engine, for `PullRouting`. Caches the steps of unchanged engines."""

    def __init__(self, times: DecodeTimes) -> None:
        self._times = times
        self._known: dict[str, _KnownEngine] = {}  # by place

    def __call__(self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget]) -> Values:
        """Returns seconds [W, R], of all that the request is expected to write."""
        tokens = np.array([offered.expected_tokens for offered in offers])
        foreseen = [offered.chance for offered in offers]
        if not any(chance is not None for chance in foreseen):
            return np.zeros((len(views), len(offers)))
        return np.asarray(np.array([self._row(view, foreseen) for view in views]) * tokens)

    def _row(self, view: RoutingTarget, foreseen: list[FloatArray | None]) -> list[float]:
        known = self._known.get(view.place)
        if known is None or known.view is not view:
            if len(self._known) >= MOST_ENGINES:
                self._known.clear()
            like = next(chance for chance in foreseen if chance is not None)
            known = self._known[view.place] = _KnownEngine(view, engine_step(view, like, self._times))
        before, known.costs = known.costs, {}
        for chance in foreseen:
            if chance is not None:
                known.costs[id(chance)] = before.get(id(chance)) or (chance, known.step.cost_s(chance))
        return [0.0 if chance is None else known.costs[id(chance)][1] for chance in foreseen]


@dataclass(slots=True)
class _KnownEngine:
    view: RoutingTarget
    step: ExpectedStep
    costs: dict[int, tuple[FloatArray, float]] = field(default_factory=dict)  # of requests by their chances' identity


def engine_step(view: RoutingTarget, like: FloatArray, times: DecodeTimes) -> ExpectedStep:
    """Returns a step of the engine; `like` is some request's probability of each expert [L, E]."""
    seconds = np.full(like.shape, view.expert_s or times.expert_s, np.float32)
    if view.resident is not None:
        seconds += view.resident
    absent = view.union
    if absent is None:  # it does not say: as if its requests had nothing in common
        each = np.minimum(np.rint(like.sum(axis=1, keepdims=True)) / like.shape[1], SURE)
        absent = np.broadcast_to(view.requests * np.log1p(-each), like.shape)
    return step_of(seconds, absent.astype(np.float32, copy=False), view.requests, view.step_s or times.step_s)


FADE = 0.98  # of older stretches, with each new one
ASSUMED = 0.1  # weight of the assumed point, in stretches
EXPERTS_SHARE = 0.5  # of a step, where nothing else is known


class StepTimes:
    """Owns the sums."""

    def __init__(self) -> None:
        self._last = np.zeros(3)  # steps, seconds, experts counted so far
        self._sums = np.zeros(5)  # weight, x, y, x * x, x * y of means of experts x and seconds y

    def update_totals(self, steps: float, seconds: float, experts: float) -> None:
        """Updates the measured step times from the engine's counts since its start."""
        now = np.array([steps, seconds, experts])
        count, took, loaded = now - self._last
        if count > 0:
            x, y = loaded / count, took / count
            self._sums = FADE * self._sums + np.array([1.0, x, y, x * x, x * y])
            self._last = now

    def times(self) -> DecodeTimes:
        """Returns the fitted times; 0 of both before any step."""
        weight, x, y, xx, xy = self._sums.tolist()
        if not weight or not x:
            return DecodeTimes(0.0, 0.0)
        loaded, mean_s = x / weight, y / weight
        weight, y = weight + ASSUMED, y + ASSUMED * (1 - EXPERTS_SHARE) * mean_s
        slope = (weight * xy - x * y) / max(weight * xx - x * x, 1e-12)
        expert_s = min(max(slope, 0.0), mean_s / loaded)
        return DecodeTimes(max(0.0, mean_s - expert_s * loaded), expert_s)  # which may round to less than 0
