"""Assigns experts and memory: experts to devices, home experts to RAM, extents of a pool to size classes.

The compiled functions are operations of residency, see `residency_ops`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np

from edgemoe.errors import CapacityError
from edgemoe.experts.tiers.eviction import class_at, clear_slot, evict, free_slot, is_unpinned, may_evict
from edgemoe.experts.tiers.residency_records import CLASS, FORMER, GONE, HOME, NONE, POOL, STATE
from edgemoe.experts.tiers.slots import BoolArray, SlotPool, Waiters
from edgemoe.jit.intrinsics import INT, code, i64_at, jit, record, u8_at
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import ExpertId


@code(INT, INT, INT, result=INT)
def MOVE_TO_DEVICE(state: int, key: int, device: int) -> int:
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
        clear_slot(former, slot)
        free_slot(former, slot)
    i64_at(s.device_of)[key] = device
    s.changes += 1
    s.version += 1
    return 1 + (slot >= 0)  # type: ignore[no-any-return]


class DeviceAssignment:
    """Gives experts to devices. Steps of several devices begin and end here, so that none sees half of a change."""

    def __init__(self, state: int, experts: int, running: IntArray) -> None:
        """Takes the address of residency's STATE record, E, and its array `running`."""
        self._state, self._experts, self._running, self._who = state, experts, running, 1

    def for_peers(self) -> Self:
        """Returns the same for the thread that computes for peers."""
        other = copy.copy(self)
        other._who = 0
        return other

    def hold_layer(self, layer: int) -> None:
        """Keeps the layer's experts with the devices that have them, until `release_layer` on this thread."""
        self._running[self._who] = layer

    def release_layer(self) -> None:
        """Ends what `hold_layer` began."""
        self._running[self._who] = NONE

    def move_expert(self, layer: int, expert: int, device: int) -> int:
        """Gives an expert to a device, from which it is computed from now on. On the compute thread, between steps.

        Returns 1, and 2 where the former device had it, which it has no longer; 0, with nothing changed, where that
        cannot be now.
        """
        return int(MOVE_TO_DEVICE.call_briefly(self._state, layer * self._experts + expert, device))


def deal_to_devices(shape: tuple[int, ...], sizes_bytes: Sequence[int]) -> IntArray:
    """Returns the device of each expert [L, E], even in every layer, in proportion to the devices' memory."""
    edges = np.cumsum(sizes_bytes) / sum(sizes_bytes)
    golden = (5**0.5 - 1) / 2  # multiples of it fill the unit interval evenly
    return np.searchsorted(edges, np.arange(shape[0] * shape[1]) * golden % 1.0, side="right").reshape(shape)


# --- extents: removed from one size class, then added to another; in between their slots are GONE ---


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
        if i64_at(p.owner)[slot] >= 0 and not (is_unpinned(state, at, slot) if homes else may_evict(state, at, slot)):
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
        free_slot(at, slot)
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


# --- home experts: once in RAM, they stay there ---

MIN_PASSING, PASSING_SHARE = 2, 16  # slots of RAM that are left to other experts: at least so many, and one in so many


@code(INT, INT, result=INT)
def SET_HOMES(state: int, homes: int) -> int:
    """Sets which experts are at home in RAM, [L * E] uint8. Those that were and are there become former homes."""
    s = record(state, STATE)
    ram = record(i64_at(s.pools)[0], POOL)
    for key in range(s.layers * s.experts):
        former = i64_at(s.kept)[key] != 0 and i64_at(ram.where)[key] >= 0
        i64_at(s.kept)[key] = HOME if u8_at(homes)[key] else FORMER if former else 0
    _forget_shortlists(state)
    return 0


@code(INT, result=INT)
def FORGET_FORMER(state: int) -> int:
    """Ranks former homes by the policy again."""
    s = record(state, STATE)
    for key in range(s.layers * s.experts):
        if i64_at(s.kept)[key] == FORMER:
            i64_at(s.kept)[key] = 0
    _forget_shortlists(state)
    return 0


@jit
def _forget_shortlists(state: int) -> None:
    s = record(state, STATE)
    for which in range(s.classes):
        record(class_at(i64_at(s.pools)[0], which), CLASS).least_at = NONE


class HomeExperts:
    """Holds this box's part of the placement plan. Thread-safe, as residency is."""

    def __init__(self, ram: SlotPool, state: int, kept: IntArray) -> None:
        """Takes the address of residency's STATE record, and its array `kept`, [L, E]."""
        self._ram, self._state, self._kept = ram, state, kept

    def set_homes(self, homes: BoolArray) -> None:
        """Replaces the home experts by those set in `homes` [L, E].

        Raises CapacityError where RAM lacks room for them.
        """
        homes = homes & (np.arange(self._ram.experts) < np.array(self._ram.layout.classes.layer_experts)[:, None])
        counts = np.bincount(self._ram.layer_class, homes.sum(axis=1), len(self._ram.classes)).astype(int).tolist()
        for size_class, count in enumerate(counts):
            if count > (room := self._capacity(size_class)):
                size = f" of {self._ram.classes[size_class].expert_bytes} bytes" if len(counts) > 1 else ""
                raise CapacityError(f"{count} experts{size} are to be at home here, RAM has room for {room}")
        flags = np.ascontiguousarray(homes, np.uint8)
        SET_HOMES.call_briefly(self._state, flags.ctypes.data)

    def forget_former(self) -> None:
        """Ranks the homes of the former plan like other experts. Before this call they are the last to be evicted."""
        FORGET_FORMER.call_briefly(self._state)

    def in_ram(self) -> BoolArray:
        """Returns which experts [L, E] are at home here and in RAM, where no other load takes their place."""
        here: BoolArray = (self._ram.where >= 0) & (self._kept == HOME)
        return here

    @property
    def capacities(self) -> tuple[int, ...]:
        """Returns how many experts of each size can be at home here, the smallest first. Some slots stay for others."""
        return tuple(map(self._capacity, range(len(self._ram.classes))))

    def _capacity(self, size_class: int) -> int:
        """Returns how many experts of a class can be at home here, as memory was divided at first."""
        slots = self._slots(size_class)
        return max(0, slots - max(MIN_PASSING, slots // PASSING_SHARE))

    def _slots(self, size_class: int) -> int:
        layout = self._ram.layout
        return layout.divided()[size_class] * layout.per_extent[size_class]

    def needed_slots(self, size_class: int) -> int:
        """Counts the slots of a class that its home experts need, including the slots left to other experts."""
        count = int(np.count_nonzero(self._kept[self._ram.layer_class == size_class] == HOME))
        passing = max(MIN_PASSING, count // (PASSING_SHARE - 1) + 1)
        return min(count + passing, self._slots(size_class)) if count else 0

    def missing(self) -> list[ExpertId]:
        """Returns the home experts that are not in RAM."""
        missing = np.flatnonzero((self._kept == HOME) & (self._ram.where < 0))
        return [ExpertId(*divmod(key, self._ram.experts)) for key in missing.tolist()]
