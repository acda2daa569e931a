"""Fits expert clusters, one for each engine that decodes, to the experts of ended requests while this box leads.

A child process fits them to the first FIRST requests, and again to twice as many. It also fits after engines have
changed for long, and when requests drift (`policy.routing.eldr`). Engines keep the clusters that move fewest requests.
A new leader starts from nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.cluster.control.planning.planning_questions import MAX_REQUESTS, ClusterAnswer, ClusterQuestion
from edgemoe.cluster.control.requests.offer_queue import OfferQueue
from edgemoe.errors import PlanningFailed
from edgemoe.policy.routing.eldr import LocalityBand, drifted
from edgemoe.policy.routing.least_loaded import node_of
from edgemoe.policy.routing.offers import RoutingTarget
from edgemoe.policy.routing.signatures import ClusterFit, ExpertClusters, ModelSizes, counts_of
from edgemoe.types.arrays import FloatArray
from edgemoe.types.expert_signatures import EndedRequest

Fitter = Callable[[ClusterQuestion], Awaitable[ClusterAnswer]]  # raises PlanningFailed

log = logging.getLogger(__name__)
FIRST = 64  # requests for the first fit
RECENT, EVERY = 64, 16  # requests that are tested for drift, and new requests between tests
MOST_BYTES = 48 << 20  # of signatures; the oldest go
SETTLE_S = 10.0  # for which engines must differ from the clusters' engines
GONE_S = 120.0  # the same if no engine has come: one that restarts and loads its model keeps its cluster
REFIT_S = 60.0  # at least, between fits because of requests, or after a failed fit


@dataclass(frozen=True, slots=True, eq=False)
class FittedClusters:
    """The clusters in force, with the engines and requests that they were fitted to."""

    clusters: ExpertClusters
    slots: Mapping[str, int]  # of each cluster's engine, by its box
    requests: int
    fitted_s: float


class ExpertFitting:
    """Owns the expert signatures of ended requests."""

    def __init__(
        self,
        queue: OfferQueue,
        band: LocalityBand,
        fit: Fitter,
        clock: Callable[[], float],
    ) -> None:
        """Takes the `band` that routes by the clusters, and the `fit` that computes them."""
        self.fits = 0
        self.fitted: FittedClusters | None = None
        self._queue, self._band, self._fit, self._clock = queue, band, fit, clock
        self._sizes = ModelSizes()
        self._forget()

    @property
    def kept(self) -> int:
        """Counts the requests that are kept."""
        return len(self._requests)

    def forget(self) -> None:
        """Forgets everything: this box leads in another epoch, or no longer."""
        self._forget()

    def add_ended(self, ended: Iterable[EndedRequest]) -> None:
        """Adds the signatures of ended requests; drops signatures of another model's size."""
        self._check_model()
        table = 2 * self._sizes.layers * self._sizes.experts
        for one in ended:
            if table and all(told.tokens and len(told.chosen) == table for told in (one.prompt, one.answer)):
                self._requests.append(one)
                self._new += 1
        while len(self._requests) * 2 * table > MOST_BYTES:
            self._requests.popleft()

    def update_band(self) -> None:
        """Tells the band the present places of the clusters' engines."""
        self._check_model()
        if self.fitted is not None:
            places = {node_of(place): place for place in self._queue.writers}
            self._band.follow(self.fitted.clusters, [places.get(node, node) for node in self.fitted.slots])

    async def refit_if_due(self) -> None:
        """Fits clusters if that is due."""
        self.update_band()
        engines = {node_of(view.place): view for view in self._queue.writing()}
        if why := await self._why(engines):
            await self._refit(why, engines)

    def _forget(self) -> None:
        self.fitted = None
        self._band.forget()
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)
        self._new = 0  # since the last test for drift
        self._as_fitted_s = self._failed_s = float("-inf")  # when the engines were last the clusters' engines

    def _check_model(self) -> None:
        """Forgets the signatures of another model."""
        if self._sizes != self._queue.sizes:
            self._sizes = self._queue.sizes
            self._forget()

    async def _why(self, engines: Mapping[str, RoutingTarget]) -> str:
        """Returns the reason to fit clusters now; "" for none."""
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

    async def _refit(self, why: str, engines: Mapping[str, RoutingTarget]) -> None:
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
            return  # the fit was for another leader or model
        self.fitted = FittedClusters(_clusters_of(asked, solved), slots, len(known), self._clock())
        self.fits += 1
        self._new, self._as_fitted_s = 0, self._clock()
        self.update_band()
        told = {"why": why, "engines": len(slots), "requests": len(known), "weights": solved.chosen, "rho": solved.rho}
        log.info("expert clusters fitted", extra=told)


def _slots(engines: Mapping[str, RoutingTarget]) -> dict[str, int]:
    return {node: max(1, view.slots) for node, view in engines.items()}


def _counts(requests: Sequence[EndedRequest], sizes: ModelSizes) -> list[FloatArray]:
    """Returns the expert counts of the requests' prompts."""
    found = [counts_of(one.prompt.tokens, one.prompt.chosen, sizes) for one in requests]
    return [counts for counts in found if counts is not None]


def _drifted(clusters: ExpertClusters, recent: Sequence[EndedRequest], sizes: ModelSizes) -> bool:
    return drifted(clusters, np.stack(_counts(recent, sizes)))


def _before(
    fitted: FittedClusters | None, requests: Sequence[EndedRequest], nodes: Sequence[str], sizes: ModelSizes
) -> tuple[int, ...]:
    """Returns the number of each request's engine by the former clusters, -1 if it is gone; () without clusters."""
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
        ClusterFit(solved.similarity, solved.spread, np.array(solved.nearest, np.int64)),
    )
