"""Decides when a link prefetches: estimates idle windows, and starts the requests that pay within them.

The rule and its derivation: docs/design/prefetch.md.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable

from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority, Transfer
from edgemoe.experts.transfer.links import TierLink
from edgemoe.types.experts import ExpertId, Move

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


# What one link copies ahead of need: the requests that wait, and what is under way until it turns out in vain.

PRIORITIES = tuple(PrefetchPriority)  # to go through an enumeration takes a while


class LinkPrefetcher:
    """Begins a request where the link is idle and the window says that it pays. Thread-safe.

    One prefetch for the next layers is under way at most, which overtakes one other at most. While nothing runs, which
    a prefetch could delay, as many are under way as keep the link busy.
    """

    def __init__(self, link: TierLink, device: int, residency: Residency, gap: IdleWindow) -> None:
        self._link, self._device, self._residency, self._gap = link, device, residency, gap
        self._lock = threading.Lock()  # of all that follows
        self._queues: tuple[deque[Move], ...] = tuple(deque() for _ in PrefetchPriority)
        self._near: Transfer | None = None
        self._others: dict[Transfer, PrefetchPriority] = {}
        self._in_vain: list[Transfer] = []  # to be withdrawn

    def __len__(self) -> int:
        """Counts the requests that have not started."""
        return sum(map(len, self._queues))

    def append(self, move: Move, priority: PrefetchPriority) -> None:
        """Takes another request, to be served after those of its priority."""
        with self._lock:
            self._queues[priority].append(move)

    def replace(self, moves: Iterable[Move], priority: PrefetchPriority) -> None:
        """Replaces the requests of one priority."""
        with self._lock:
            queue = self._queues[priority]
            queue.clear()
            queue.extend(moves)

    def start(self) -> None:
        """Begins what pays now, and gives up what was for a layer that runs without it."""
        if self._near is None and not any(self._queues):
            return
        with self._lock:
            in_vain = self._near
            if in_vain is not None and (in_vain.layer != self._gap.layer or in_vain.demand):
                in_vain = None
            pays = self._first() is not None
        if in_vain is not None:
            self._give_up(in_vain)
        if pays and self._link.at_once:
            self._begin()
        elif pays:
            self._link.wake()

    def replan(self, planned: Container[ExpertId]) -> None:
        """Gives up what an earlier plan of the controller's began, where it is no part of the new one."""
        with self._lock:
            far = [load for load, priority in self._others.items() if priority is PrefetchPriority.FAR]
        for load in far:
            if not load.demand and ExpertId(load.layer, load.expert) not in planned:
                self._give_up(load)

    def end(self, load: Transfer) -> None:
        """Takes note of a copy that has ended, or is given up."""
        with self._lock:
            if self._near is load:
                self._near = None
            else:
                self._others.pop(load, None)

    def on_woken(self) -> None:
        """Ends what was given up, unless it is demanded by now, and begins what pays. On the link's thread."""
        while self._in_vain:
            self._link.withdraw(self._in_vain.pop())
        self._begin()

    def _give_up(self, load: Transfer) -> None:
        self.end(load)
        self._in_vain.append(load)
        self._link.wake()

    def _begin(self) -> None:
        while (load := self._next()) is not None:
            self._link.copy(load)  # without the lock: it may hear at once of others that have ended

    def _next(self) -> Transfer | None:
        with self._lock:
            while (priority := self._first()) is not None:
                load = self._residency.reserve(self._queues[priority].popleft(), priority, self._device)
                if load is None:
                    continue
                if priority.for_one_layer:
                    self._near = load
                else:
                    self._others[load] = priority
                return load
        return None

    def _first(self) -> PrefetchPriority | None:
        """Returns the first priority whose first request pays now, and can begin.

        It can where the link is idle, or moves one that can wait.
        """
        if self._near is not None:
            return None
        nothing_runs = self._gap.left_s() == math.inf
        for priority, queue in zip(PRIORITIES, self._queues, strict=True):
            if queue:
                free = self._link.has_room() if nothing_runs else self._link.idle()
                if (free or (priority.for_one_layer and self._others)) and self._gap.pays(
                    queue[0].chance, self._link.piece_s
                ):
                    return priority
        return None
