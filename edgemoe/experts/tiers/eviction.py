"""Who has to go when a slot is needed: the policy's rank, and what the policy cannot know on top of it.

A scan's leavings go before all else, those of the layers that come last in its round first. A prefetched expert
keeps its worth until its layer has run. What the running layer-step still needs goes last; what is pinned, or at
home here, does not go. Not thread-safe: residency holds the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgemoe.experts.tiers.slots import NONE, TRANSIENT, UNUSED, BoolArray, SlotPool
from edgemoe.types.arrays import IntArray

ALWAYS = np.inf  # worth of a demand: takes the place of anything that nobody needs now
LAST = float(np.finfo(np.float32).max)  # a former home's: only a home takes its place
SHORTLIST = 32  # victims that the wishes of one layer-step share
TRANSIENT_KEY = -1e30  # a scan's leavings: below whatever a policy says


class Evictor:
    """Empties slots of the RAM pool and of the devices' pools."""

    def __init__(self, ram: SlotPool, devices: Sequence[SlotPool], *, containment: bool) -> None:
        self.clock = 0  # layer-steps begun
        self.homes: BoolArray | None = None  # [L * E] never dropped from RAM
        self.former = np.zeros(ram.where.size, np.bool_)  # [L * E] homes of before, which others may not have yet
        self._ram, self._devices, self._containment = ram, devices, containment
        self._layer = 0  # that runs
        self._visited = np.full(ram.layers, NONE, np.int64)  # [L] clock of each layer's last visit
        self._needed = np.full(ram.where.size, NONE, np.int64)  # [L * E] clock of the layer-step that needs it

    def begin(self, layer: int) -> None:
        """A layer-step begins."""
        self.clock += 1
        self._layer = layer
        self._visited[layer] = self.clock

    def need(self, layer: int, experts: IntArray) -> None:
        """The running layer-step needs these experts [n]."""
        self._needed[layer * self._ram.experts + experts] = self.clock

    def done(self, layer: int, experts: IntArray) -> None:
        """It needs them no more."""
        self._needed[layer * self._ram.experts + experts] = NONE

    def keep(self, homes: BoolArray) -> None:
        """These experts [L, E] are at home in RAM; those that were stay longest of all others until `forget_former`."""
        present = self._ram.where.ravel() >= 0
        was = self.former if self.homes is None else self.former | self.homes
        self.homes = homes.ravel().copy()
        self.former = was & present & ~self.homes
        self._ram.shortlist_at = NONE

    def forget_former(self) -> None:
        """What was at home here before is worth no more than the policy says."""
        self.former[:] = False
        self._ram.shortlist_at = NONE

    def take(self, pool: SlotPool, n: int) -> list[int]:
        """Up to `n` empty slots: free ones, then those of what is worth least."""
        slots = [pool.free.pop() for _ in range(min(n, len(pool.free)))]
        if len(slots) < n:
            evictor, keys = self._worths(pool)
            slots += self._evict(pool, _lowest(evictor, keys, n - len(slots))).tolist()
        return slots

    def take_below(self, pool: SlotPool, utility: float) -> int | None:
        """An empty slot: a free one, or that of what is worth least if that is less than `utility`."""
        if pool.free:
            return pool.free.pop()
        if utility == -ALWAYS:
            return None
        if pool.shortlist_at != self.clock:  # ranking all for every wish of a layer-step would cost too much
            evictor, keys = self._worths(pool)
            least = _lowest(np.arange(len(evictor)), keys, SHORTLIST)
            order = least[np.argsort(-keys[least])]
            listed = (keys[order], evictor[order], pool.owner[evictor[order]])
            pool.shortlist = list(zip(*(part.tolist() for part in listed), strict=True))
            pool.shortlist_at = self.clock
        while pool.shortlist and pool.shortlist[-1][0] < utility:
            _, slot, owner = pool.shortlist.pop()
            if not pool.shortlist:
                pool.shortlist_at = NONE  # used up: between layer-steps there may be many wishes
            if pool.owner[slot] == owner and self._may_go(pool, slot, owner):
                return int(self._evict(pool, np.array([slot]))[0])
        return None

    def _may_go(self, pool: SlotPool, slot: int, owner: int) -> bool:
        """Nobody pins the slot, or a copy that would go with it."""
        pinned = pool.pins[slot] > 0
        if pool is self._ram and self._containment:
            copies = [(top, top.where.ravel()[owner]) for top in self._devices]
            pinned |= any(copy >= 0 and top.pins[copy] for top, copy in copies)
        return not pinned

    def _evict(self, pool: SlotPool, slots: IntArray) -> IntArray:
        """Forgets what lies in the unpinned slots, which are the caller's then."""
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
        """The slots [n] that may be taken, and what keeping each one's expert is worth."""
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
        """Worth of keeping what lies in each slot [n]."""
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
    """The items [m] that have the `n` lowest keys [m], in no order."""
    return items[np.argpartition(keys, n - 1)[:n]] if len(items) > n else items
