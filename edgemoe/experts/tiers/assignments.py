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
from edgemoe.experts.tiers.slots import BoolArray, ResidencyWaiters, SlotPool
from edgemoe.jit.intrinsics import INT, i64_at, jit, record, u8_at
from edgemoe.jit.object_cache import code
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import ExpertId


@code(INT, INT, INT, result=INT)
def MOVE_TO_DEVICE(state: int, key: int, device: int) -> int:
    """Moves an expert to a device, which computes it from now on. The former device's copy is dropped.

    Returns 1, or 2 if a copy was dropped. Returns 0, with nothing changed, while a layer-step of its layer runs. The
    same if its copy is pinned, being loaded, or the only copy in memory.
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
    """Assigns experts to devices. A layer that several devices compute is held, so that it sees no half of a change."""

    def __init__(self, state: int, experts: int, running: IntArray) -> None:
        """Takes the address of residency's STATE record, E, and its array `running`."""
        self._state, self._experts, self._running, self._who = state, experts, running, 1

    def for_peers(self) -> Self:
        """Returns the assignment for the thread that computes for peers."""
        other = copy.copy(self)
        other._who = 0
        return other

    def hold_layer(self, layer: int) -> None:
        """Keeps the layer's experts on their devices until `release_layer` on this thread."""
        self._running[self._who] = layer

    def release_layer(self) -> None:
        """Lets the held layer's experts move again."""
        self._running[self._who] = NONE

    def move_expert(self, layer: int, expert: int, device: int) -> int:
        """Moves an expert to a device, which computes it from now on. On the compute thread, between steps.

        Returns 1, or 2 if the former device dropped a copy; 0, with nothing changed, if it cannot move now.
        """
        return int(MOVE_TO_DEVICE.call_briefly(self._state, layer * self._experts + expert, device))


def deal_to_devices(shape: tuple[int, ...], sizes_bytes: Sequence[int]) -> IntArray:
    """Deals experts to devices, evenly in every layer, in proportion to memory. Returns the device of each [L, E]."""
    edges = np.cumsum(sizes_bytes) / sum(sizes_bytes)
    golden = (5**0.5 - 1) / 2  # multiples of it fill the unit interval evenly
    return np.searchsorted(edges, np.arange(shape[0] * shape[1]) * golden % 1.0, side="right").reshape(shape)


# --- extents: removed from one size class, then added to another; in between their slots are GONE ---


@code(INT, INT, INT, INT, INT, result=INT)
def REMOVE_EXTENT(state: int, pool: int, first: int, count: int, homes: int) -> int:
    """Evicts the experts in an extent's `count` slots, from `first` on, and makes the slots GONE. Returns 1.

    Returns 0, with nothing changed, if a slot is pinned, being loaded, or, unless `homes`, holds a home expert.
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
    """Makes the extent's `count` slots, from `first` on, free slots of their class. Returns their number."""
    s = record(state, STATE)
    at = i64_at(s.pools)[pool]
    for slot in range(first + count - 1, first - 1, -1):
        i64_at(record(at, POOL).owner)[slot] = NONE
        free_slot(at, slot)
    s.changes += 1
    s.version += 1
    return count


class ExtentMoves:
    """Moves the extents of residency's pools between size classes. For one thread."""

    def __init__(self, state: int, waiters: ResidencyWaiters) -> None:
        """Takes the address of residency's STATE record."""
        self._state, self._waiters = state, waiters

    def remove(self, pool: SlotPool, number: int, *, homes: bool = False) -> bool:
        """Evicts the experts in an extent, and takes it from its class. Returns False if one of them has to stay.

        With `homes`, home experts may be evicted too.
        """
        first, count = pool.extent(number, int(pool.extents[number]))
        if not REMOVE_EXTENT.call_briefly(self._state, pool.index, first, count, homes):
            return False
        pool.extents[number] = NONE
        return True

    def add(self, pool: SlotPool, number: int, size_class: int) -> None:
        """Gives an extent that belongs to no class to a size class, as free slots."""
        ADD_EXTENT.call_briefly(self._state, pool.index, *pool.extent(number, size_class))
        pool.extents[number] = size_class
        self._waiters.wake()


