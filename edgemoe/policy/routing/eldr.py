"""Routes requests to the engine of the nearest cluster of expert signatures [ELDR, Online].

A request goes to the least loaded engine with a free slot among the nearly nearest clusters: the locality band. Where
that is full the request waits in one queue, so that no engine idles beside another's queue. Cluster sizes follow the
engines' capacity, and clusters are fitted again when traffic has drifted from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgemoe.policy.routing.offers import (
    OfferAssignment,
    PushRouting,
    RoutingPolicy,
    RoutingTarget,
    TargetChooser,
    Values,
    WaitingRequest,
    fewest,
    with_offer,
)
from edgemoe.policy.routing.signatures import Counts, ExpertClusters, signatures
from edgemoe.types.arrays import BoolArray, FloatArray

BAND = 0.1  # [ELDR, Online]
SURE = 4.0  # standard errors between recent and fitted traffic that count as drift
LEAST_DROP = 0.01  # of the mean similarity, that is worth another fit


def in_band(similarity: FloatArray, load: Values, room: BoolArray, band: float = BAND) -> int:
    """Returns the least loaded worker with room within the band of the nearest one; -1 where none has room.

    `load` [K] is the used share of each worker's slots. Of equals the nearer one is chosen.
    """
    if not room.any():
        return -1
    reach = np.where(room, similarity, -np.inf)
    inside = reach >= reach.max() - band
    return int(np.lexsort((-reach, np.where(inside, load, np.inf)))[0])


def drifted(clusters: ExpertClusters, recent: Counts) -> bool:
    """Returns whether requests with these prefill counts [N, L, E] have drifted from the fitted ones.

    Either they are farther from the clusters, or they are others' share of them.
    """
    near = signatures(recent, clusters.weights) @ clusters.centroids.T
    fit, count = clusters.fit, len(recent)
    fitted = int(fit.nearest.sum())
    drop = fit.similarity - float(near.max(axis=1).mean())
    error = fit.spread * np.sqrt(1 / count + 1 / fitted)
    if drop > max(SURE * error, LEAST_DROP):
        return True
    now = np.bincount(near.argmax(axis=1), minlength=len(fit.nearest))
    both = now + fit.nearest
    part = both > 0
    ratio = np.sqrt(fitted / count)
    apart = float(((now * ratio - fit.nearest / ratio)[part] ** 2 / both[part]).sum())  # chi squared of two samples
    free = int(part.sum()) - 1
    return bool(apart > free + SURE * (2 * max(free, 1)) ** 0.5)


NEAREST, IN_BAND = BAND_REASONS = ("nearest", "in band")  # the engine of the nearest cluster, or a less loaded one


class BandChooser:
    """Chooses the least loaded engine with a near cluster [ELDR, Online]."""

    def __init__(self, clusters: ExpertClusters, places: Sequence[str], band: float = BAND) -> None:
        """Takes the engines of the clusters as `places`; other engines count as farthest."""
        self._clusters, self._band = clusters, band
        self._number = {place: number for number, place in enumerate(places)}

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        if offered.signature is None:
            return fewest(offered, open_, now_s)
        similarity = np.append(self._clusters.similarity(offered.signature), np.float32(0))
        near = similarity[[self._number.get(view.place, -1) for view in open_]]
        load = np.array([view.requests / max(1, view.slots) for view in open_])
        return open_[in_band(near, load, np.ones(len(open_), np.bool_), self._band)]


class LocalityBand:
    """Owns the clusters in force. Chooses an engine for one request, by `otherwise` where they say nothing of it."""

    def __init__(self, otherwise: TargetChooser) -> None:
        self._otherwise = otherwise
        self._clusters: ExpertClusters | None = None
        self._places: dict[str, int] = {}  # of engines, their clusters

    def follow(self, clusters: ExpertClusters, places: Sequence[str]) -> None:
        """Goes by these from now on; `places` are their engines."""
        self._clusters, self._places = clusters, {place: number for number, place in enumerate(places)}

    def forget(self) -> None:
        """Drops the clusters: requests are then routed without locality."""
        self._clusters, self._places = None, {}

    def covers(self, views: Sequence[RoutingTarget]) -> bool:
        """Returns whether each of these engines has a cluster."""
        return all(view.place in self._places for view in views)

    def knows(self, offered: WaitingRequest) -> bool:
        """Returns whether clusters say something of the request."""
        clusters, signature = self._clusters, offered.signature
        return clusters is not None and signature is not None and signature.shape == clusters.weights.shape

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        if self._clusters is None or not self.knows(offered) or not self.covers(open_):
            return self._otherwise(offered, open_, now_s)
        return BandChooser(self._clusters, list(self._places))(offered, open_, now_s)

    def reason(self, offered: WaitingRequest, views: Sequence[RoutingTarget], place: str) -> str:
        """Returns in a word why the request goes to that one of the engines; "" where clusters have no part in it."""
        clusters, signature = self._clusters, offered.signature
        if clusters is None or signature is None or not self.knows(offered) or not self.covers(views):
            return ""
        nearest = int(clusters.similarity(signature).argmax())
        return NEAREST if self._places[place] == nearest else IN_BAND


class BandRouting:
    """Places requests by the band where that knows them, and has another policy place the others."""

    def __init__(self, band: LocalityBand, others: RoutingPolicy) -> None:
        self._band, self._push, self._others = band, PushRouting(band), others

    def takes(self, views: Sequence[RoutingTarget]) -> bool:
        """Returns whether an engine has a free slot, or room by the other policy."""
        return any(view.requests < min(view.slots, view.capacity) for view in views) or self._others.takes(views)

    def assign(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        """Returns the assignments of this moment; other offers must be offered again."""
        known = {one.request: one for one in offers if self._band.knows(one)} if self._band.covers(views) else {}
        unknown = {one.request: one for one in offers if one.request not in known}
        kinds = [(self._near, known), (self._others.assign, unknown)]
        if offers and offers[0].request in unknown:
            kinds.reverse()
        there, answer = {view.place: view for view in views}, list[OfferAssignment]()
        for assign, some in kinds:
            for one in assign(list(some.values()), list(there.values()), now_s):
                there[one.place] = with_offer(there[one.place], some[one.request])
                answer.append(one)
        return answer

    def _near(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        free = [replace(view, capacity=min(view.slots, view.capacity)) for view in views]
        return self._push.assign(offers, free, now_s)
