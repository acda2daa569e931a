"""Takes an extent of a pool from one size class, and gives it to another. Between the two it is nobody's.

Compiled; each is one change, whole, as those of `calls` are. Slots of an extent that is another class's are GONE.
"""

from __future__ import annotations

from edgemoe.experts.tiers.eviction import class_at, evict, is_unpinned, may_go, release
from edgemoe.experts.tiers.records import CLASS, GONE, NONE, POOL, STATE
from edgemoe.experts.tiers.slots import SlotPool
from edgemoe.experts.tiers.waiters import Waiters
from edgemoe.jit.intrinsics import INT, code, i64_at, record


@code(INT, INT, INT, INT, INT, result=INT)
def REMOVE_EXTENT(state: int, pool: int, first: int, count: int, homes: int) -> int:
    """Evicts what is in an extent's slots, from `first` on, which are no slots from then on.

    Returns whether it did: 0, with nothing changed, where one of them is pinned, loaded into, or, unless `homes`, keeps
    a home.
    """
    s = record(state, STATE)
    at = i64_at(s.pools)[pool]
    p = record(at, POOL)
    for slot in range(first, first + count):
        if i64_at(p.pins)[slot] != 0:
            return 0
        if i64_at(p.owner)[slot] >= 0 and not (is_unpinned(state, at, slot) if homes else may_go(state, at, slot)):
            return 0
    for slot in range(first, first + count):
        if i64_at(p.owner)[slot] >= 0:
            evict(state, at, slot)
        i64_at(p.owner)[slot] = GONE
    c = record(class_at(at, i64_at(p.class_of)[first]), CLASS)
    left = 0
    for i in range(c.free_count):
        slot = i64_at(c.free)[i]
        if slot < first or slot >= first + count:
            i64_at(c.free)[left] = slot
            left += 1
    c.free_count = left
    s.changes += 1
    return 1


@code(INT, INT, INT, INT, result=INT)
def ADD_EXTENT(state: int, pool: int, first: int, count: int) -> int:
    """Makes the extent's slots, from `first` on, free slots of their class. Returns their number."""
    s = record(state, STATE)
    at = i64_at(s.pools)[pool]
    for slot in range(first + count - 1, first - 1, -1):
        i64_at(record(at, POOL).owner)[slot] = NONE
        release(at, slot)
    s.changes += 1
    s.version += 1
    return count


class Extents:
    """Moves the extents of residency's pools between size classes. One thread's."""

    def __init__(self, state: int, waiters: Waiters) -> None:
        """Takes the address of residency's STATE record."""
        self._state, self._waiters = state, waiters

    def remove(self, pool: SlotPool, number: int, *, homes: bool = False) -> bool:
        """Evicts what is in an extent, which is nobody's then. Returns False where something in it has to stay.

        With `homes`, those at home here have not.
        """
        first, count = pool.extent(number, int(pool.extents[number]))
        if not REMOVE_EXTENT.call_briefly(self._state, pool.index, first, count, homes):
            return False
        pool.extents[number] = NONE
        return True

    def add(self, pool: SlotPool, number: int, size_class: int) -> None:
        """Gives an extent that is nobody's to a size class, as free slots."""
        ADD_EXTENT.call_briefly(self._state, pool.index, *pool.extent(number, size_class))
        pool.extents[number] = size_class
        self._waiters.wake()
