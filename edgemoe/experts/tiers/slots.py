"""Tracks the slots of one tier on one device: their experts, pins and flags, and which are free.

Only residency changes a pool. `SlotTransfer` is one load into a slot; `PrefetchPriority` orders requests for loads.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.experts.tiers.residency_records import (
    ALWAYS,
    CLASS,
    GONE,
    NONE,
    POOL,
    SHORTLIST,
    TRANSIENT,
    UNUSED,
    SharedRecord,
)
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import LivePolicy, Tier
from edgemoe.types.size_classes import SlabLayout

BoolArray = npt.NDArray[np.bool_]


class SlotTransfer:
    """A transfer of one expert into one slot, from the RAM slot `source` or, without one, from NVMe."""

    __slots__ = ("cold", "error", "expert", "layer", "near", "pool", "slot", "source")

    def __init__(
        self,
        pool: SlotPool,
        layer: int,
        expert: int,
        slot: int,
        source: int = NONE,
        *,
        cold: bool = False,
        near: bool = False,
    ) -> None:
        """Describes the load.

        A `cold` copy had to wait for a read from NVMe. A `near` one is a prefetch for the next layers.
        """
        self.pool, self.layer, self.expert, self.slot, self.source = pool, layer, expert, slot, source
        self.cold = cold or source < 0  # comes from NVMe
        self.near = near
        self.error: Exception | None = None

    @property
    def demand(self) -> bool:
        """Whether a layer-step waits for it, while it is under way."""
        return bool(self.pool.demanded[self.slot])

    @property
    def urgency(self) -> int:
        """Its rank among loads: a load overtakes loads of lower urgency."""
        return 2 if self.demand else int(self.near)

    @property
    def has_ended(self) -> bool:
        """Whether it has failed, or its expert is resident in the slot."""
        return self.error is not None or self.pool.where.item(self.layer, self.expert) == self.slot

    def __repr__(self) -> str:
        return f"SlotTransfer(layer {self.layer}, expert {self.expert} -> {self.pool.tier.name} slot {self.slot})"


class TierUsage(NamedTuple):
    """The slots in use of a tier, over all its pools, and the experts that came into it since the start."""

    slots: int
    used: int  # slots with an expert, resident or being loaded
    moved: int  # experts that came in
    prefetched: int  # experts that came in before a demand
    wasted: int  # prefetched experts that were evicted before a demand
    promoted: int  # prefetches that were demanded while under way
    withdrawn: int  # prefetches that were given up while under way
    size_bytes: int  # of all slots
    moved_bytes: int
    wasted_bytes: int


class PolicyRanks(NamedTuple):
    """A policy's ranks [L, E]; the array must live while its address is used."""

    array: FloatArray
    address: int


class SlotClass:
    """Tracks a pool's slots of one size class, in a CLASS record."""

    def __init__(self, first: int, slots: int, expert_bytes: int) -> None:
        """Begins with no free slot; the class's slots are numbered from `first` on."""
        self.expert_bytes = expert_bytes
        self.record = record = SharedRecord(CLASS)
        self._free: IntArray = record.array("free", slots, NONE)  # a stack
        for name in ("least", "least_owners"):
            record.array(name, SHORTLIST)
        record.array("least_keys", SHORTLIST, dtype=np.float32)
        record["first"], record["end"], record["least_at"] = first, first + slots, NONE

    @property
    def free(self) -> list[int]:
        """Returns the slots that are free."""
        return self._free[: self.record["free_count"]].tolist()  # type: ignore[no-any-return]

    def set_free(self, slots: IntArray) -> None:
        """Makes these slots free; the lowest is claimed first."""
        self._free[: len(slots)] = slots[::-1]
        self.record["free_count"] = len(slots)


class SlotClaim(NamedTuple):
    """The result of `acquire`. Every slot in it is pinned until `release`."""

    slots: IntArray  # [n] slot of each expert; NONE if there was no room
    ready: BoolArray  # [n] whether the expert is resident; otherwise it is being loaded
    loads: Sequence[SlotTransfer]  # to hand to the loader
    version: int  # for `wait_for_change`


