"""Moves homes in steps without a gap, and decides whether a migration pays [Prism, III-C2].

The source moves all at once. Here a step is the former homes and the hottest new ones that have room. An old home
releases an expert when every new home holds it pinned and verified. It does so earlier if it needs the memory and
another pinned copy exists. Both sides of Eq. 4 are seconds that requests wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

LEAST_GAIN = 0.1  # of the time that requests wait for peers, by which a plan must lower it


@dataclass(frozen=True, slots=True, eq=False)
class Migration:
    """States how far a migration has come."""

    now: BoolArray  # [N, L, E] at home by the version in force
    pinned: BoolArray  # [N, L, E] of these, pinned, verified and acknowledged at that version
    goal: BoolArray  # [N, L, E]
    room: IntArray  # [N, C] experts of each size
    heat: FloatArray  # [L, E] how often each is chosen
    on_disk: BoolArray | None = None  # [L, E] at home on a disk: no copy in memory has to stay
    sizes: Sequence[IntArray | slice] = (slice(None),)  # [C] the layers whose experts are of that size

    @property
    def late(self) -> BoolArray:
        """Returns the nodes [N] that have not acknowledged all experts that will stay there."""
        return np.asarray((self.now & self.goal & ~self.pinned).any(axis=(1, 2)), np.bool_)

    @property
    def _on_disk(self) -> BoolArray:
        return np.zeros(self.heat.shape, np.bool_) if self.on_disk is None else self.on_disk

    @property
    def is_acknowledged(self) -> bool:
        """Whether every expert that will stay has arrived, so that the next step can move most."""
        return not self.late.any()

    def next_homes(self) -> BoolArray:
        """Returns the homes [N, L, E] of the next version; `now` where nothing can be moved."""
        homes = self.now.copy()
        for number, layers in enumerate(self.sizes):
            homes[:, layers] = self._of_size(number, layers)._next()
        return homes

    def _of_size(self, number: int, layers: IntArray | slice) -> Migration:
        of_all = (self.now, self.pinned, self.goal)
        now, pinned, goal = (np.ascontiguousarray(each[:, layers]) for each in of_all)  # so that ravel is a view
        room = self.room[:, number : number + 1]
        return Migration(now, pinned, goal, room, self.heat[layers], self._on_disk[layers])

    def _next(self) -> BoolArray:
        """Returns the next homes where all experts are of one size."""
        arrived = (self.goal.any(axis=0) | self._on_disk) & (~self.goal | self.now & self.pinned).all(axis=0)
        homes = self.now & (self.goal | ~arrived)
        wanted = self.goal & ~homes
        first = np.argsort(
            -(self.heat + np.where(homes.any(axis=0) | self._on_disk, 0.0, math.inf)), axis=None, kind="stable"
        )
        for node in range(len(homes)):
            self._fit(homes, node)
            self._make_room(homes, node, int(np.count_nonzero(wanted[node])))
            new = first[wanted[node].ravel()[first]]
            free = int(self.room[node, 0]) - int(np.count_nonzero(homes[node]))
            homes[node].ravel()[new[: max(0, free)]] = True
        return homes

    def _fit(self, homes: BoolArray, node: int) -> None:
        """Removes homes beyond a node's room: experts that have not arrived, then the coldest."""
        over = int(np.count_nonzero(homes[node])) - int(self.room[node, 0])
        if over > 0:
            held = np.flatnonzero(homes[node])
            keys = (self.heat.ravel()[held], self.goal[node].ravel()[held], self.pinned[node].ravel()[held])
            homes[node].ravel()[held[np.lexsort(keys)[:over]]] = False

    def _make_room(self, homes: BoolArray, node: int, wanted: int) -> None:
        """Removes a node's former homes, the coldest first, to make room for `wanted` experts.

        Only experts go that another node keeps pinned, or that the goal has in no memory.
        """
        lacking = wanted - (int(self.room[node, 0]) - int(np.count_nonzero(homes[node])))
        others = homes & self.pinned
        others[node] = False
        spare = np.flatnonzero(homes[node] & ~self.goal[node] & (others.any(axis=0) | ~self.goal.any(axis=0)))
        coldest = spare[np.argsort(self.heat.ravel()[spare], kind="stable")]
        homes[node].ravel()[coldest[: max(0, lacking)]] = False


def copy_s(now: BoolArray, goal: BoolArray, layer_bytes: IntArray, bytes_per_s: FloatArray) -> float:
    """Returns the seconds of copying the homes that `goal` [N, L, E] adds to `now` [Prism, Eq. 3].

    `layer_bytes` [L] is the size of a layer's expert, `bytes_per_s` [N] each node's rate.
    """
    moves = np.count_nonzero(goal & ~now, axis=2)
    return float(((moves * layer_bytes).sum(axis=1) / bytes_per_s).sum())


def pays(now_s: float, then_s: float, moving_s: float, horizon_s: float, margin: float = LEAST_GAIN) -> bool:
    """Returns whether a migration gains [Prism, Eq. 4].

    `now_s` and `then_s` are the seconds per second that requests wait for peers, without and with the migration. During
    the `moving_s` of copying all of `now_s` goes on. A gain below the share `margin` does not count, so that noise in
    measurements does not move experts to and fro.
    """
    gain = now_s - then_s
    return gain > margin * now_s and gain * horizon_s > now_s * moving_s
