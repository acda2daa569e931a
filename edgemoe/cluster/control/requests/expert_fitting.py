"""Keeps expert clusters fitted to what requests choose, one for each engine that writes answers, while this box leads.

Engines say what requests chose that have ended; clusters are fitted to the latest of these, by a process: first to
FIRST of them, again to twice as many, where engines have come, changed their slots or gone for long, and where requests
have drifted from what clusters were fitted to (`policy.routing.expert_clusters`). Each time clusters are given to
engines so that few requests change theirs, and an engine that starts again keeps its own, while clusters are being
fitted too. The next leader begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.cluster.control.planning.messages import MAX_REQUESTS, ClusterAnswer, ClusterQuestion
from edgemoe.cluster.control.requests.offer_queue import OfferQueue
from edgemoe.errors import PlanningFailed
from edgemoe.policy.route import node_of
from edgemoe.policy.routing.expert_clusters import ExpertClusters, Fit, drifted
from edgemoe.policy.routing.locality_band import LocalityBand
from edgemoe.policy.routing.offers import EngineView
from edgemoe.policy.routing.told import ModelSizes, counts_of
from edgemoe.types.arrays import FloatArray
from edgemoe.types.expert_signatures import EndedRequest

Fitter = Callable[[ClusterQuestion], Awaitable[ClusterAnswer]]  # raises PlanningFailed

log = logging.getLogger(__name__)
FIRST = 64  # requests that clusters are fitted to at first
RECENT, EVERY = 64, 16  # requests in which drift is looked for, and after how many more it is again
MOST_BYTES = 48 << 20  # of what requests chose; the oldest go
SETTLE_S = 10.0  # for which engines must have been others than those that have clusters
GONE_S = 120.0  # the same where none has come: who only starts again, and loads its model, keeps its cluster
REFIT_S = 60.0  # at least, from one fit to the next by what requests choose, or after one that failed


@dataclass(frozen=True, slots=True, eq=False)
class FittedClusters:
    """The clusters in force, and what they were fitted to."""

    clusters: ExpertClusters
    slots: Mapping[str, int]  # of each cluster's engine, by its box
    requests: int
    fitted_s: float


class ExpertFitting:
    """Owns what requests chose that have ended. One event loop."""

    def __init__(
        self,
        queue: OfferQueue,
        band: LocalityBand,
        fit: Fitter,
        clock: Callable[[], float],
    ) -> None:
        """`band` is what follows the clusters."""
        self.fits = 0
        self.fitted: FittedClusters | None = None
        self._queue, self._band, self._fit, self._clock = queue, band, fit, clock
        self._sizes = ModelSizes()
        self._forget()

    @property
    def kept(self) -> int:
        """Counts the requests that it knows of."""
        return len(self._requests)

    def forget(self) -> None:
        """Knows nothing: this box leads anew, or no longer."""
        self._forget()

    def hear(self, ended: Iterable[EndedRequest]) -> None:
        """Takes what requests chose; what cannot be of this model is left out."""
        self._check_model()
        table = 2 * self._sizes.layers * self._sizes.experts
        for one in ended:
            if table and all(told.tokens and len(told.chosen) == table for told in (one.prompt, one.answer)):
                self._requests.append(one)
                self._new += 1
        while len(self._requests) * 2 * table > MOST_BYTES:
            self._requests.popleft()

    def follow(self) -> None:
        """Has the band go by the places where the engines are now."""
        self._check_model()
        if self.fitted is not None:
            places = {node_of(place): place for place in self._queue.writers}
            self._band.follow(self.fitted.clusters, [places.get(node, node) for node in self.fitted.slots])

    async def look(self) -> None:
        """Looks whether clusters are to be fitted, and has that done."""
        self.follow()
        engines = {node_of(view.place): view for view in self._queue.writing()}
        if why := await self._why(engines):
            await self._refit(why, engines)

    def _forget(self) -> None:
        self.fitted = None
        self._band.forget()
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)
        self._new = 0  # since the last look for drift
        self._as_fitted_s = self._failed_s = float("-inf")  # when engines were last those that have clusters

    def _check_model(self) -> None:
        """Forgets what another model's requests chose."""
        if self._sizes != self._queue.sizes:
            self._sizes = self._queue.sizes
            self._forget()

    async def _why(self, engines: Mapping[str, EngineView]) -> str:
        """Returns why clusters are to be fitted now; "" while they are not."""
        now_s, fitted, count = self._clock(), self.fitted, len(self._requests)
        if len(engines) < 2 or count < max(FIRST, len(engines)) or now_s - self._failed_s < REFIT_S:
            return ""
        if fitted is None:
            return "first"
        if (slots := _slots(engines)) != fitted.slots:
            only_gone = slots.items() <= fitted.slots.items()
            return "engines" if now_s - self._as_fitted_s >= (GONE_S if only_gone else SETTLE_S) else ""
        self._as_fitted_s = now_s
        if now_s - fitted.fitted_s < REFIT_S:
            return ""
        if count >= 2 * fitted.requests:
            return "more requests"
        if self._new < EVERY:
            return ""
        self._new = 0
        recent = list(self._requests)[-RECENT:]
        return "drift" if await asyncio.to_thread(_drifted, fitted.clusters, recent, self._sizes) else ""

    async def _refit(self, why: str, engines: Mapping[str, EngineView]) -> None:
        slots, sizes = _slots(engines), self._sizes
        requests, known = self._requests, tuple(self._requests)
        before = await asyncio.to_thread(_before, self.fitted, known, list(slots), sizes)
        asked = ClusterQuestion(0, *sizes, known, tuple(slots.values()), before)
        try:
            solved = await self._fit(asked)
        except (PlanningFailed, OSError) as error:
            log.warning("expert clusters were not fitted", extra={"why": str(error)})
            self._failed_s = self._clock()
            return
        if requests is not self._requests:
            return  # another leader's, or another model's
        self.fitted = FittedClusters(_clusters_of(asked, solved), slots, len(known), self._clock())
        self.fits += 1
        self._new, self._as_fitted_s = 0, self._clock()
        self.follow()
        told = {"why": why, "engines": len(slots), "requests": len(known), "weights": solved.chosen, "rho": solved.rho}
        log.info("expert clusters fitted", extra=told)