class SlotPool:
    """Tracks the slots [S] for L x E experts, in a POOL record. Only residency's compiled operations change it."""

    def __init__(self, tier: Tier, layers: int, experts: int, slots: int | SlabLayout, policy: LivePolicy) -> None:
        """Takes the layout of the pool's slab, or a number of equal slots."""
        if isinstance(slots, int):
            slots = SlabLayout.even(slots, layers=layers, experts=experts)
        self.layout = layout = slots
        self.tier, self.layers, self.experts, self.policy = tier, layers, experts, policy
        self.layer_class: IntArray = np.array(layout.classes.layer_class, np.int64)  # [L]
        self.index = 0  # among residency's pools
        sizes = range(len(layout.per_extent))
        count = layout.count
        self._record = record = SharedRecord(POOL)
        self.address = record.address
        self.where: IntArray = record.array("where", (layers, experts), NONE)  # [L, E] slot of each resident expert
        self.coming: IntArray = record.array("coming", (layers, experts), NONE)  # [L, E] slot of each load
        self.owner: IntArray = record.array("owner", count, GONE)  # [S] layer * E + expert, resident or being loaded
        self.pins: IntArray = record.array("pins", count)  # [S]
        self.source: IntArray = record.array("source", count, NONE)  # [S] RAM slot that a load copies from
        self.demanded: IntArray = record.array("demanded", count)  # [S] whether a layer-step waits for the load
        self.class_of: IntArray = record.array("class_of", count)  # [S] size class
        for name in ("flags", "born", "cold"):
            record.array(name, count)
        record.array("utility", count, dtype=np.float32)
        record.array("victims", experts)
        record.array("victim_keys", experts, dtype=np.float32)
        record["tier"], record["slots"] = tier, count
        self._ranks: PolicyRanks | None = None  # of the latest call
        self.classes = tuple(SlotClass(layout.first(i), layout.slots(i), layout.classes.bytes[i]) for i in sizes)
        record.set_array("classes", np.array([each.record.address for each in self.classes]))
        self.extents: IntArray = np.repeat(sizes, layout.divided())  # [X] size class of each extent
        self._divide()

    def _divide(self) -> None:
        """Divides all extents into free slots."""
        for i, (each, per) in enumerate(zip(self.classes, self.layout.per_extent, strict=True)):
            first = self.layout.first(i)
            self.class_of[first : first + self.layout.slots(i)] = i
            mine = np.flatnonzero(self.extents == i)
            slots = first + (mine[:, None] * per + np.arange(per)).ravel()
            self.owner[slots] = NONE
            each.set_free(slots)

    def extent(self, number: int, size_class: int) -> tuple[int, int]:
        """Returns the first slot and the number of slots that an extent has in a class."""
        per = self.layout.per_extent[size_class]
        return self.layout.first(size_class) + number * per, per

    def slots_of(self, size_class: int) -> int:
        """Counts the slots that a class has now."""
        return int(np.count_nonzero(self.extents == size_class)) * self.layout.per_extent[size_class]

    @property
    def slots(self) -> int:
        """The number of slots now."""
        return sum(self.slots_of(size_class) for size_class in range(len(self.classes)))

    @property
    def free(self) -> list[int]:
        """The free slots of all classes."""
        return [slot for each in self.classes for slot in each.free]

    @property
    def free_count(self) -> int:
        """The number of free slots."""
        return self._sum("free_count")

    @property
    def usage(self) -> TierUsage:
        """The slots in use, and the counts of experts that came in."""
        slots, sizes = self.slots, [each.expert_bytes for each in self.classes]
        counted = ("moved", "prefetched", "wasted", "promoted", "withdrawn")
        by_class = {name: [each.record[name] for each in self.classes] for name in counted}
        held = [self.slots_of(i) for i in range(len(sizes))]
        return TierUsage(
            slots=slots,
            used=slots - self.free_count,
            moved=sum(by_class["moved"]),
            prefetched=sum(by_class["prefetched"]),
            wasted=sum(by_class["wasted"]),
            promoted=sum(by_class["promoted"]),
            withdrawn=sum(by_class["withdrawn"]),
            size_bytes=int(np.dot(held, sizes)),
            moved_bytes=int(np.dot(by_class["moved"], sizes)),
            wasted_bytes=int(np.dot(by_class["wasted"], sizes)),
        )

    def _sum(self, name: str) -> int:
        return sum(each.record[name] for each in self.classes)

    @property
    def loads(self) -> dict[int, SlotTransfer]:
        """The loads under way, by the key of their expert."""
        keys = np.flatnonzero(self.coming >= 0).tolist()
        return {key: self.transfer(int(self.coming.ravel()[key]), *divmod(key, self.experts)) for key in keys}

    def transfer(self, slot: int, layer: int, expert: int, *, cold: bool = False) -> SlotTransfer:
        """Returns the transfer of the expert into the slot."""
        return SlotTransfer(self, layer, expert, slot, int(self.source[slot]), cold=cold)

    def set_index(self, index: int) -> None:
        """Sets the pool's number among residency's pools."""
        self.index = self._record["index"] = index

    def ranks(self, layer: int) -> PolicyRanks:
        """Returns the policy's ranks while `layer` runs."""
        ranks, seen = self.policy.rank(layer), self._ranks
        if seen is None or seen.array is not ranks:  # asking for an address takes as long as the rest
            floats = np.ascontiguousarray(ranks, np.float32)
            self._ranks = seen = PolicyRanks(floats, floats.ctypes.data)
        return seen

    def check_integrity(self, *, idle: bool) -> None:
        """Checks slots, owners, pins, loads and the free list against each other. Raises AssertionError."""
        resident, coming = np.flatnonzero(self.where.ravel() >= 0), np.flatnonzero(self.coming.ravel() >= 0)
        slots, loading = self.where.ravel()[resident], self.coming.ravel()[coming]
        assert (self.owner[slots] == resident).all(), "an expert's slot belongs to another"
        assert (self.owner[loading] == coming).all(), "a load lost its slot"
        owned = np.sort(np.concatenate([slots, loading]))
        assert np.array_equal(owned, np.flatnonzero(self.owner >= 0)), "a slot is used twice or by nobody"
        assert (self.pins >= 0).all(), "a pin was dropped twice"
        assert (self.pins[loading] > 0).all(), "a load does not pin its slot"
        orphans = (self.owner == NONE) & (self.pins > 0)
        assert np.count_nonzero(orphans) == self._record["orphans"], "a failed load's slot was lost"
        free = np.sort(np.array(self.free, np.int64))
        assert np.array_equal(free, np.flatnonzero((self.owner == NONE) & (self.pins == 0))), "the free list is wrong"
        self._check_bytes()
        if idle:
            assert not self.pins.any(), f"{self.tier.name}: {np.count_nonzero(self.pins)} slots are still pinned"
            assert not len(loading), f"{self.tier.name}: {list(self.loads.values())} never ended"

    def _check_bytes(self) -> None:
        """Checks slots against the classes' extents, and each expert against the class of its slot."""
        layout, expected = self.layout, np.full(len(self.owner), GONE)
        for number, size_class in enumerate(self.extents.tolist()):
            if size_class >= 0:
                first, count = self.extent(number, size_class)
                expected[first : first + count] = NONE
        assert np.array_equal(self.owner == GONE, expected == GONE), "a slot is in no extent of its class"
        owned = np.flatnonzero(self.owner >= 0)
        mine = self.layer_class[self.owner[owned] // self.experts]
        assert np.array_equal(mine, self.class_of[owned]), "an expert is in a slot of another size"
        places = sorted(layout.place(slot) for slot in np.flatnonzero(self.owner != GONE).tolist())
        ends = [start + size for start, size in places]
        assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False)), "two slots overlap"
        assert not ends or ends[-1] <= layout.size_bytes, "a slot ends behind the slab"


