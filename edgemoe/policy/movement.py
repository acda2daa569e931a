"""Movement plans: which experts to bring up a tier ahead of need, densest first.

Source: [Two-Tier, 1] and [Two-Tier, 4.3]: near horizon RAM -> VRAM, medium horizon NVMe -> RAM. A move is planned only
for what is worth more than the price of its tier and than what it would replace, and only as many bytes as the link can
carry while nobody demands anything.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from edgemoe.policy.fusion import Calibration
from edgemoe.policy.watermark import Watermark
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertId, Move, Tier

WATCHED = 16  # experts that a tier lacks, and as many that it has, whose needs each plan is judged by
TRIAL = 12  # plans that have been judged before moves are carried out
LOW, HIGH, BINS = -6.0, 6.0, 25  # of log odds
RECENT = 0.02  # of `right`, per plan


class Side(NamedTuple):
    """One tier as a plan sees it; arrays are [L, E]."""

    b: FloatArray  # density at this tier's horizon
    resident: BoolArray
    watermark: Watermark
    idle_bytes: float  # what its link can carry before the next demand, or at this plan's rate


def plan(vram: Side, ram: Side, sizes: IntArray) -> list[Move]:
    """Promotions RAM -> VRAM, then stagings NVMe -> RAM, each densest first."""
    promote = vram.watermark.verdict(vram.b, vram.resident).admit & ram.resident
    stage = ram.watermark.verdict(ram.b, ram.resident).admit & ~vram.resident
    near = _densest(promote, vram, sizes, Tier.RAM, Tier.VRAM)
    return near + _densest(stage, ram, sizes, Tier.NVME, Tier.RAM)


def _densest(wanted: BoolArray, side: Side, sizes: IntArray, source: Tier, target: Tier) -> list[Move]:
    keys = np.flatnonzero(wanted)
    if not len(keys):
        return []
    utility = side.b.ravel()[keys]
    keys = keys[np.argsort(-utility, kind="stable")]
    keys = keys[np.cumsum(sizes.ravel()[keys]) <= side.idle_bytes]
    experts = side.b.shape[1]
    return [Move(ExpertId(*divmod(key, experts)), source, target, float(side.b.ravel()[key])) for key in keys.tolist()]


class Watched(NamedTuple):
    """What a plan went by, until it is known what was needed: some experts [n], the first `lacking` of them missing."""

    step: int
    keys: IntArray  # layer * E + expert
    odds: FloatArray  # log odds
    since: IntArray  # steps; later needs count
    lacking: int
    wished: BoolArray  # [lacking] whether they were to be moved


class NeedRecord:
    """Learns how likely an expert is needed within the window, by its log odds.

    Not in the source. Apart for those that a tier lacks and those that it has: what ranks highest of the one and lowest
    of the other is seldom as good or as bad as its rank says. Watches whether or not anything is moved, so that holding
    back can end.
    """

    def __init__(self, window: int) -> None:
        """Counts needs within so many steps."""
        self._window = window
        self.judged = 0  # plans
        self.right = 0.0  # share of the wishes that were needed, lately
        self._missing, self._there = Calibration(LOW, HIGH, BINS), Calibration(LOW, HIGH, BINS)
        self._watched: deque[Watched] = deque()

    @property
    def tried(self) -> bool:
        """Returns whether chances are known from what came."""
        return self.judged >= TRIAL

    def chance(self, odds: FloatArray) -> FloatArray:
        """P(needed within the window) of experts that the tier lacks."""
        return self._missing(odds)

    def chance_there(self, odds: FloatArray) -> FloatArray:
        """The same of experts that the tier has."""
        return self._there(odds)

    def watch(self, plan: Watched) -> None:
        """Waits for what comes of a plan."""
        self._watched.append(plan)

    def settle(self, step: int, last: IntArray) -> None:
        """Learns from plans whose window has passed; `last` [L * E] is the step of each expert's latest need."""
        while self._watched and self._watched[0].step + self._window < step:
            plan = self._watched.popleft()
            if plan.step + self._window + 1 < step:  # no plan was made for a while: needs after the window would count
                continue
            came, n = last[plan.keys] > plan.since, plan.lacking
            self._missing.learn(plan.odds[:n], came[:n])
            self._there.learn(plan.odds[n:], came[n:])
            self.judged += 1
            if plan.wished.any():
                self.right += RECENT * (float(came[:n][plan.wished].mean()) - self.right)
