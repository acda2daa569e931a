"""Tracks the slots of one tier on one device: their experts, pins and flags, and which are free.

Only residency changes a pool. `Transfer` is one load into a slot; `PrefetchPriority` orders requests for loads.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.experts.tiers.eviction import ALWAYS
from edgemoe.experts.tiers.residency_records import CLASS, GONE, NONE, POOL, SHORTLIST, TRANSIENT, UNUSED, SharedRecord
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import LivePolicy, Tier
from edgemoe.types.size_classes import SlabLayout

BoolArray = npt.NDArray[np.bool_]


class Transfer:
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
        """States what is to be done.

        `cold` is a copy that had to wait for a read from NVMe, `near` a prefetch for the layers that come next.
        """
        self.pool, self.layer, self.expert, self.slot, self.source = pool, layer, expert, slot, source
        self.cold = cold or source < 0  # comes from NVMe
        self.near = near
        self.error: Exception | None = None

    @property
    def demand(self) -> bool:
        """Returns whether somebody waits for it, while it is under way."""
        return bool(self.pool.demanded[self.slot])

    @property
    def urgency(self) -> int:
        """Returns what it overtakes: anything of less."""
        return 2 if self.demand else int(self.near)

    @property
    def has_ended(self) -> bool:
        """Returns whether it has failed, or its expert is resident in the slot."""
        return self.error is not None or self.pool.where.item(self.layer, self.expert) == self.slot

    def __repr__(self) -> str:
        return f"Transfer(layer {self.layer}, expert {self.expert} -> {self.pool.tier.name} slot {self.slot})"


class TierUsage(NamedTuple):
    """How full a tier is, over all of its pools, and what has come into it since the start."""

    slots: int
    used: int  # of them, resident or on its way
    moved: int  # experts that came in
    prefetched: int  # of these, before they were demanded
    wasted: int  # of these, evicted before they were demanded
    promoted: int  # prefetches that were demanded on their way
    withdrawn: int  # prefetches that were given up on their way
    size_bytes: int  # of the slots
    moved_bytes: int
    wasted_bytes: int


class Ranks(NamedTuple):
    """A policy's ranks [L, E], to be kept while their address is used."""

    array: FloatArray
    address: int


class SlotClass:
    """Holds what is known of a pool's slots of one size, in a CLASS record."""

    def __init__(self, first: int, slots: int, expert_bytes: int) -> None:
        """Begins with none of the slots, from `first` on."""
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
        """Makes these slots free, the lowest to be taken first."""
        self._free[: len(slots)] = slots[::-1]
        self.record["free_count"] = len(slots)


class SlotClaim(NamedTuple):
    """Holds the result of `acquire`. Every slot in it is pinned until `release`."""

    slots: IntArray  # [n] slot of each expert; NONE where there was no room
    ready: BoolArray  # [n] whether its bytes are there; else it is on its way
    loads: Sequence[Transfer]  # to hand to the loader
    version: int  # for `wait_for_change`


