"""What a byte of each tier costs, and the moves between tiers that are worth it [Two-Tier, 4.3]."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edgemoe.experts.tiers.residency import Residency
from edgemoe.policy.movement import Side, plan
from edgemoe.policy.watermark import Watermark, density, floor, miss_cost
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, Move, Tier

MOST_MOVES = 12  # in one plan: a few times a step another one is made


class MeasuredCosts(Protocol):
    """Knows what loads were measured to take: the loader."""

    def miss_costs(self, tier: Tier) -> list[tuple[float, float]]:
        """Returns the seconds of a load, and of each of its bytes, into RAM or each device; 0 until measured."""


class Prices:
    """Owns the watermarks of VRAM and RAM. What a miss costs in a tier is relative to its dearest expert there."""

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
        """Moves the prices a step, and returns the moves of a plan, whose scores are densities.

        `worth` [L, E] is what experts are worth to VRAM, to RAM beside it, or to RAM where there is none.
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
        """Returns what stays in the fastest tier where that does not hold `working_set_bytes`; else nothing. [L, E]."""
        capacity_bytes = self._residency.usage(self._residency.fastest).size_bytes
        return (
            floor(self._density(self._residency.fastest, worth), self._sizes, capacity_bytes, working_set_bytes)
            & ~self._absent
        )

    def _side(self, tier: Tier, worth: FloatArray) -> Side:
        b, mark = self._density(tier, worth), self._marks[tier]
        mark.update(b, self._sizes)
        settled = self._residency.resident_mask(tier) | self._absent  # what does not exist is not to be had
        return Side(b, settled, mark, self._budget_bytes)

    def _density(self, tier: Tier, worth: FloatArray) -> FloatArray:
        """b = p C / S, where C is C_G of the device that takes the expert, or C_R."""
        each = np.array([cost if any(cost) else (0.0, 1.0) for cost in self._measured.miss_costs(tier)])
        where = self._residency.device_of if tier is Tier.VRAM else 0
        cost = miss_cost(self._sizes, each[where, 0], each[where, 1])
        return density(np.where(self._absent, 0, worth), cost / cost.max(), np.maximum(self._sizes, 1))