class ResidencyWaiters:
    """Wakes threads that wait for a change of residency. Takes no lock while no thread waits."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def wake(self) -> None:
        """Wakes all waiting threads."""
        if self.count:
            with self._changed:
                self._changed.notify_all()

    def wait_for(self, changed: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `changed()`. Returns False after `timeout_s` without it."""
        with self._changed:
            self.count += 1  # before the first check, so that no change is missed
            try:
                return self._changed.wait_for(changed, timeout_s)
            finally:
                self.count -= 1


PREFILL_ONLY_UTILITY = -1e29  # of a prefetch for prefill only: it replaces prefill-only experts only


class PrefetchPriority(enum.IntEnum):
    """The reason of a prefetch request. Lower numbers are served first."""

    NEAR = 0  # the layers that come next
    PREFILL_ONLY = 1  # the next layer of a prefill
    HOME = 2  # home experts by the placement plan
    USED = 3  # experts that a step has just computed from RAM
    FAR = 4  # everything later, planned by the controller
    FILL = 5  # any expert, into free slots

    @property
    def for_one_layer(self) -> bool:
        """Whether the prefetch is useless once its layer has run without it."""
        return self in (PrefetchPriority.NEAR, PrefetchPriority.PREFILL_ONLY)

    @property
    def flags(self) -> int:
        """The flags of the slot that the expert is loaded into."""
        return (UNUSED, UNUSED | TRANSIENT, 0, 0, UNUSED, TRANSIENT)[self]

    def utility(self, score: float) -> float:
        """Returns the utility of a request with `score`, which replaces experts of lower rank."""
        return (score, PREFILL_ONLY_UTILITY, ALWAYS, score, score, -ALWAYS)[self]