class SlotPool:
    """Holds what is known of slots [S] for L x E experts, in a POOL record. Residency's compiled calls change it."""

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
        self.where: IntArray = record.array("where", (layers, experts), NONE)  # [L, E] slot of what is resident
        self.coming: IntArray = record.array("coming", (layers, experts), NONE)  # [L, E] of what is on its way
        self.owner: IntArray = record.array("owner", count, GONE)  # [S] layer * E + expert, resident or on its way
        self.pins: IntArray = record.array("pins", count)  # [S]
        self.source: IntArray = record.array("source", count, NONE)  # [S] in RAM, of what is on its way
        self.demanded: IntArray = record.array("demanded", count)  # [S] whether somebody waits for what is on its way
        self.class_of: IntArray = record.array("class_of", count)  # [S] size class
        for name in ("flags", "born", "cold"):
            record.array(name, count)
        record.array("utility", count, dtype=np.float32)
        record.array("victims", experts)
        record.array("victim_keys", experts, dtype=np.float32)
        record["tier"], record["slots"] = tier, count
        self._ranks: Ranks | None = None  # seen last
        self.classes = tuple(SlotClass(layout.first(i), layout.slots(i), layout.classes.bytes[i]) for i in sizes)
        record.set_array("classes", np.array([each.record.address for each in self.classes]))
        self.extents: IntArray = np.repeat(sizes, layout.divided())  # [X] size class of each extent
        self._divide()

    def _divide(self) -> None:
        """Makes free slots of all extents."""
        for i, (each, per) in enumerate(zip(self.classes, self.layout.per_extent, strict=True)):
            first = self.layout.first(i)
            self.class_of[first : first + self.layout.slots(i)] = i
            mine = np.flatnonzero(self.extents == i)
            slots = first + (mine[:, None] * per + np.arange(per)).ravel()
            self.owner[slots] = NONE
            each.set_free(slots)

    def extent(self, number: int, size_class: int) -> tuple[int, int]:
        """Returns the first slot that an extent makes for a class, and how many it makes."""
        per = self.layout.per_extent[size_class]
        return self.layout.first(size_class) + number * per, per

    def slots_of(self, size_class: int) -> int:
        """Returns how many slots a class has now."""
        return int(np.count_nonzero(self.extents == size_class)) * self.layout.per_extent[size_class]

    @property
    def slots(self) -> int:
        """Returns how many slots there are now."""
        return sum(self.slots_of(size_class) for size_class in range(len(self.classes)))

    @property
    def free(self) -> list[int]:
        """Returns the slots that are free."""
        return [slot for each in self.classes for slot in each.free]

    @property
    def free_count(self) -> int:
        """Returns how many slots are free."""
        return self._sum("free_count")

    @property
    def usage(self) -> TierUsage:
        """Returns how full the pool is, and what has come into it."""
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
    def loads(self) -> dict[int, Transfer]:
        """Returns what is on its way, by owner."""
        keys = np.flatnonzero(self.coming >= 0).tolist()
        return {key: self.transfer(int(self.coming.ravel()[key]), *divmod(key, self.experts)) for key in keys}

    def transfer(self, slot: int, layer: int, expert: int, *, cold: bool = False) -> Transfer:
        """Returns the transfer of the expert into the slot."""
        return Transfer(self, layer, expert, slot, int(self.source[slot]), cold=cold)

    def set_index(self, index: int) -> None:
        """Makes this the residency's pool of that number."""
        self.index = self._record["index"] = index

    def ranks(self, layer: int) -> Ranks:
        """Returns the policy's ranks while `layer` runs."""
        ranks, seen = self.policy.rank(layer), self._ranks
        if seen is None or seen.array is not ranks:  # to ask for an address takes as long as all else
            floats = np.ascontiguousarray(ranks, np.float32)
            self._ranks = seen = Ranks(floats, floats.ctypes.data)
        return seen

    def check_integrity(self, *, idle: bool) -> None:
        """Asserts that slots, owners, pins, loads and the free list agree."""
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
        """Asserts that slots are those of the classes' extents, that each expert is in a slot of its own class."""
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


class Waiters:
    """Knows how many threads wait, so that nobody takes a lock where none does."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def wake(self) -> None:
        """Wakes all."""
        if self.count:
            with self._changed:
                self._changed.notify_all()

    def wait_for(self, changed: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `changed`. Returns False where it has not within `timeout_s`."""
        with self._changed:
            self.count += 1  # before looking, so that no change goes unnoticed
            try:
                return self._changed.wait_for(changed, timeout_s)
            finally:
                self.count -= 1


PREFILL_ONLY_UTILITY = -1e29  # prefetched for prefill only: replaces prefill-only experts only


class PrefetchPriority(enum.IntEnum):
    """The reason of a prefetch request. Lower numbers are served first."""

    NEAR = 0  # the layers that come next
    PREFILL_ONLY = 1  # the next layer of a prefill
    HOME = 2  # what the boxes agreed to keep here
    USED = 3  # what the CPU has just computed in a device's stead
    FAR = 4  # everything later: the controller's
    FILL = 5  # anything, into slots that are free

    @property
    def for_one_layer(self) -> bool:
        """Returns whether such a prefetch is in vain once its layer has run without it."""
        return self in (PrefetchPriority.NEAR, PrefetchPriority.PREFILL_ONLY)

    @property
    def flags(self) -> int:
        """Returns the flags of the slot that the expert is loaded into."""
        return (UNUSED, UNUSED | TRANSIENT, 0, 0, UNUSED, TRANSIENT)[self]

    def utility(self, score: float) -> float:
        """Returns the utility of a request with `score`, which replaces experts of lower rank."""
        return (score, PREFILL_ONLY_UTILITY, ALWAYS, ALWAYS, score, -ALWAYS)[self]
