"""Which way each needed expert of a layer is computed, so that the layer is finished soonest.

Design page, section 5: the layer waits for its slowest channel, so what is made small is the largest channel's time,
not the sum of all (which would leave channels idle). A channel is anything that works by itself: a GPU, the PCIe
link, the CPU, the disk, each peer. Results never depend on the way that was taken.

    finish = max( max_c opening_c [c is used] + sum of what the chosen ways load c with,  max_i time way i takes alone )

Unrelated machines with opening costs are NP-hard; the assignment here is built greedily, longest first, and then
improved by single moves, swaps and the closing of channels until none helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ways:
    """What each way costs. n experts, w ways, c channels; times in seconds.

    `load` [n, w, c]: how long expert i, done way j, keeps channel c busy; inf where that way is not to be had.
    `alone` [n, w]: how long it takes from now if nothing else is done.
    `opening` [c]: paid once by a layer that uses the channel at all: a launch, a round trip.
    """

    load: Costs
    alone: Costs
    opening: Costs


@dataclass(frozen=True, slots=True)
class Resolution:
    """`way` [n] chosen for each expert, and when the layer will be finished."""

    way: npt.NDArray[np.int64]
    finish_s: float


def finish_s(ways: Ways, way: npt.NDArray[np.int64]) -> float:
    """When the layer is finished if expert i is done way `way[i]`; inf where one cannot be."""
    rows = np.arange(len(way))
    load = ways.load[rows, way]  # [n, c]
    busy = load.sum(axis=0) + np.where((load > 0).any(axis=0), ways.opening, 0.0)
    return float(max(busy.max(initial=0.0), ways.alone[rows, way].max(initial=0.0)))


def resolve(ways: Ways) -> Resolution:
    """The best assignment found. Raises ValueError, naming the expert's row, where an expert has no way at all."""
    possible = np.isfinite(ways.alone) & np.isfinite(ways.load).all(axis=2)
    if not possible.any(axis=1).all():
        raise ValueError(f"no way to compute the expert in row {int(np.argmin(possible.any(axis=1)))}")
    order = [int(i) for i in np.argsort(-np.where(possible, ways.alone, np.inf).min(axis=1))]
    best = _assigned(ways, possible, order)
    closing = True
    while closing:  # a channel's opening is saved only if everything leaves it at once
        closing = False
        for channel in best.channels_used():
            allowed = best.possible & ~(ways.load[:, :, channel] > 0)
            if allowed.any(axis=1).all() and (without := _assigned(ways, allowed, order)).finish() < best.finish():
                best, closing = without, True
                break
    return Resolution(best.way, best.finish())


def _assigned(ways: Ways, possible: npt.NDArray[np.bool_], order: Sequence[int]) -> _State:
    state = _State(ways, possible)
    for i in order:
        state.place(i)
    state.improve()
    return state


class _State:
    """An assignment under way, with each channel's time kept up to date."""

    def __init__(self, ways: Ways, possible: npt.NDArray[np.bool_]) -> None:
        self.ways, self.possible = ways, possible
        self.way = np.full(len(ways.alone), -1, np.int64)
        self.busy = np.zeros(len(ways.opening))
        self.users = np.zeros(len(ways.opening), np.int64)

    def finish(self) -> float:
        placed = np.flatnonzero(self.way >= 0)
        alone = self.ways.alone[placed, self.way[placed]].max(initial=0.0)
        return float(max(alone, self._times(self.busy, self.users).max(initial=0.0)))

    def channels_used(self) -> list[int]:
        return [int(c) for c in np.flatnonzero(self.users > 0)]

    def place(self, i: int) -> None:
        """Gives expert i the way that finishes soonest; of equals, the one that takes least of all channels."""
        after = self._if_placed(i)
        self._put(i, int(np.lexsort((self.ways.load[i].sum(axis=1), after))[0]))

    def improve(self) -> None:
        """Moves single experts, then swaps pairs, while the layer gets finished sooner."""
        while self._move_one() or self._swap_two():
            pass

    def _move_one(self) -> bool:
        before = self.finish()
        for i in self._critical():
            old = int(self.way[i])
            self._lift(i)
            self.place(i)
            if self.finish() < before * (1 - 1e-9):
                return True
            self._lift(i)
            self._put(i, old)
        return False

    def _swap_two(self) -> bool:
        """Lifts two experts, one of them critical, and places them anew in either order."""
        before = self.finish()
        critical = set(self._critical())
        for i, j in combinations(range(len(self.way)), 2):
            if i not in critical and j not in critical:
                continue
            old = int(self.way[i]), int(self.way[j])
            for first, second in ((i, j), (j, i)):
                self._lift(i)
                self._lift(j)
                for way in np.flatnonzero(self.possible[first]):
                    self._put(first, int(way))
                    self.place(second)
                    if self.finish() < before * (1 - 1e-9):
                        return True
                    self._lift(second)
                    self._lift(first)
                self._put(i, old[0])
                self._put(j, old[1])
        return False

    def _critical(self) -> list[int]:
        """Experts on the channel that is finished last, or that take that long alone."""
        times = self._times(self.busy, self.users)
        latest = self.finish() * (1 - 1e-12)
        rows = np.arange(len(self.way))
        on_latest = (self.ways.load[rows, self.way] > 0) & (times >= latest)
        return [int(i) for i in np.flatnonzero(on_latest.any(axis=1) | (self.ways.alone[rows, self.way] >= latest))]

    def _if_placed(self, i: int) -> npt.NDArray[np.float64]:
        """Finish time for each way of expert i, [w]."""
        load = np.where(self.possible[i][:, None], self.ways.load[i], 0.0)
        times = self._times(self.busy + load, self.users + (load > 0)).max(axis=1, initial=0.0)
        return np.where(self.possible[i], np.maximum(times, self.ways.alone[i]), np.inf)

    def _times(self, busy: Costs, users: npt.NDArray[np.int64]) -> Costs:
        return np.where(users > 0, busy + self.ways.opening, 0.0)

    def _put(self, i: int, way: int) -> None:
        load = self.ways.load[i, way]
        self.way[i] = way
        self.busy += load
        self.users += load > 0

    def _lift(self, i: int) -> None:
        load = self.ways.load[i, self.way[i]]
        self.busy -= load
        self.users -= load > 0
        self.way[i] = -1
