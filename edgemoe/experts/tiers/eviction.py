"""Chooses which expert to evict when a slot is needed: by the policy's rank, and by what the policy cannot know.

Experts loaded for prefill only are evicted first, those whose layers run last first of all. A prefetched expert keeps
the utility of its request until its layer has run. Experts that the running layer-step still needs are evicted last.
Pinned experts, and those at home here, are not evicted. Not thread-safe: residency holds the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgemoe.experts.tiers.slots import NONE, TRANSIENT, UNUSED, BoolArray, SlotPool
from edgemoe.types.arrays import IntArray

ALWAYS = np.inf  # utility of a demand, which replaces anything that is not needed now
LAST = float(np.finfo(np.float32).max)  # utility of a former home, which only a home replaces
SHORTLIST = 32  # candidates for eviction that the prefetch requests of one layer-step share
TRANSIENT_KEY = -1e30  # of prefill-only experts, below every rank of a policy


class Evictor:
    """Evicts experts from the RAM pool and the devices' pools."""

    def __init__(self, ram: SlotPool, devices: Sequence[SlotPool], *, containment: bool) -> None:
        self.clock = 0  # layer-steps begun
        self.homes: BoolArray | None = None  # [L * E] never dropped from RAM
        self.former = np.zeros(ram.where.size, np.bool_)  # [L * E] homes of before, which others may not have yet
        self._ram, self._devices, self._containment = ram, devices, containment
        self._layer = 0  # that runs
        self._visited = np.full(ram.layers, NONE, np.int64)  # [L] clock of each layer's last visit
        self._needed = np.full(ram.where.size, NONE, np.int64)  # [L * E] clock of the layer-step that needs it

    def begin(self, layer: int) -> None:
        """Starts a layer-step."""
        self.clock += 1
        self._layer = layer
        self._visited[layer] = self.clock

    def need(self, layer: int, experts: IntArray) -> None:
        """Marks experts [n] as needed by the running layer-step."""
        self._needed[layer * self._ram.experts + experts] = self.clock

    def done(self, layer: int, experts: IntArray) -> None:
        """Marks experts [n] as no longer needed by the running layer-step."""
        self._needed[layer * self._ram.experts + experts] = NONE

    def keep(self, homes: BoolArray) -> None:
        """Sets which experts [L, E] are at home in RAM. Former homes are evicted last until `forget_former`."""
        present = self._ram.where.ravel() >= 0
        was = self.former if self.homes is None else self.former | self.homes
        self.homes = homes.ravel().copy()
        self.former = was & present & ~self.homes
        self._ram.shortlist_at = NONE

    def forget_former(self) -> None:
        """Ranks former homes by the policy again."""
        self.former[:] = False
        self._ram.shortlist_at = NONE

    def take(self, pool: SlotPool, n: int) -> list[int]:
        """Returns up to `n` empty slots: free ones, then those of the lowest utility, whose experts it evicts."""
        slots = [pool.free.pop() for _ in range(min(n, len(pool.free)))]
        if len(slots) < n:
            evictor, keys = self._worths(pool)
            slots += self._evict(pool, _lowest(evictor, keys, n - len(slots))).tolist()
        return slots

    def take_below(self, pool: SlotPool, utility: float) -> int | None:
        """Returns a free slot, or evicts the expert of lowest utility if that is below `utility`; else None."""
        if pool.free:
            return pool.free.pop()
        if utility == -ALWAYS:
            return None
        if pool.shortlist_at != self.clock:  # ranking all for every prefetch request would cost too much
            evictor, keys = self._worths(pool)
            least = _lowest(np.arange(len(evictor)), keys, SHORTLIST)
            order = least[np.argsort(-keys[least])]
            listed = (keys[order], evictor[order], pool.owner[evictor[order]])
            pool.shortlist = list(zip(*(part.tolist() for part in listed), strict=True))
            pool.shortlist_at = self.clock
        while pool.shortlist and pool.shortlist[-1][0] < utility:
            _, slot, owner = pool.shortlist.pop()
            if not pool.shortlist:
                pool.shortlist_at = NONE  # used up: between layer-steps there may be many requests
            if pool.owner[slot] == owner and self._may_go(pool, slot, owner):
                return int(self._evict(pool, np.array([slot]))[0])
        return None

    def _may_go(self, pool: SlotPool, slot: int, owner: int) -> bool:
        """Returns whether neither the slot nor a copy that would be evicted with it is pinned."""
        pinned = pool.pins[slot] > 0
        if pool is self._ram and self._containment:
            copies = [(top, top.where.ravel()[owner]) for top in self._devices]
            pinned |= any(copy >= 0 and top.pins[copy] for top, copy in copies)
        return not pinned

    def _evict(self, pool: SlotPool, slots: IntArray) -> IntArray:
        """Evicts the experts in the unpinned slots, and returns the slots, which the caller then owns."""
        if pool is self._ram and self._containment:
            self._drop_copies(pool.owner[slots])
        pool.evict(slots)
        return slots

    def _drop_copies(self, owners: IntArray) -> None:
        for top in self._devices:
            copies = top.where.ravel()[owners]
            copies = copies[copies >= 0]
            top.evict(copies)
            top.free.extend(copies.tolist())

    def _worths(self, pool: SlotPool) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Returns the slots [n] that may be evicted, and the utility of keeping each one's expert, [n]."""
        slots = np.flatnonzero((pool.pins == 0) & (pool.owner >= 0))
        if pool is self._ram and self.homes is not None:
            slots = slots[~self.homes[pool.owner[slots]]]
        transient = (pool.flags[slots] & TRANSIENT) > 0
        if pool is self._ram and self._containment:
            for top in self._devices:
                copies = top.where.ravel()[pool.owner[slots]]
                transient &= (copies < 0) | ((top.flags[copies] & TRANSIENT) > 0)
                kept = (copies < 0) | (top.pins[copies] == 0)
                slots, transient = slots[kept], transient[kept]
        return slots, self._keys(pool, slots, transient)

    def _keys(self, pool: SlotPool, slots: IntArray, transient: BoolArray) -> npt.NDArray[np.float32]:
        """Returns the utility of keeping the expert in each slot [n]."""
        owners = pool.owner[slots]
        layers = owners // pool.experts
        keys = pool.policy.rank(self._layer).ravel()[owners].astype(np.float32)
        distance = (layers - self._layer - 1) % pool.layers
        keys[transient] = (TRANSIENT_KEY * (1.0 + distance / pool.layers))[transient]
        awaited = ((pool.flags[slots] & UNUSED) > 0) & (self._visited[layers] <= pool.born[slots])
        np.maximum(keys, pool.utility[slots], out=keys, where=awaited)
        if pool is self._ram:
            keys[self.former[owners]] = LAST
        keys[self._needed[owners] == self.clock] = ALWAYS
        return keys


def _lowest(items: IntArray, keys: npt.NDArray[np.float32], n: int) -> IntArray:
    """Returns the `n` items of [m] with the lowest keys [m], in no order."""
    return items[np.argpartition(keys, n - 1)[:n]] if len(items) > n else items
