"""Estimates how long links and the disk stay idle, by which a prefetch is begun or held back.

A link is idle from when a layer has all its experts until the next layer demands its own. Whether a prefetch is begun
follows from it, by the rule **never worse than without**:

* Which expert goes for it is judged by utility, where the slot is granted: only one that is worth less.
* On its way it delays the demands of a layer by one piece of P seconds at most, for they overtake it between pieces.
* Begun R seconds before the next demand, it has saved R when its own expert is demanded then, with probability q,
  and delays nobody: it goes on as a demand. Else it has cost P at most; what has arrived counts later, or is given up.

So it pays where q R >= (1 - q) P. R is the layer's mean; what a single layer can lose beyond it is still one piece.

A disk reads an expert whole, and is idle while links and layers are not. A demanded read that comes while an expert is
read ahead waits for the rest of it. Where none is under way they come at random, every M seconds on average, so that a
read of T seconds costs T - M (1 - exp(-T / M)) on average, unless its own expert is demanded.
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

    def __init__(self, layers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s = [0.0] * layers
        self._open: tuple[int, float] = NOTHING, 0.0  # the layer that computes, and since when

    @property
    def layer(self) -> int:
        """Returns the layer that has all its experts and computes; a negative number where none does."""
        return self._open[0]

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

    @property
    def means_s(self) -> list[float]:
        """Returns the mean idle time after each layer, [L]; 0 before the first."""
        return self._mean_s.copy()

    def pays(self, chance: float, piece_s: float) -> bool:
        """Returns whether a prefetch pays that is demanded with probability `chance`, and has pieces of `piece_s`."""
        left_s = self.left_s()
        return left_s == math.inf or chance * left_s >= (1 - chance) * piece_s


class ReadGap:
    """Estimates the time between demanded reads. The reader's loop and the compute thread tell; any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s = 0.0
        self._since_s = math.nan  # when the last demanded read ended; NaN before the first, and while one is under way

    def demand(self) -> None:
        """Ends the idle time: a read is demanded."""
        since_s, self._since_s = self._since_s, math.nan
        if since_s == since_s:
            seconds, mean = self._clock() - since_s, self._mean_s
            self._mean_s += RATE * (min(seconds, MOST * mean) - mean) if mean else seconds

    def begin(self) -> None:
        """Starts the idle time: the last demanded read has ended."""
        self._since_s = self._clock()

    def delay_s(self, read_s: float) -> float:
        """Returns how long a read ahead of `read_s` delays demanded ones on average; 0 before any is known."""
        mean = self._mean_s
        return read_s + mean * math.expm1(-read_s / mean) if mean else 0.0
