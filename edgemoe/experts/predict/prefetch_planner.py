"""Plans prefetches for idle time: moves that pay by tier prices [Two-Tier, 4.3], filtered by the chance of a need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.policy.movement import (
    WATCHED,
    NeedRecord,
    TierBudget,
    WatchedPlan,
    Watermark,
    density,
    floor,
    miss_cost,
    plan,
)
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, Move, Tier

MOST_MOVES = 12  # in one plan: a few times a step another one is made


class MeasuredCosts(Protocol):
    """Returns measured load times. The loader implements it."""

    def miss_costs(self, tier: Tier) -> list[tuple[float, float]]:
        """Returns the seconds of a load, and of each of its bytes, into RAM or each device; 0 until measured."""


class TierPrices:
    """Owns the watermarks of VRAM and RAM. The cost of a miss in a tier is relative to the tier's dearest expert."""

    def __init__(
        self, residency: Residency, measured: MeasuredCosts, geometry: ExpertGeometry, hysteresis: float
    ) -> None:
        self._residency, self._measured = residency, measured
        self._geometry, self._absent = geometry, ~geometry.exists
        self._sizes: IntArray = np.where(self._absent, 0, geometry.strides_bytes[:, None])
        self._budget_bytes = float(MOST_MOVES * geometry.largest_bytes)
        room = {tier: max(1, residency.usage(tier).size_bytes) for tier in (Tier.VRAM, Tier.RAM)}
        self._marks = {tier: Watermark(n, hysteresis=hysteresis) for tier, n in room.items()}

    def moves(self, worth: FloatArray) -> list[Move]:
        """Updates the prices by a step, and returns the moves of a plan, scored by density.

        `worth` [L, E] is an expert's worth to VRAM, to RAM beside it, or to RAM alone.
        """
        ram = self._side(Tier.RAM, worth)
        beside = self._residency.fastest is Tier.VRAM
        vram = self._side(Tier.VRAM, worth) if beside else ram._replace(idle_bytes=0.0)
        return plan(vram, ram, self._sizes)

    def lowest_worth(self, tier: Tier) -> float:
        """Returns the worth below which an expert may be dropped from a tier."""
        mark = self._marks[tier]
        return (1 - mark.hysteresis) * mark.price * self._geometry.largest_bytes

    def pinned(self, worth: FloatArray, working_set_bytes: int) -> BoolArray:
        """Returns the experts [L, E] that stay in the fastest tier if it cannot hold `working_set_bytes`; else none."""
        capacity_bytes = self._residency.usage(self._residency.fastest).size_bytes
        return (
            floor(self._density(self._residency.fastest, worth), self._sizes, capacity_bytes, working_set_bytes)
            & ~self._absent
        )

    def _side(self, tier: Tier, worth: FloatArray) -> TierBudget:
        b, mark = self._density(tier, worth), self._marks[tier]
        mark.update(b, self._sizes)
        settled = self._residency.resident_mask(tier) | self._absent  # experts that do not exist count as present
        return TierBudget(b, settled, mark, self._budget_bytes)

    def _density(self, tier: Tier, worth: FloatArray) -> FloatArray:
        """Returns b = p C / S, with C = C_G of the expert's device, or C_R."""
        each = np.array([cost if any(cost) else (0.0, 1.0) for cost in self._measured.miss_costs(tier)])
        where = self._residency.device_of if tier is Tier.VRAM else 0
        cost = miss_cost(self._sizes, each[where, 0], each[where, 1])
        return density(np.where(self._absent, 0, worth), cost / cost.max(), np.maximum(self._sizes, 1))


LEAST_CHANCE = 0.5  # least chance of a need within the window for a move
GAIN = 0.05  # by which a move must be likelier to be needed than the expert that it replaces
WINDOW = 8  # steps within which a need counts: about how long a tier of a quarter keeps an unneeded expert
AS_IT_RANKS = float("nan")  # score of a move: its expert's rank when the move begins


class PrefetchRequests(MeasuredCosts, Protocol):
    """Takes the moves of a plan: the loader, or a stand-in."""

    def prefetch(self, moves: Iterable[Move], priority: PrefetchPriority = ...) -> None:
        """Replaces the requests of one priority by `moves`, best first."""


class NeedEstimate:
    """Estimates the chance of a need of experts that one tier lacks or has. On the controller's thread."""

    def __init__(self, residency: Residency, tier: Tier, exists: BoolArray) -> None:
        self.tier, self.needs = tier, NeedRecord(WINDOW)
        self._residency, self._exists = residency, exists

    def select_moves(self, moves: list[Move], odds: FloatArray, predictor: NextUsePredictor) -> list[Move]:
        """Returns the moves into the tier that are likely needed, and likelier than the experts they replace.

        Returns none before the outcome of the first plans is known, unless there is room. `odds` [L, E] are log odds.
        """
        self.needs.judge_plans(predictor.step, predictor.history.last.ravel())
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
        self.needs.watch(WatchedPlan(predictor.step, keys, odds.ravel()[keys], since, len(missing), wished))


class PrefetchPlanner:
    """Makes plans for the tiers. On the controller's thread."""

    def __init__(
        self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry, hysteresis: float
    ) -> None:
        self._loader = loader
        self._prices = TierPrices(residency, loader, geometry, hysteresis)
        tiers = dict.fromkeys((residency.fastest, Tier.RAM))
        self._estimates = [NeedEstimate(residency, tier, geometry.exists) for tier in tiers]
        self._has_requests = False  # the loader has requests of the last plan

    @property
    def right(self) -> float:
        """The recent share of the fastest tier's requests that were needed within the window."""
        return self._estimates[0].needs.right

    def plan(self, ranks: FloatArray, predictor: NextUsePredictor) -> int:
        """Moves the prices a step, and requests the moves of a new plan. Returns their number."""
        odds = ranks - predictor.phase[:, None]  # [L, E] of decay^steps to the next use
        moves = self._prices.moves(1 / (1 + np.exp(-odds)))
        kept = [
            move
            for estimate in self._estimates
            for move in estimate.select_moves([move for move in moves if move.target is estimate.tier], odds, predictor)
        ]
        self._request(kept)
        return len(kept)

    def cancel(self) -> None:
        """Cancels the requests of the last plan, since its step is over."""
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
