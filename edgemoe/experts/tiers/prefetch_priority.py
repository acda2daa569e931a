"""Priorities of prefetch requests: which are served first, and what they may replace."""

from __future__ import annotations

import enum

from edgemoe.experts.tiers.eviction import ALWAYS
from edgemoe.experts.tiers.records import TRANSIENT, UNUSED

PREFILL_ONLY_UTILITY = -1e29  # prefetched for prefill only: replaces prefill-only experts only


class PrefetchPriority(enum.IntEnum):
    """The reason of a prefetch request. Lower numbers are served first."""

    NEAR = 0  # the layers that come next
    PREFILL_ONLY = 1  # the next layer of a prefill
    HOME = 2  # what the boxes agreed to keep here
    USED = 3  # what the CPU has just computed in a device's stead
    FAR = 4  # everything later: the controller's
    FILL = 5  # anything, into slots that are free

    @property
    def for_one_layer(self) -> bool:
        """Returns whether such a prefetch is in vain once its layer has run without it."""
        return self in (PrefetchPriority.NEAR, PrefetchPriority.PREFILL_ONLY)

    @property
    def flags(self) -> int:
        """Returns the flags of the slot that the expert is loaded into."""
        return (UNUSED, UNUSED | TRANSIENT, 0, 0, UNUSED, TRANSIENT)[self]

    def utility(self, score: float) -> float:
        """Returns the utility of a request with `score`, which replaces experts of lower rank."""
        return (score, PREFILL_ONLY_UTILITY, ALWAYS, ALWAYS, score, -ALWAYS)[self]
