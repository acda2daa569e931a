"""Decides what is prefetched in idle time: plans from ranks, and whether plans are right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.predict.planning.prices import Prices
from edgemoe.experts.tiers.prefetch_priority import PrefetchPriority
from edgemoe.experts.tiers.residency import Residency
from edgemoe.policy.movement import Ledger
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import ExpertGeometry, Move


class PrefetchRequests(Protocol):
    """Takes the moves of a plan: the loader, or a stand-in."""

    def prefetch(self, moves: Iterable[Move], priority: PrefetchPriority = ...) -> None:
        """Replaces the requests of one priority by `moves`, best first."""


class Plans:
    """Makes plans for the tiers. On the controller's thread."""

    def __init__(
        self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry, hysteresis: float
    ) -> None:
        self._residency, self._loader, self._absent = residency, loader, ~geometry.exists
        self._prices = Prices(residency, geometry, hysteresis)
        self.ledger = Ledger()
        self._has_requests = False  # the loader has requests of the last plan

    def make(self, ranks: FloatArray, predictor: NextUsePredictor) -> int:
        """Moves the prices a step, and requests the moves of a new plan. Returns their number.

        Requests nothing while the plans have not been right more often than what they would have replaced.
        """
        moves: list[Move] = []
        self.ledger.settle(predictor.history.last.ravel())
        if self._watch(ranks, predictor) or self.ledger.trusted:
            moves = self._moves(ranks, predictor)
        self._request(moves)
        return len(moves)

    def withdraw(self) -> None:
        """Cancels what the last plan requested: its step is over."""
        self._request([])

    def _request(self, moves: list[Move]) -> None:
        if moves or self._has_requests:
            self._loader.prefetch(moves, PrefetchPriority.FAR)
        self._has_requests = bool(moves)

    def _watch(self, ranks: FloatArray, predictor: NextUsePredictor) -> bool:
        """Watches the best candidate and what it would replace. Returns True where there is room for it anyway."""
        if self._residency.has_room:
            return True
        here = self._residency.resident_mask(self._residency.fastest)
        prefetch_request, rival = (
            int(np.where(here | self._absent, -np.inf, ranks).argmax()),
            int(np.where(here, ranks, np.inf).argmin()),
        )
        if ranks.ravel()[prefetch_request] > ranks.ravel()[rival]:
            pair = np.array([prefetch_request, rival])
            has_run = predictor.visited[pair // predictor.experts] == predictor.step  # needs of this step are over
            self.ledger.watch(prefetch_request, rival, predictor.step - 1 + has_run)
        return False

    def _moves(self, ranks: FloatArray, predictor: NextUsePredictor) -> list[Move]:
        near = 1 / (1 + np.exp(predictor.phase[:, None] - ranks))  # [L, E] decay^steps to the next use
        later = predictor.history.rates[:, 1]  # what is common lately
        chance = self.ledger.share
        moves = self._prices.moves(near, later)
        return [move._replace(score=float(ranks[move.expert]), chance=chance) for move in moves]
