"""Estimates how long links stay idle: from when a layer has all its experts until the next layer demands its own.

A transfer that cannot finish in that time delays a demand. It still pays if its expert is likely enough to be demanded.
Of its C seconds, R are hidden, and C - R delay others if the expert is not needed. If it is needed with probability q,
the transfer saves q C and costs C - R, so that it pays from q = 1 - R / C on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

RATE = 0.1  # of the means, per visit of a layer
MOST = 4.0  # a visit counts as at most so many times the mean
AWAY = 8.0  # after so many times the mean, decoding counts as stopped
NOTHING, WAITING = -1, -2  # instead of a layer: nothing has run yet; a demand is being served


class IdleWindow:
    """Estimates the idle time of each layer. The compute thread measures; any thread may ask."""

    def __init__(self, layers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mean_s = [0.0] * layers
        self._open: tuple[int, float] = NOTHING, 0.0  # the layer that computes, and since when

    def demand(self, layer: int) -> None:
        """Ends the idle time: a layer demands its experts."""
        before, since_s = self._open
        self._open = WAITING, 0.0
        if before >= 0 and before == (layer - 1) % len(self._mean_s):
            seconds, mean = self._clock() - since_s, self._mean_s[before]
            self._mean_s[before] += RATE * (min(seconds, MOST * mean) - mean) if mean else seconds

    def begin(self, layer: int) -> None:
        """Starts the idle time: the layer has all experts that it demanded."""
        self._open = layer, self._clock()

    def left_s(self) -> float:
        """Returns the expected seconds until the next demand; 0 while one is being served, inf while nothing runs."""
        layer, since_s = self._open
        if layer < 0:
            return 0.0 if layer == WAITING else math.inf
        past, mean = self._clock() - since_s, self._mean_s[layer]
        return max(0.0, mean - past) if past <= AWAY * mean else math.inf

    def pays(self, chance: float, seconds: float) -> bool:
        """Returns whether a transfer of `seconds` pays, whose expert is needed with probability `chance`."""
        return seconds <= 0 or chance >= 1 - self.left_s() / seconds
