"""Slows down who asks without a key: by address, as there is no other name for them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

PER_S, AT_ONCE = 50.0, 200.0  # requests of one address without a key
REFUSED = 5.0  # requests that one with a wrong key counts as
LONGEST_S = 5.0
MOST_ADDRESSES = 4096  # remembered; the one that asked longest ago is forgotten


class Slowdown:
    """Counts requests by address. One for an application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests that are left, and when it was

    def delay_s(self, address: str, cost: float = 1.0) -> float:
        """Counts one request of an address. Returns how long its answer has to wait."""
        now = self._clock()
        left, seen = self._left.pop(address, (AT_ONCE, now))
        left = min(AT_ONCE, left + PER_S * (now - seen)) - cost
        self._left[address] = max(left, -LONGEST_S * PER_S), now
        if len(self._left) > MOST_ADDRESSES:
            self._left.popitem(last=False)
        return min(LONGEST_S, max(0.0, -left / PER_S))
