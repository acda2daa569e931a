"""Which device computes which expert: dealt evenly at first, and given from one to another later."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np

from edgemoe.experts.tiers.eviction import forget, release
from edgemoe.experts.tiers.records import NONE, POOL, STATE
from edgemoe.jit.intrinsics import INT, code, i64_at, record
from edgemoe.types.arrays import IntArray


@code(INT, INT, INT, result=INT)
def GIVE(state: int, key: int, device: int) -> int:
    """Gives an expert to a device, from which it is computed from now on. What the former one has of it is dropped.

    Returns 1, and 2 where something was dropped; 0, with nothing changed, while a layer-step of its layer runs, where
    its copy is pinned or on its way, and where that is the only one in memory.
    """
    s = record(state, STATE)
    if i64_at(s.running)[0] == key // s.experts or i64_at(s.running)[1] == key // s.experts:
        return 0
    former = i64_at(s.pools)[1 + i64_at(s.device_of)[key]]
    p = record(former, POOL)
    slot = i64_at(p.where)[key]
    if i64_at(p.coming)[key] >= 0:
        return 0
    if slot >= 0:
        if i64_at(p.pins)[slot] != 0 or i64_at(record(i64_at(s.pools)[0], POOL).where)[key] < 0:
            return 0
        forget(former, slot)
        release(former, slot)
    i64_at(s.device_of)[key] = device
    s.changes += 1
    s.version += 1
    return 1 + (slot >= 0)  # type: ignore[no-any-return]


class Dealing:
    """Gives experts to devices. Steps of several devices begin and end here, so that none sees half of a change."""

    def __init__(self, state: int, experts: int, running: IntArray) -> None:
        """Takes the address of residency's STATE record, E, and its array `running`."""
        self._state, self._experts, self._running, self._who = state, experts, running, 1

    def for_peers(self) -> Self:
        """Returns the same for the thread that computes for peers."""
        other = copy.copy(self)
        other._who = 0
        return other

    def enter(self, layer: int) -> None:
        """Keeps the layer's experts with the devices that have them, until `leave` on this thread."""
        self._running[self._who] = layer

    def leave(self) -> None:
        """Ends what `enter` began."""
        self._running[self._who] = NONE

    def give(self, layer: int, expert: int, device: int) -> int:
        """Gives an expert to a device, from which it is computed from now on. On the compute thread, between steps.

        Returns 1, and 2 where the former device had it, which it has no longer; 0, with nothing changed, where that
        cannot be now.
        """
        return int(GIVE.call_briefly(self._state, layer * self._experts + expert, device))


def deal(shape: tuple[int, ...], sizes_bytes: Sequence[int]) -> IntArray:
    """Returns the device of each expert [L, E], even in every layer, in proportion to the devices' memory."""
    edges = np.cumsum(sizes_bytes) / sum(sizes_bytes)
    golden = (5**0.5 - 1) / 2  # multiples of it fill the unit interval evenly
    return np.searchsorted(edges, np.arange(shape[0] * shape[1]) * golden % 1.0, side="right").reshape(shape)
