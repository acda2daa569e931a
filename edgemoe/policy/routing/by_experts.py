"""Routes by which experts requests choose: by marginal union, or by ELDR's clusters and band.

`PromptForecast` says once for each request how likely its tokens choose each expert; what is known of engines adds that
up. Where no clusters are fitted, marginal union goes by the prompt alone, which is worth nearly as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgemoe.policy.routing.baselines import fewest
from edgemoe.policy.routing.expert_clusters import BAND, ExpertClusters, in_band
from edgemoe.policy.routing.expert_union import EngineStep, chances, step_of
from edgemoe.policy.routing.offers import EngineView, Offered, Values
from edgemoe.policy.routing.signatures import Counts
from edgemoe.types.arrays import FloatArray


class DecodeTimes(NamedTuple):
    """States what a decode step takes of an engine that does not say, with all experts in place."""

    step_s: float
    expert_s: float  # for each distinct expert of each layer


MOST_ENGINES = 256  # that a term remembers
SURE = 1 - 2**-20  # the highest chance that enters a logarithm
UNMEASURED = DecodeTimes(0.0, 0.0)  # of engines that have not measured their steps: experts cost nothing there


class PromptForecast:
    """Knows what prompts say of the experts that are chosen after them."""

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


class UnionChoice:
    """Chooses the engine where a request costs all that decode least; the one with fewest where nothing is known."""

    def __init__(self, times: DecodeTimes) -> None:
        self._times = times

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
        if offered.chance is None:
            return fewest(offered, open_, now_s)
        chance, times = offered.chance, self._times
        return min(
            open_,
            key=lambda view: (engine_step(view, chance, times).cost_s(chance), view.requests / max(1, view.slots)),
        )


class UnionTerm:
    """Costs of a request's decoding at each engine, for `Pull`. Owns what it has reckoned of engines as they are."""

    def __init__(self, times: DecodeTimes) -> None:
        self._times = times
        self._known: dict[str, _KnownEngine] = {}  # by place

    def __call__(self, offers: Sequence[Offered], views: Sequence[EngineView]) -> Values:
        """Returns seconds [W, R], of all that the request is expected to write."""
        tokens = np.array([offered.expected_tokens for offered in offers])
        foreseen = [offered.chance for offered in offers]
        if not any(chance is not None for chance in foreseen):
            return np.zeros((len(views), len(offers)))
        return np.asarray(np.array([self._row(view, foreseen) for view in views]) * tokens)

    def _row(self, view: EngineView, foreseen: list[FloatArray | None]) -> list[float]:
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
    view: EngineView
    step: EngineStep
    costs: dict[int, tuple[FloatArray, float]] = field(default_factory=dict)  # of requests by their chances' identity


class BandChoice:
    """Chooses the least loaded engine of those whose cluster is near [ELDR, Online]."""

    def __init__(self, clusters: ExpertClusters, places: Sequence[str], band: float = BAND) -> None:
        """`places` are the engines of the clusters; others are as far as can be."""
        self._clusters, self._band = clusters, band
        self._number = {place: number for number, place in enumerate(places)}

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
        if offered.signature is None:
            return fewest(offered, open_, now_s)
        similarity = np.append(self._clusters.similarity(offered.signature), np.float32(0))
        near = similarity[[self._number.get(view.place, -1) for view in open_]]
        load = np.array([view.requests / max(1, view.slots) for view in open_])
        return open_[in_band(near, load, np.ones(len(open_), np.bool_), self._band)]


def engine_step(view: EngineView, like: FloatArray, times: DecodeTimes) -> EngineStep:
    """Returns what a step of the engine takes; `like` is how likely some request chooses experts [L, E]."""
    seconds = np.full(like.shape, view.expert_s or times.expert_s, np.float32)
    if view.resident is not None:
        seconds += view.resident
    absent = view.union
    if absent is None:  # it does not say: as if its requests had nothing in common
        each = np.minimum(np.rint(like.sum(axis=1, keepdims=True)) / like.shape[1], SURE)
        absent = np.broadcast_to(view.requests * np.log1p(-each), like.shape)
    return step_of(seconds, absent.astype(np.float32, copy=False), view.requests, view.step_s or times.step_s)