# --- home experts: once in RAM, they stay there ---

MIN_PASSING, PASSING_SHARE = 2, 16  # RAM slots left to other experts: at least this number, and one in this number


@code(INT, INT, result=INT)
def SET_HOMES(state: int, homes: int) -> int:
    """Sets the home experts, [L * E] uint8. Earlier home experts in RAM become former homes."""
    s = record(state, STATE)
    ram = record(i64_at(s.pools)[0], POOL)
    for key in range(s.layers * s.experts):
        former = i64_at(s.kept)[key] != 0 and i64_at(ram.where)[key] >= 0
        i64_at(s.kept)[key] = HOME if u8_at(homes)[key] else FORMER if former else 0
    _forget_shortlists(state)
    return 0


@code(INT, result=INT)
def FORGET_FORMER(state: int) -> int:
    """Ranks former home experts by the policy again."""
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
    """This box's home experts by the placement plan: once in RAM, they stay. Thread-safe."""

    def __init__(self, ram: SlotPool, state: int, kept: IntArray) -> None:
        """Takes the address of residency's STATE record, and its array `kept`, [L, E]."""
        self._ram, self._state, self._kept = ram, state, kept

    def set_homes(self, homes: BoolArray) -> None:
        """Replaces the home experts by `homes` [L, E].

        Raises CapacityError if RAM lacks room for them.
        """
        homes = homes & (np.arange(self._ram.experts) < np.array(self._ram.layout.classes.layer_experts)[:, None])
        counts = np.bincount(self._ram.layer_class, homes.sum(axis=1), len(self._ram.classes)).astype(int).tolist()
        for size_class, count in enumerate(counts):
            if count > (room := self._capacity(size_class)):
                size = f" of {self._ram.classes[size_class].expert_bytes} bytes" if len(counts) > 1 else ""
                raise CapacityError(
                    f"the plan gives this box {count} home experts{size}, RAM has room for {room}; raise ram_bytes"
                )
        flags = np.ascontiguousarray(homes, np.uint8)
        SET_HOMES.call_briefly(self._state, flags.ctypes.data)

    def forget_former(self) -> None:
        """Ranks the former plan's home experts like others. Before this call they are the last to be evicted."""
        FORGET_FORMER.call_briefly(self._state)

    def in_ram(self) -> BoolArray:
        """Returns the mask of home experts that are in RAM, [L, E]. No other load replaces them."""
        here: BoolArray = (self._ram.where >= 0) & (self._kept == HOME)
        return here

    @property
    def capacities(self) -> tuple[int, ...]:
        """The number of home experts of each size that fit, the smallest size first.

        Some slots stay for other experts.
        """
        return tuple(map(self._capacity, range(len(self._ram.classes))))

    def _capacity(self, size_class: int) -> int:
        """Counts the home experts of a class that fit the initial division of memory."""
        slots = self._slots(size_class)
        return max(0, slots - max(MIN_PASSING, slots // PASSING_SHARE))

    def _slots(self, size_class: int) -> int:
        layout = self._ram.layout
        return layout.divided()[size_class] * layout.per_extent[size_class]

    @property
    def passing(self) -> int:
        """The number of slots that are left to other experts than home experts."""
        return self._ram.slots - int(np.count_nonzero(self._kept == HOME))

    def needed_slots(self, size_class: int) -> int:
        """Counts the slots of a class that its home experts need, including the slots left to other experts."""
        count = int(np.count_nonzero(self._kept[self._ram.layer_class == size_class] == HOME))
        passing = max(MIN_PASSING, count // (PASSING_SHARE - 1) + 1)
        return min(count + passing, self._slots(size_class)) if count else 0

    def missing(self) -> list[ExpertId]:
        """Returns the home experts that are not in RAM."""
        missing = np.flatnonzero((self._kept == HOME) & (self._ram.where < 0))
        return [ExpertId(*divmod(key, self._ram.experts)) for key in missing.tolist()]


CODES = (SET_HOMES, FORGET_FORMER, REMOVE_EXTENT, ADD_EXTENT, MOVE_TO_DEVICE)