def _slots(engines: Mapping[str, EngineView]) -> dict[str, int]:
    return {node: max(1, view.slots) for node, view in engines.items()}


def _counts(requests: Sequence[EndedRequest], sizes: ModelSizes) -> list[FloatArray]:
    """Returns what their prompts chose."""
    found = [counts_of(one.prompt.tokens, one.prompt.chosen, sizes) for one in requests]
    return [counts for counts in found if counts is not None]


def _drifted(clusters: ExpertClusters, recent: Sequence[EndedRequest], sizes: ModelSizes) -> bool:
    return drifted(clusters, np.stack(_counts(recent, sizes)))


def _before(
    fitted: FittedClusters | None, requests: Sequence[EndedRequest], nodes: Sequence[str], sizes: ModelSizes
) -> tuple[int, ...]:
    """Returns which engine's cluster each request was in, -1 where that is gone; () without clusters."""
    if fitted is None:
        return ()
    number = {node: at for at, node in enumerate(nodes)}
    engines = [number.get(node, -1) for node in fitted.slots]
    return tuple(
        engines[int(fitted.clusters.similarity(counts).argmax())]
        for one in requests
        for counts in _counts([one], sizes)
    )


def _clusters_of(asked: ClusterQuestion, solved: ClusterAnswer) -> ExpertClusters:
    shape, engines = (asked.layers, asked.experts), len(asked.slots)
    return ExpertClusters(
        np.frombuffer(solved.weights, np.float32).reshape(shape),
        np.frombuffer(solved.centroids, np.float32).reshape(engines, -1),
        np.frombuffer(solved.decode, np.float32).reshape(engines, *shape),
        Fit(solved.similarity, solved.spread, np.array(solved.nearest, np.int64)),
    )
