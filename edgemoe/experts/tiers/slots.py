"""One tier's slots on one device: their experts, pins and flags, and which are free. Used by residency only."""

from __future__ import annotations

from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import LivePolicy, Tier

BoolArray = npt.NDArray[np.bool_]

NONE = -1  # no slot, no owner
UNUSED = 1  # slot flag: prefetched, and not demanded since
TRANSIENT = 2  # slot flag: loaded for prefill only, evicted first


class Transfer:
    """A transfer of one expert into one slot, from the RAM slot `source` or, without one, from NVMe."""

    __slots__ = ("cold", "demand", "error", "expert", "layer", "pool", "slot", "source", "then", "waiters")

    def __init__(self, pool: SlotPool, layer: int, expert: int, slot: int, *, demand: bool) -> None:
        self.pool, self.layer, self.expert, self.slot = pool, layer, expert, slot
        self.demand = demand
        self.source = NONE
        self.cold = pool.tier is Tier.RAM  # comes from NVMe
        self.then: list[Transfer] = []  # copies that start from this one's slot
        self.waiters: list[SimpleQueue[Transfer]] = []
        self.error: Exception | None = None

    def __repr__(self) -> str:
        return f"Load(layer {self.layer}, expert {self.expert} -> {self.pool.tier.name} slot {self.slot})"


class TierUsage(NamedTuple):
    """How full a tier is, over all of its pools, and what has come into it since the start."""

    slots: int
    used: int  # of them, resident or on its way
    moved: int  # experts that came in
    prefetched: int  # of these, before they were demanded
    wasted: int  # of these, evicted before they were demanded


class SlotPool:
    """Owns slots [S] for L x E experts. Not thread-safe: residency holds the lock."""

    def __init__(self, tier: Tier, layers: int, experts: int, slots: int, policy: LivePolicy) -> None:
        self.tier, self.layers, self.experts, self.slots = tier, layers, experts, slots
        self.policy = policy
        self.where: IntArray = np.full((layers, experts), NONE, np.int64)  # [L, E] slot of what is resident
        self.owner: IntArray = np.full(slots, NONE, np.int64)  # [S] layer * E + expert, resident or on its way
        self.pins: IntArray = np.zeros(slots, np.int64)  # [S]
        self.flags: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)  # [S]
        self.utility: npt.NDArray[np.float32] = np.zeros(slots, np.float32)  # [S] while UNUSED: its move's score
        self.born: IntArray = np.zeros(slots, np.int64)  # [S] layer-step at which the load began
        self.free = list(range(slots - 1, -1, -1))
        self.loads: dict[int, Transfer] = {}  # by owner
        self.shortlist: list[tuple[float, int, int]] = []  # utility, slot, owner of the lowest utilities, descending
        self.shortlist_at = NONE  # the layer-step that it was made in
        self.moved = 0  # experts that came in
        self.prefetched = 0  # of these, before they were demanded
        self.wasted = 0  # of these, evicted before they were demanded
        self._orphans = 0  # slots of failed loads that are still pinned

    def is_missing(self, layer: int, expert: int) -> bool:
        """Returns whether the expert is neither resident nor being loaded."""
        return self.where[layer, expert] < 0 and layer * self.experts + expert not in self.loads

    def pin(self, slots: IntArray, prefill_only: BoolArray | None) -> None:
        """Pins distinct slots [n] for a forward pass. A demand of decode clears the prefill-only flag."""
        self.pins[slots] += 1
        self.flags[slots] = 0 if prefill_only is None else self.flags[slots] & np.where(prefill_only, TRANSIENT, 0)

    def unpin(self, slots: IntArray) -> None:
        """Drops one pin of each of the distinct slots [n]."""
        self.pins[slots] -= 1
        if self._orphans:
            orphans = slots[(self.pins[slots] == 0) & (self.owner[slots] == NONE)]
            self.free.extend(orphans.tolist())
            self._orphans -= len(orphans)

    def place(self, slot: int, layer: int, expert: int, flags: int, born: int, *, demand: bool = True) -> Transfer:
        """Returns a new transfer of the expert into an empty slot, which it pins."""
        key = layer * self.experts + expert
        self.owner[slot], self.pins[slot], self.flags[slot], self.born[slot] = key, 1, flags, born
        load = self.loads[key] = Transfer(self, layer, expert, slot, demand=demand)
        return load

    def settle(self, load: Transfer) -> None:
        """Marks the load as complete and its expert as resident."""
        del self.loads[int(self.owner[load.slot])]
        self.where[load.layer, load.expert] = load.slot
        self.pins[load.slot] -= 1
        self.moved += 1
        self.prefetched += not load.demand

    def abandon(self, load: Transfer) -> None:
        """Drops a failed load; its slot becomes free as soon as it is not pinned."""
        del self.loads[int(self.owner[load.slot])]
        self.owner[load.slot] = NONE
        self.pins[load.slot] -= 1
        if self.pins[load.slot]:
            self._orphans += 1
        else:
            self.free.append(load.slot)

    def evict(self, slots: IntArray) -> None:
        """Evicts the experts in the unpinned slots [n], which the caller then owns; they are not free."""
        assert not self.pins[slots].any(), "a pinned expert is to be evicted"
        self.where.ravel()[self.owner[slots]] = NONE
        self.owner[slots] = NONE
        self.wasted += int(np.count_nonzero(self.flags[slots] & UNUSED))
        self.flags[slots] = 0

    def check_integrity(self, *, idle: bool) -> None:
        """Asserts that slots, owners, pins, loads and the free list agree."""
        resident = np.flatnonzero(self.where.ravel() >= 0)
        slots = self.where.ravel()[resident]
        loading = np.array([load.slot for load in self.loads.values()], np.int64)
        assert (self.owner[slots] == resident).all(), "an expert's slot belongs to another"
        assert all(self.owner[load.slot] == key for key, load in self.loads.items()), "a load lost its slot"
        owned = np.sort(np.concatenate([slots, loading]))
        assert np.array_equal(owned, np.flatnonzero(self.owner >= 0)), "a slot is used twice or by nobody"
        assert (self.pins >= 0).all(), "a pin was dropped twice"
        assert (self.pins[loading] > 0).all(), "a load does not pin its slot"
        orphans = (self.owner < 0) & (self.pins > 0)
        assert np.count_nonzero(orphans) == self._orphans, "a failed load's slot was lost"
        free = np.sort(np.array(self.free, np.int64))
        assert np.array_equal(free, np.flatnonzero((self.owner < 0) & (self.pins == 0))), "the free list is wrong"
        if idle:
            assert not self.pins.any(), f"{self.tier.name}: {np.count_nonzero(self.pins)} slots are still pinned"
            assert not self.loads, f"{self.tier.name}: {list(self.loads.values())} never ended"
