"""Movement plans: which experts to bring up a tier ahead of need, densest first.

Source: [Two-Tier, 1] and [Two-Tier, 4.3]: near horizon RAM -> VRAM, medium horizon NVMe -> RAM. A move is planned only
for what is worth more than the price of its tier and than what it would replace, and only as many bytes as the link can
carry while nobody demands anything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgemoe.policy.watermark import Watermark
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertId, Move, Tier

LEDGER_DECAY = 0.99  # per outcome
TRIAL, GOOD_SHARE = 20.0, 0.55  # outcomes before requests are carried out, and the share of good ones that it takes
WATCHED = 64  # requests at once
NOBODY = -2  # in place of a step: nothing is watched


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


class Ledger:
    """Judges prefetch requests: which is needed first, the requested expert or the one that it would replace?

    Not in the source. Both are watched, whether the request is carried out or not, so that holding back can end.
    """

    def __init__(self) -> None:
        self.outcomes, self.good = 0.0, 0.0  # decayed
        self._requested: IntArray = np.zeros(WATCHED, np.int64)  # layer * E + expert
        self._rival: IntArray = np.zeros(WATCHED, np.int64)
        self._since: IntArray = np.full((2, WATCHED), NOBODY, np.int64)  # of both, the step after which needs count
        self._next = 0

    @property
    def share(self) -> float:
        """Of good ones."""
        return self.good / self.outcomes if self.outcomes else 0.0

    @property
    def trusted(self) -> bool:
        """Returns whether requests should be carried out."""
        return self.outcomes >= TRIAL and self.share >= GOOD_SHARE

    def watch(self, prefetch_request: int, rival: int, since: IntArray | int) -> None:
        """Needs of the two count from the step after `since` on, [2] or of both; not again while it is watched."""
        if ((self._requested == prefetch_request) & (self._since[0] > NOBODY)).any():
            return
        at, self._next = self._next, (self._next + 1) % WATCHED
        self._requested[at], self._rival[at], self._since[:, at] = prefetch_request, rival, since

    def settle(self, last: IntArray) -> None:
        """Counts what has been decided by each expert's latest need [L * E], in steps."""
        live = np.flatnonzero(self._since[0] > NOBODY)
        prefetch_request, rival = last[self._requested[live]], last[self._rival[live]]
        came, lost = prefetch_request > self._since[0, live], rival > self._since[1, live]
        decided = came | lost
        for good in np.where(came & lost, 0.5, came)[decided].tolist():  # both in one step: nothing was gained
            self.outcomes = LEDGER_DECAY * self.outcomes + 1
            self.good = LEDGER_DECAY * self.good + good
        self._since[:, live[decided]] = NOBODY
