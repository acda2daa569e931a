"""One tier's slots on one device: their experts, pins and flags, and which are free. Used by residency only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.experts.tiers.records import NONE, POOL, SHORTLIST, SharedRecord
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import LivePolicy, Tier

BoolArray = npt.NDArray[np.bool_]


class Transfer:
    """A transfer of one expert into one slot, from the RAM slot `source` or, without one, from NVMe."""

    __slots__ = ("cold", "error", "expert", "layer", "pool", "slot", "source")

    def __init__(
        self, pool: SlotPool, layer: int, expert: int, slot: int, source: int = NONE, *, cold: bool = False
    ) -> None:
        """States what is to be done. `cold` is a copy that had to wait for a read from NVMe."""
        self.pool, self.layer, self.expert, self.slot, self.source = pool, layer, expert, slot, source
        self.cold = cold or source < 0  # comes from NVMe
        self.error: Exception | None = None

    @property
    def demand(self) -> bool:
        """Returns whether somebody waits for it, while it is under way."""
        return bool(self.pool.demanded[self.slot])

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


class Ranks(NamedTuple):
    """A policy's ranks [L, E], to be kept while their address is used."""

    array: FloatArray
    address: int


class SlotPool:
    """Holds what is known of slots [S] for L x E experts, in a POOL record. Residency's compiled calls change it."""

    def __init__(self, tier: Tier, layers: int, experts: int, slots: int, policy: LivePolicy) -> None:
        self.tier, self.layers, self.experts, self.slots = tier, layers, experts, slots
        self.policy = policy
        self.index = 0  # among residency's pools
        self._record = record = SharedRecord(POOL)
        self.address = record.address
        self.where: IntArray = record.array("where", (layers, experts), NONE)  # [L, E] slot of what is resident
        self.coming: IntArray = record.array("coming", (layers, experts), NONE)  # [L, E] of what is on its way
        self.owner: IntArray = record.array("owner", slots, NONE)  # [S] layer * E + expert, resident or on its way
        self.pins: IntArray = record.array("pins", slots)  # [S]
        self.source: IntArray = record.array("source", slots, NONE)  # [S] in RAM, of what is on its way
        self.demanded: IntArray = record.array("demanded", slots)  # [S] whether somebody waits for what is on its way
        self._free: IntArray = record.take("free", np.arange(slots)[::-1].copy())  # [S] a stack
        for name in ("flags", "born", "cold"):
            record.array(name, slots)
        record.array("utility", slots, dtype=np.float32)
        for name, count in (("victims", experts), ("least", SHORTLIST), ("least_owners", SHORTLIST)):
            record.array(name, count)
        for name, count in (("victim_keys", experts), ("least_keys", SHORTLIST)):
            record.array(name, count, dtype=np.float32)
        record["tier"], record["slots"], record["free_count"], record["least_at"] = tier, slots, slots, NONE
        self._ranks: Ranks | None = None  # seen last

    @property
    def free(self) -> list[int]:
        """Returns the slots that are free."""
        return self._free[: self.free_count].tolist()  # type: ignore[no-any-return]

    @property
    def free_count(self) -> int:
        """Returns how many slots are free."""
        return self._record["free_count"]

    @property
    def moved(self) -> int:
        """Returns how many experts came in."""
        return self._record["moved"]

    @property
    def prefetched(self) -> int:
        """Returns how many of these came before they were demanded."""
        return self._record["prefetched"]

    @property
    def wasted(self) -> int:
        """Returns how many of these were evicted before they were demanded."""
        return self._record["wasted"]

    @property
    def loads(self) -> dict[int, Transfer]:
        """Returns what is on its way, by owner."""
        keys = np.flatnonzero(self.coming >= 0).tolist()
        return {key: self.transfer(int(self.coming.ravel()[key]), *divmod(key, self.experts)) for key in keys}

    def transfer(self, slot: int, layer: int, expert: int, *, cold: bool = False) -> Transfer:
        """Returns the transfer of the expert into the slot."""
        return Transfer(self, layer, expert, slot, int(self.source[slot]), cold=cold)

    def join(self, index: int) -> None:
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
        orphans = (self.owner < 0) & (self.pins > 0)
        assert np.count_nonzero(orphans) == self._record["orphans"], "a failed load's slot was lost"
        free = np.sort(np.array(self.free, np.int64))
        assert np.array_equal(free, np.flatnonzero((self.owner < 0) & (self.pins == 0))), "the free list is wrong"
        if idle:
            assert not self.pins.any(), f"{self.tier.name}: {np.count_nonzero(self.pins)} slots are still pinned"
            assert not len(loading), f"{self.tier.name}: {list(self.loads.values())} never ended"
