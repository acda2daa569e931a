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
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotTransfer
from edgemoe.experts.transfer.links import TierLink
from edgemoe.types.experts import ExpertId, Move

RATE = 0.1  # of the means, per visit of a layer
MOST = 4.0  # a visit counts as at most this multiple of the mean
AWAY = 8.0  # after this multiple of the mean, decoding counts as stopped
NOTHING, WAITING = -1, -2  # in place of a layer: none has run yet; a demand is being served


class IdleWindow:
    """Estimates the links' idle time after each layer. The compute thread measures; any thread may ask."""

    def __init__(self, layers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s = [0.0] * layers
        self._open: tuple[int, float] = NOTHING, 0.0  # the layer that computes, and since when

    @property
    def layer(self) -> int:
        """The layer that has all its experts and computes; negative if there is none."""
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

    def pays(self, chance: float, piece_s: float) -> bool:
        """Whether a prefetch pays that is demanded with probability `chance` and moves in pieces of `piece_s`."""
        left_s = self.left_s()
        return left_s == math.inf or chance * left_s >= (1 - chance) * piece_s


class ReadGap:
    """Estimates the time between demanded reads. The loop and the compute thread measure; any thread may ask."""

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
        """Returns the mean delay of demanded reads by a read ahead of `read_s`; 0 before the first measurement."""
        mean = self._mean_s
        return read_s + mean * math.expm1(-read_s / mean) if mean else 0.0


PRIORITIES = tuple(PrefetchPriority)  # iterating over an enumeration is slow


class LinkPrefetcher:
    """Holds one link's prefetch requests, and begins one if the link is idle and it pays. Thread-safe.

    At most one prefetch for the next layers is under way, and overtakes at most one other. While no layer runs, as many
    are under way as keep the link busy. So are a prefill's for its next layer, which needs nearly all experts.
    """

    def __init__(self, link: TierLink, device: int, residency: Residency, gap: IdleWindow) -> None:
        self._link, self._device, self._residency, self._gap = link, device, residency, gap
        self._lock = threading.Lock()  # of all that follows
        self._queues: tuple[deque[Move], ...] = tuple(deque() for _ in PrefetchPriority)
        self._near: SlotTransfer | None = None
        self._others: dict[SlotTransfer, PrefetchPriority] = {}
        self._to_withdraw: list[SlotTransfer] = []  # prefetches to withdraw

    def __len__(self) -> int:
        """Counts the requests that have not started."""
        return sum(map(len, self._queues))

    def append(self, move: Move, priority: PrefetchPriority) -> None:
        """Adds a request behind the others of its priority."""
        with self._lock:
            self._queues[priority].append(move)

    def replace(self, moves: Iterable[Move], priority: PrefetchPriority) -> None:
        """Replaces the requests of one priority."""
        with self._lock:
            queue = self._queues[priority]
            queue.clear()
            queue.extend(moves)

    def start(self) -> None:
        """Begins the request that is worth its time now. Cancels prefetches for a layer that already runs."""
        if self._near is None and not self._others and not any(self._queues):
            return
        with self._lock:
            layer = self._gap.layer
            useless = [load for load in self._for_one_layer() if load.layer == layer and not load.demand]
            pays = self._first() is not None
        for load in useless:
            self._give_up(load)
        if pays and self._link.at_once:
            self._begin()
        elif pays:
            self._link.wake()

    def replan(self, planned: Container[ExpertId]) -> None:
        """Gives up prefetches of an earlier plan of the controller that are not in the new one."""
        with self._lock:
            far = [load for load, priority in self._others.items() if priority is PrefetchPriority.FAR]
        for load in far:
            if not load.demand and ExpertId(load.layer, load.expert) not in planned:
                self._give_up(load)

    def on_ended(self, load: SlotTransfer) -> None:
        """Forgets a copy that has ended or is given up."""
        with self._lock:
            if self._near is load:
                self._near = None
            else:
                self._others.pop(load, None)

    def on_woken(self) -> None:
        """Withdraws prefetches that were given up, unless demanded by now, and begins the next.

        On the link's thread.
        """
        while self._to_withdraw:
            self._link.withdraw(self._to_withdraw.pop())
        self._begin()

    def _give_up(self, load: SlotTransfer) -> None:
        self.on_ended(load)
        self._to_withdraw.append(load)
        self._link.wake()

    def _begin(self) -> None:
        while (load := self._next()) is not None:
            self._link.copy(load)  # without the lock: other copies may end at once

    def _next(self) -> SlotTransfer | None:
        with self._lock:
            while (priority := self._first()) is not None:
                load = self._residency.reserve(self._queues[priority].popleft(), priority, self._device)
                if load is None:
                    continue
                if priority is PrefetchPriority.NEAR:
                    self._near = load
                else:
                    self._others[load] = priority
                return load
        return None

    def _for_one_layer(self) -> list[SlotTransfer]:
        """Returns the prefetches under way that are useless once their layer has run."""
        near = [] if self._near is None else [self._near]
        return near + [load for load, priority in self._others.items() if priority.for_one_layer]

    def _first(self) -> PrefetchPriority | None:
        """Returns the first priority with a first request that pays now, if the link is free for it."""
        if self._near is not None:
            return None
        nothing_runs = self._gap.left_s() == math.inf
        for priority, queue in zip(PRIORITIES, self._queues, strict=True):
            if queue and self._is_free(priority, nothing_runs) and self._gap.pays(queue[0].chance, self._link.piece_s):
                return priority
        return None

    def _is_free(self, priority: PrefetchPriority, nothing_runs: bool) -> bool:
        """Whether the link is free for another prefetch of this priority."""
        if priority is PrefetchPriority.NEAR and self._others:
            return True
        if priority is PrefetchPriority.PREFILL_ONLY:
            return self._link.has_room() or (bool(self._others) and priority not in self._others.values())
        return self._link.has_room() if nothing_runs else self._link.idle()
