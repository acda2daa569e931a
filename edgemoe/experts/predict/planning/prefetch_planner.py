"""Decides what is prefetched in idle time: plans from ranks, by what such ranks have come to mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.predict.planning.prices import MeasuredCosts, Prices
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.policy.movement import WATCHED, NeedRecord, Watched
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, Move, Tier

LEAST_CHANCE = 0.5  # of a need within the window: what is likelier to be in vain than not is not moved
GAIN = 0.05  # by which a wish must be likelier to be needed than what goes for it
WINDOW = 8  # steps within which a need counts: about as long as a tier of a quarter keeps what nobody needs
AS_IT_RANKS = float("nan")  # score of a move: what its expert ranks at when it is begun


class PrefetchRequests(MeasuredCosts, Protocol):
    """Takes the moves of a plan: the loader, or a stand-in."""

    def prefetch(self, moves: Iterable[Move], priority: PrefetchPriority = ...) -> None:
        """Replaces the requests of one priority by `moves`, best first."""


class Outlook:
    """Knows how likely it is that what one tier lacks, or has, is needed soon. On the controller's thread."""

    def __init__(self, residency: Residency, tier: Tier, exists: BoolArray) -> None:
        self.tier, self.needs = tier, NeedRecord(WINDOW)
        self._residency, self._exists = residency, exists

    def judge(self, moves: list[Move], odds: FloatArray, predictor: NextUsePredictor) -> list[Move]:
        """Returns those of the moves into the tier that are likely needed, likelier than what goes for them.

        None before it is known what came of the first plans, unless there is room. `odds` [L, E] are log odds.
        """
        self.needs.settle(predictor.step, predictor.history.last.ravel())
        here, usage = self._residency.resident_mask(self.tier), self._residency.usage(self.tier)
        room, keeps = usage.used < usage.slots, here
        if self.tier is not self._residency.fastest:
            keeps = here & ~self._residency.resident_mask(self._residency.fastest)
        missing = _lowest(np.where(here | ~self._exists, np.inf, -odds))
        rivals = _lowest(np.where(keeps, odds, np.inf))
        least = np.full(len(moves), LEAST_CHANCE, np.float32)
        if not room:
            goes = self.needs.chance_there(odds.ravel()[rivals[: len(moves)]])
            least[: len(goes)] = np.maximum(least[: len(goes)], goes + GAIN)
        chances = self.needs.chance(np.array([odds[move.expert] for move in moves], np.float32))
        kept = [
            move._replace(score=AS_IT_RANKS, chance=chance)
            for move, chance, enough in zip(moves, chances.tolist(), (chances >= least).tolist(), strict=True)
            if enough and (room or self.needs.tried)
        ]
        if len(missing):
            self._watch(missing, rivals, odds, kept, predictor)
        return kept

    def _watch(
        self, missing: IntArray, rivals: IntArray, odds: FloatArray, moves: list[Move], predictor: NextUsePredictor
    ) -> None:
        keys, experts = np.concatenate([missing, rivals]), predictor.experts
        has_run = predictor.visited[keys // experts] == predictor.step  # needs of this step are over
        wished = np.isin(missing, [layer * experts + expert for (layer, expert), *_ in moves])
        since = predictor.step - 1 + has_run
        self.needs.watch(Watched(predictor.step, keys, odds.ravel()[keys], since, len(missing), wished))


class Plans:
    """Makes plans for the tiers. On the controller's thread."""

    def __init__(
        self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry, hysteresis: float
    ) -> None:
        self._loader = loader
        self._prices = Prices(residency, loader, geometry, hysteresis)
        tiers = dict.fromkeys((residency.fastest, Tier.RAM))
        self._outlooks = [Outlook(residency, tier, geometry.exists) for tier in tiers]
        self._has_requests = False  # the loader has requests of the last plan

    @property
    def right(self) -> float:
        """Returns the share of what was requested for the fastest tier lately that was needed within the window."""
        return self._outlooks[0].needs.right

    def make(self, ranks: FloatArray, predictor: NextUsePredictor) -> int:
        """Moves the prices a step, and requests the moves of a new plan. Returns their number."""
        odds = ranks - predictor.phase[:, None]  # [L, E] of decay^steps to the next use
        moves = self._prices.moves(1 / (1 + np.exp(-odds)))
        kept = [
            move
            for outlook in self._outlooks
            for move in outlook.judge([move for move in moves if move.target is outlook.tier], odds, predictor)
        ]
        self._request(kept)
        return len(kept)

    def withdraw(self) -> None:
        """Cancels what the last plan requested: its step is over."""
        self._request([])

    def _request(self, moves: list[Move]) -> None:
        if moves or self._has_requests:
            self._loader.prefetch(moves, PrefetchPriority.FAR)
        self._has_requests = bool(moves)


def _lowest(values: FloatArray) -> IntArray:
    """Returns the keys of the WATCHED lowest of [L, E], in order; fewer where others are infinite."""
    flat = values.ravel()
    n = min(WATCHED, len(flat))
    keys = np.argpartition(flat, n - 1)[:n]
    keys = keys[np.isfinite(flat[keys])]
    ordered: IntArray = keys[np.argsort(flat[keys], kind="stable")]
    return ordered
