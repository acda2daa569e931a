"""Why an expert is wished for: which wishes go first, and what they may take the place of."""

from __future__ import annotations

import enum

from edgemoe.experts.tiers.eviction import ALWAYS
from edgemoe.experts.tiers.slots import TRANSIENT, UNUSED

SCAN_WORTH = -1e29  # prefetched for a scan: takes the place of a scan's leavings only


class PrefetchPriority(enum.IntEnum):
    """Why a move is wished for. Wishes of a lower horizon go first."""

    NEAR = 0  # the layers that come next
    SCAN = 1  # the next layer of a prefill
    HOME = 2  # what the boxes agreed to keep here
    USED = 3  # what the CPU has just computed in a device's stead
    FAR = 4  # everything later: the controller's
    FILL = 5  # anything, into slots that are free

    @property
    def flags(self) -> int:
        """Flags of the slot that the expert is moved to."""
        return (UNUSED, UNUSED | TRANSIENT, 0, 0, UNUSED, TRANSIENT)[self]

    def utility(self, score: float) -> float:
        """What a move may take the place of: that which ranks lower."""
        return (score, SCAN_WORTH, ALWAYS, ALWAYS, score, -ALWAYS)[self]
