"""Decides whether a box lends nearly all of its memory to the cluster's plan, or keeps it for its own requests.

Home experts stay in memory, though this box's requests may choose others. Alone, its whole memory would follow them. So
the steps of a box alone are estimated beside the steps that are measured:

    alone = step - layer-steps that lacked experts + computing these + misses of an LRU cache * read               (1)

A box that few others ask tries to keep its memory in any case, and goes on with the better of both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from edgemoe.types.arrays import BoolArray, IntArray

KEPT_SHARE = 1 / 16  # of the room for home experts that a box offers while it keeps its memory
BETTER = 0.95  # of the ratio while lending, that keeping has to reach
FEW_ASK = 0.1  # experts computed for others over experts that others computed, up to which lending serves nobody else
WORSE = 1.05  # measured over estimated time from which a box keeps its memory: (1) is that exact
HALF_S = 30.0  # of steps, in which earlier ones lose half their weight
LEAST_S = 10.0  # of steps before a decision
SETTLE_S = 30.0  # after a decision, until the memory has other experts
AGAIN_S, MOST_AGAIN_S = 3600.0, 8 * 3600.0  # until lending is tried again; doubled each time that it was no better


class LeastRecentCache:
    """Simulates an LRU cache that has room for `slots` experts [L, E], and for all of one step."""

    def __init__(self, shape: tuple[int, int], slots: int) -> None:
        self._slots, self._step = slots, 0
        self._here: BoolArray = np.zeros(shape[0] * shape[1], np.bool_)
        self._used: IntArray = np.zeros(len(self._here), np.int64)  # the step of the latest use

    def count_misses(self, needed: IntArray) -> int:
        """Adds a step that needs these experts, as distinct numbers layer * E + expert. Counts the missing ones."""
        misses = len(needed) - int(np.count_nonzero(self._here[needed]))
        self._step += 1
        self._here[needed], self._used[needed] = True, self._step
        held = np.flatnonzero(self._here) if misses else needed
        if (excess := len(held) - max(self._slots, len(needed))) > 0:
            self._here[held[np.argpartition(self._used[held], excess - 1)[:excess]]] = False
        return misses


class LendingChoice:
    """Compares the measured times of steps with those expected alone. One thread writes; others may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lends = True
        self._clock = clock
        self._changed_s = -math.inf
        self._again_s = AGAIN_S
        self._lending_ratio = math.inf  # as lending ended
        self._keep_s = -math.inf  # from when keeping may be tried
        self._taken_s = self._alone_s = self._seen_s = 0.0
        self._given = self._got = 0.0  # experts computed for others, and by others

    @property
    def share(self) -> float:
        """Returns the share of the room for home experts to offer."""
        return 1.0 if self.lends else KEPT_SHARE

    @property
    def ratio(self) -> float:
        """Returns the recent steps' time over that of this box alone; 1 if it is not known yet."""
        return self._taken_s / self._alone_s if self._seen_s >= LEAST_S and self._alone_s else 1.0

    def observe(self, taken_s: float, alone_s: float, given: int = 0, got: int = 0) -> bool:
        """Adds a step and (1) of it, with experts computed for others and by others since the last one.

        Returns whether the decision has changed.
        """
        now_s = self._clock()
        if now_s - self._changed_s < SETTLE_S:
            return False
        fade = 0.5 ** (taken_s / HALF_S)
        self._taken_s, self._alone_s = fade * self._taken_s + taken_s, fade * self._alone_s + alone_s
        self._given, self._got = fade * self._given + given, fade * self._got + got
        self._seen_s += taken_s
        if self._seen_s < LEAST_S:
            return False
        if self.lends:
            lent_to_nobody = self._got > 0 and self._given <= FEW_ASK * self._got
            if now_s < self._keep_s or not (self.ratio > WORSE or lent_to_nobody):
                return False
            self._lending_ratio = self.ratio
        else:
            better = self.ratio < BETTER * self._lending_ratio
            if better and now_s - self._changed_s < self._again_s:
                return False
            self._keep_s = now_s + (0.0 if better else self._again_s)
            self._again_s = min(MOST_AGAIN_S, 2 * self._again_s)
        self.lends, self._changed_s = not self.lends, now_s
        self._taken_s = self._alone_s = self._seen_s = self._given = self._got = 0.0
        return True
