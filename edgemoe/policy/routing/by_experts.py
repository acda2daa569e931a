"""Routes by which experts requests choose: by marginal union, or by ELDR's clusters and band.

`PromptForecast` says once for each request how likely its tokens choose each expert; what is known of engines adds that
up. Where no clusters are fitted, marginal union goes by the prompt alone, which is worth nearly as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgemoe.policy.routing.baselines import fewest
from edgemoe.policy.routing.expert_clusters import BAND, ExpertClusters, in_band
from edgemoe.policy.routing.expert_union import Values, chances, union_costs
from edgemoe.policy.routing.offers import EngineView, Offered
from edgemoe.policy.routing.signatures import Counts
from edgemoe.types.arrays import FloatArray


class DecodeTimes(NamedTuple):
    """States what a decode step takes of an engine that does not say, with all experts in place."""

    step_s: float
    expert_s: float  # for each distinct expert of each layer


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
        _, costs = step_costs([offered.chance], open_, self._times)
        load = [view.requests / max(1, view.slots) for view in open_]
        return open_[min(range(len(open_)), key=lambda w: (costs[w, 0], load[w]))]


class UnionTerm:
    """Costs of a request's decoding at each engine, beyond those where they are least, for `Pull`."""

    def __init__(self, times: DecodeTimes) -> None:
        self._times = times

    def __call__(self, offers: Sequence[Offered], views: Sequence[EngineView]) -> Values:
        """Returns seconds [W, R], of all that the request is expected to write."""
        answer = np.zeros((len(views), len(offers)))
        known = [r for r, offered in enumerate(offers) if offered.chance is not None]
        if known and views:
            _, costs = step_costs([each.chance for each in offers if each.chance is not None], views, self._times)
            tokens = np.array([offers[r].expected_tokens for r in known])
            answer[:, known] = (costs - costs.min(axis=0)) * tokens
        return answer


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


def step_costs(chance: Sequence[FloatArray], views: Sequence[EngineView], times: DecodeTimes) -> tuple[Values, Values]:
    """Returns what a step takes at each engine [W], and what each request costs all that decode there in one [W, R]."""
    new = np.stack(chance)
    seconds = np.empty((len(views), *new.shape[1:]), np.float32)
    absent = np.empty_like(seconds)
    some = new.mean(axis=(0, 2), keepdims=True)[0]  # [L, 1]
    for w, view in enumerate(views):
        seconds[w] = view.expert_s or times.expert_s
        if view.resident is not None:
            seconds[w] += view.resident
        # of an engine that does not say, as if its requests had nothing in common
        absent[w] = view.union if view.union is not None else view.requests * np.log1p(-some)
    running = np.array([view.requests for view in views], np.int64)
    step_s = np.array([view.step_s or times.step_s for view in views])
    return union_costs(seconds, absent, running, step_s, new)
