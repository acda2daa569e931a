"""Decides what an emulated link moves when: in pieces, between two of which a demand overtakes a prefetch.

A prefetch for the next layers overtakes one for later. What has arrived of an overtaken one stays, and counts when it
goes on. A prefetch that is demanded meanwhile is a demand from the next decision on. The schedule has no clock of its
own: it is told the time, on a thread as in a simulation, and works out when a transfer ends instead of looking at each
piece.
"""

from __future__ import annotations

import math
from typing import Generic, Protocol, TypeVar

PIECE_BYTES = 256 << 10  # least size of one of several pieces; none has twice as much
EARLY = 1e-6  # of a piece: so close to its start, none has begun


def pieces_of(size_bytes: float) -> int:
    """Returns the number of pieces that so many bytes are moved in."""
    return max(1, int(size_bytes // PIECE_BYTES))


class Urgent(Protocol):
    """Is moved over a link."""

    @property
    def urgency(self) -> int:
        """Returns what it overtakes: anything of less. It may grow meanwhile."""


Load = TypeVar("Load", bound=Urgent)


class PieceSchedule(Generic[Load]):
    """Orders the transfers of a link that takes `piece_s` for each of the `pieces` of a largest expert."""

    def __init__(self, pieces: int, piece_s: float) -> None:
        self.pieces, self.piece_s = pieces, piece_s
        self._left: dict[Load, float] = {}  # pieces that are still to come, in the order of coming
        self._ended: list[Load] = []  # and not taken yet
        self._running: Load | None = None
        self._since_s = 0.0  # from when on the pieces that are left of it move

    @property
    def running(self) -> Load | None:
        """Returns what moves, or will once the piece under way has ended."""
        return self._running

    @property
    def loads(self) -> list[Load]:
        """Returns what has not arrived, in the order of coming."""
        return list(self._left)

    @property
    def end_s(self) -> float:
        """Returns when the next transfer ends if nothing comes; inf where none is under way."""
        if self._running is None:
            return math.inf
        return self._since_s + self._left[self._running] * self.piece_s

    def add(self, load: Load, now_s: float, share: float = 1.0) -> None:
        """Takes a transfer. It waits for the piece under way of a less urgent one, and for what is as urgent.

        `share` is its size among the largest experts'.
        """
        self._advance(now_s)
        self._left[load] = self.pieces * share
        if self._running is None:
            self._choose(max(now_s, self._since_s))
        elif load.urgency > self._running.urgency:
            self._interrupt(now_s)

    def drop(self, load: Load, now_s: float) -> None:
        """Forgets a transfer that is in `loads`; its piece under way still ends."""
        boundary_s = self._boundary_s(now_s)[1]
        del self._left[load]
        if load is self._running:
            self._choose(boundary_s)

    def take_ended(self, now_s: float) -> list[Load]:
        """Returns the transfers that have ended by now, each once, in order."""
        self._advance(now_s)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, now_s: float) -> None:
        while self._running is not None and (end_s := self.end_s) <= now_s:
            self._ended.append(self._running)
            del self._left[self._running]
            self._choose(end_s)

    def _choose(self, at_s: float) -> None:
        """Begins the first of the most urgent."""
        self._running = max(self._left, key=lambda load: load.urgency, default=None)
        self._since_s = at_s

    def _interrupt(self, now_s: float) -> None:
        """Chooses anew when the piece under way has ended."""
        assert self._running is not None
        moved, at_s = self._boundary_s(now_s)
        if moved < self._left[self._running]:  # else it is its last, and it ends then anyway
            self._left[self._running] -= moved
            self._choose(at_s)

    def _boundary_s(self, now_s: float) -> tuple[int, float]:
        """Returns the pieces that will have moved once the one under way has ended, and when that is."""
        moved = max(0, math.ceil((now_s - self._since_s) / self.piece_s - EARLY)) if self.piece_s else 0
        return moved, self._since_s + moved * self.piece_s
