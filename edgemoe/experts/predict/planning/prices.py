"""What a byte of each tier costs, and the moves between tiers that are worth it [Two-Tier, 4.3]."""

from __future__ import annotations

import numpy as np

from edgemoe.experts.tiers.residency import Residency
from edgemoe.policy.movement import Side, plan
from edgemoe.policy.watermark import Watermark, density, floor
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, Move, Tier

MOST_MOVES = 12  # in one plan: a few times a step another one is made


class Prices:
    """Owns the watermarks of VRAM and RAM. A miss of an expert costs in proportion to its size; the largest costs 1."""

    def __init__(self, residency: Residency, geometry: ExpertGeometry, hysteresis: float) -> None:
        self._residency, self._geometry, self._absent = residency, geometry, ~geometry.exists
        self._sizes: IntArray = np.where(self._absent, 0, geometry.strides_bytes[:, None])
        self._cost: FloatArray = (self._sizes / geometry.largest_bytes).astype(np.float32)  # of a miss
        self._budget_bytes = float(MOST_MOVES * geometry.largest_bytes)
        room = {tier: max(1, residency.usage(tier).size_bytes) for tier in (Tier.VRAM, Tier.RAM)}
        self._marks = {tier: Watermark(n, hysteresis=hysteresis) for tier, n in room.items()}

    def moves(self, near: FloatArray, later: FloatArray) -> list[Move]:
        """Moves the prices a step, and returns the moves of a plan, whose scores are densities.

        `near` [L, E] is what experts are worth to VRAM, or to RAM where there is none; `later` to RAM beside VRAM.
        """
        beside = self._residency.fastest is Tier.VRAM
        ram = self._side(Tier.RAM, later if beside else near)
        vram = self._side(Tier.VRAM, near) if beside else ram._replace(idle_bytes=0.0)
        return plan(vram, ram, self._sizes)

    def lowest_worth(self, tier: Tier) -> float:
        """Returns the worth below which an expert may be dropped from a tier."""
        mark = self._marks[tier]
        return (1 - mark.hysteresis) * mark.price * self._geometry.largest_bytes

    def pinned(self, worth: FloatArray, working_set_bytes: int) -> BoolArray:
        """Returns what stays in the fastest tier where that does not hold `working_set_bytes`; else nothing. [L, E]."""
        capacity_bytes = self._residency.usage(self._residency.fastest).size_bytes
        return floor(self._density(worth), self._sizes, capacity_bytes, working_set_bytes) & ~self._absent

    def _side(self, tier: Tier, worth: FloatArray) -> Side:
        b, mark = self._density(worth), self._marks[tier]
        mark.update(b, self._sizes)
        settled = self._residency.resident_mask(tier) | self._absent  # what does not exist is not to be had
        return Side(b, settled, mark, self._budget_bytes)

    def _density(self, worth: FloatArray) -> FloatArray:
        return density(np.where(self._absent, 0, worth), self._cost, np.maximum(self._sizes, 1))
