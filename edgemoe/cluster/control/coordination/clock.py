"""The clock of leases and of what is heard from others: it goes on while the box sleeps."""

from __future__ import annotations

import time


def since_boot() -> float:
    """Returns seconds since boot, suspend included: a leader that wakes finds its lease lapsed."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
