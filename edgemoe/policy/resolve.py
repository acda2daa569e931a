"""Which way each needed expert of a layer is computed, so that the layer is finished soonest.

Design page, section 5: the layer waits for its slowest channel, so what is made small is the largest channel's time,
not the sum of all (which would leave channels idle). A channel is anything that works by itself: a GPU, the PCIe
link, the CPU, the disk, each peer. Results never depend on the way that was taken.

    finish = max( max_c opening_c [c is used] + sum of what the chosen ways load c with,  max_i time way i takes alone )

Unrelated machines with opening costs are NP-hard; the assignment here starts from each expert's own shortest way and is
improved by moving one, then two experts, and by the closing of channels until none helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
EVENNESS = 1e-3  # weight of the channels' quadratic mean: shows the way across equally late assignments
MOST_LATE = 8  # experts whose moves are tried together with every other's


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
    if not len(possible):
        return Resolution(np.empty(0, np.int64), 0.0)
    best = _Search(ways, possible).run()
    closing = True
    while closing:  # a channel's opening is saved only if everything leaves it at once
        closing = False
        for channel in best.channels_used():
            allowed = best.possible & ~(ways.load[:, :, channel] > 0)
            if allowed.any(axis=1).all() and (without := _Search(ways, allowed).run()).finish < best.finish:
                best, closing = without, True
                break
    return Resolution(best.way, best.finish)


class _Search:
    """Steepest descent over single moves, then moves of two experts; every neighbour is priced at once."""

    def __init__(self, ways: Ways, possible: npt.NDArray[np.bool_]) -> None:
        self.ways, self.possible = ways, possible
        self.load = np.where(possible[:, :, None], ways.load, 0.0)  # [n, w, c]
        self.alone = np.where(possible, ways.alone, np.inf)  # [n, w]
        self.rows = np.arange(len(possible))
        self.way = np.argmin(self.alone, axis=1)
        self._recount()

    def run(self) -> _Search:
        """Descends from each expert's shortest way, and from the longest being placed first; keeps the better."""
        self._descend()
        from_shortest, finish = self.way.copy(), self.finish
        self._place_longest_first()
        self._descend()
        if finish <= self.finish:
            self.way = from_shortest
            self._recount()
        return self

    def _descend(self) -> None:
        while self._move() or self._move_two():
            self._recount()

    def _place_longest_first(self) -> None:
        busy, users = np.zeros_like(self.busy), np.zeros_like(self.users)
        for i in np.argsort(-self.alone.min(axis=1)):
            _, cost = self._price(busy + self.load[i], users + (self.load[i] > 0), self.alone[i])
            self.way[i] = np.argmin(cost)
            busy += self.load[i, self.way[i]]
            users += self.load[i, self.way[i]] > 0
        self._recount()

    def channels_used(self) -> list[int]:
        return [int(c) for c in np.flatnonzero(self.users > 0)]

    def _recount(self) -> None:
        chosen = self.load[self.rows, self.way]  # [n, c]
        self.busy, self.users = chosen.sum(axis=0), (chosen > 0).sum(axis=0)
        self.waits = self.alone[self.rows, self.way]  # [n]
        self.finish, self.cost = (float(x) for x in self._price(self.busy, self.users, self.waits.max()))

    def _price(self, busy: Costs, users: npt.NDArray[np.int64], alone: Costs) -> tuple[Costs, Costs]:
        """(finish, and what is made small: finish first, then evenness), over any leading shape; `busy` [..., c]."""
        times = np.where(users > 0, busy + self.ways.opening, 0.0)
        finish = np.maximum(times.max(axis=-1), alone)
        return finish, finish + EVENNESS * np.sqrt(np.square(times).sum(axis=-1))

    def _move(self) -> bool:
        """Gives one expert another way."""
        old = self.load[self.rows, self.way][:, None]  # [n, 1, c]
        busy = self.busy - old + self.load  # [n, w, c]
        users = self.users - (old > 0) + (self.load > 0)
        alone = np.maximum(self._longest_but_one()[:, None], self.alone)
        _, cost = self._price(busy, users, alone)
        i, way = np.unravel_index(np.argmin(cost), cost.shape)
        if not cost[i, way] < self.cost * (1 - 1e-9):
            return False
        self.way[i] = way
        return True

    def _move_two(self) -> bool:
        """Gives two experts other ways at once, one of them an expert that the layer waits for."""
        late = self._late()  # [m]
        own = self.load[self.rows, self.way][:, None]  # [n, 1, c]
        more, users = self.load - own, (self.load > 0).astype(np.int64) - (own > 0)  # [n, w, c]
        both = more[late][:, :, None, None] + more  # [m, w, n, w, c]
        both_users = users[late][:, :, None, None] + users
        others = np.where(np.eye(len(self.way), dtype=bool)[late][:, None], -np.inf, self._without_each())  # [m, n, n]
        rest = np.maximum(others.max(axis=2), 0.0)[:, None, :, None]  # [m, 1, n, 1]
        alone = np.maximum(np.maximum(self.alone[late][:, :, None, None], self.alone), rest)
        _, cost = self._price(self.busy + both, self.users + both_users, alone)
        cost[np.arange(len(late)), :, late] = np.inf  # an expert is no pair
        m, first, j, second = (int(x) for x in np.unravel_index(np.argmin(cost), cost.shape))
        if not cost[m, first, j, second] < self.cost * (1 - 1e-9):
            return False
        self.way[late[m]], self.way[j] = first, second
        return True

    def _late(self) -> npt.NDArray[np.int64]:
        """The experts that the layer waits for: on the channel that is finished last, or that take as long alone."""
        times = np.where(self.users > 0, self.busy + self.ways.opening, 0.0)
        latest = self.finish * (1 - 1e-12)
        on_latest = ((self.load[self.rows, self.way] > 0) & (times >= latest)).any(axis=1)
        late = np.flatnonzero(on_latest | (self.waits >= latest))
        return late[np.argsort(-self.waits[late])][:MOST_LATE]

    def _without_each(self) -> Costs:
        """Everybody's wait, but -inf on the diagonal, [n, n]."""
        waits = np.tile(self.waits, (len(self.waits), 1))
        np.fill_diagonal(waits, -np.inf)
        return waits

    def _longest_but_one(self) -> Costs:
        """The longest wait of the others, for each expert, [n]."""
        if len(self.waits) == 1:
            return np.zeros(1)
        first, second = np.sort(self.waits)[::-1][:2]
        return np.asarray(np.where(self.waits == first, second if (self.waits == first).sum() == 1 else first, first))
