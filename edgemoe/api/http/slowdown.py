"""Slows down who asks without a key: by address, as there is no other name for them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

PER_S, AT_ONCE = 50.0, 200.0  # requests of one address without a key
ALL_PER_S, ALL_AT_ONCE = 200.0, 400.0  # of all addresses together
REFUSED = 5.0  # requests that one with a wrong key counts as
LONGEST_S = 5.0
MOST_ADDRESSES = 4096  # remembered; the one that asked longest ago is forgotten


class _Bucket:
    """Counts down from `most` requests, which come back at `per_s`."""

    __slots__ = ("_left", "_most", "_per_s", "_seen_s")

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s, self._most, self._left, self._seen_s = per_s, most, most, float("inf")

    def take(self, cost: float, now_s: float) -> float:
        """Takes `cost` requests. Returns the seconds until they are there."""
        self._left = min(self._most, self._left + self._per_s * max(0.0, now_s - self._seen_s)) - cost
        self._left, self._seen_s = max(self._left, -LONGEST_S * self._per_s), now_s
        return max(0.0, -self._left / self._per_s)


class Slowdown:
    """Counts requests by address. One for an application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all = _Bucket(ALL_PER_S, ALL_AT_ONCE)
        self._left: OrderedDict[str, _Bucket] = OrderedDict()

    def delay_s(self, address: str, cost: float = 1.0) -> float:
        """Counts one request of an address. Returns how long its answer has to wait."""
        own = self._left.pop(address, None) or _Bucket(PER_S, AT_ONCE)
        self._left[address] = own
        if len(self._left) > MOST_ADDRESSES:
            self._left.popitem(last=False)
        now = self._clock()
        return max(own.take(cost, now), self._all.take(cost, now))
