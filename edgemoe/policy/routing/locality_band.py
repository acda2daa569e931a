"""Routes by ELDR's clusters while each engine that is there has one, and by other rules where not.

A request goes to the least loaded of the engines with a free slot whose cluster is nearly as near as the nearest one's
[ELDR, Online]. Ours differs in this: the source queues a request there whatever runs; here it waits in one queue until
a slot is free, so that no engine idles beside another's queue. Of requests whose experts are known and those of whom
they are not, the kind whose oldest has waited for longer goes first, so that neither starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgemoe.policy.routing.baselines import Chooser, Push
from edgemoe.policy.routing.by_experts import BandChoice
from edgemoe.policy.routing.expert_clusters import ExpertClusters
from edgemoe.policy.routing.offers import Assignment, EngineView, Offered, RoutingPolicy, with_offer

NEAREST, IN_BAND = BAND_REASONS = ("nearest", "in band")  # the engine of the nearest cluster, or a less loaded one


class LocalityBand:
    """Owns the clusters in force. Chooses an engine for one request, by `otherwise` where they say nothing of it."""

    def __init__(self, otherwise: Chooser) -> None:
        self._otherwise = otherwise
        self._clusters: ExpertClusters | None = None
        self._places: dict[str, int] = {}  # of engines, their clusters

    def follow(self, clusters: ExpertClusters, places: Sequence[str]) -> None:
        """Goes by these from now on; `places` are their engines."""
        self._clusters, self._places = clusters, {place: number for number, place in enumerate(places)}

    def forget(self) -> None:
        """Goes by no clusters."""
        self._clusters, self._places = None, {}

    def covers(self, views: Sequence[EngineView]) -> bool:
        """Returns whether each of these engines has a cluster."""
        return all(view.place in self._places for view in views)

    def knows(self, offered: Offered) -> bool:
        """Returns whether clusters say something of the request."""
        clusters, signature = self._clusters, offered.signature
        return clusters is not None and signature is not None and signature.shape == clusters.weights.shape

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
        if self._clusters is None or not self.knows(offered) or not self.covers(open_):
            return self._otherwise(offered, open_, now_s)
        return BandChoice(self._clusters, list(self._places))(offered, open_, now_s)

    def why(self, offered: Offered, views: Sequence[EngineView], place: str) -> str:
        """Returns in a word why the request goes to that one of the engines; "" where clusters have no part in it."""
        clusters, signature = self._clusters, offered.signature
        if clusters is None or signature is None or not self.knows(offered) or not self.covers(views):
            return ""
        nearest = int(clusters.similarity(signature).argmax())
        return NEAREST if self._places[place] == nearest else IN_BAND


class BandRouting:
    """Places requests by the band where that knows them, and has another policy place the others."""

    def __init__(self, band: LocalityBand, others: RoutingPolicy) -> None:
        self._band, self._push, self._others = band, Push(band), others

    def takes(self, views: Sequence[EngineView]) -> bool:
        """Returns whether an engine has a free slot, or room by the other policy."""
        return any(view.requests < min(view.slots, view.capacity) for view in views) or self._others.takes(views)

    def assign(self, offers: Sequence[Offered], views: Sequence[EngineView], now_s: float) -> list[Assignment]:
        """Returns what goes where now; the rest is to be offered again."""
        known = {one.request: one for one in offers if self._band.knows(one)} if self._band.covers(views) else {}
        unknown = {one.request: one for one in offers if one.request not in known}
        kinds = [(self._near, known), (self._others.assign, unknown)]
        if offers and offers[0].request in unknown:
            kinds.reverse()
        there, answer = {view.place: view for view in views}, list[Assignment]()
        for assign, some in kinds:
            for one in assign(list(some.values()), list(there.values()), now_s):
                there[one.place] = with_offer(there[one.place], some[one.request])
                answer.append(one)
        return answer

    def _near(self, offers: Sequence[Offered], views: Sequence[EngineView], now_s: float) -> list[Assignment]:
        free = [replace(view, capacity=min(view.slots, view.capacity)) for view in views]
        return self._push.assign(offers, free, now_s)
