"""Knows where every expert is: in RAM, in a device, or on its way.

An expert is in a tier when `where` names its slot there. While it is on its way, a `Transfer` holds the slot. A slot is
pinned by what needs it to stay: a forward that computes from it, a load that fills it, a copy that reads from it.
Evicting only forgets: weights are read-only, so nothing is copied back. With containment, every expert in a device is
in RAM too; dropping it from RAM drops it from the device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from edgemoe.experts.tiers.eviction import Evictor
from edgemoe.experts.tiers.fetches import fetch
from edgemoe.experts.tiers.home_experts import HomeExperts
from edgemoe.experts.tiers.prefetch_priority import PrefetchPriority
from edgemoe.experts.tiers.slots import NONE, TRANSIENT, BoolArray, SlotPool, Transfer
from edgemoe.experts.tiers.tier_pools import TierPools
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import Move, Tier


class SlotClaim(NamedTuple):
    """Holds the result of `acquire`. Every slot in it is pinned until `release`."""

    slots: IntArray  # [n] slot of each expert; NONE where there was no room
    ready: BoolArray  # [n] whether its bytes are there; else it is on its way
    loads: Sequence[Transfer]  # to hand to the loader
    version: int  # for `wait_for_change`


class Residency(TierPools):
    """Moves experts between the tiers. Thread-safe: every method is one short critical section."""

    def __init__(self, ram: SlotPool, devices: Sequence[SlotPool] = (), *, containment: bool = True) -> None:
        """Takes over the pools. With `containment`, what is in a device is in RAM too."""
        super().__init__(ram, devices)
        self.containment = containment
        self.served = [0, 0, 0]  # demanded experts by the tier that had them
        self._policies = tuple({id(pool.policy): pool.policy for pool in (*self.devices, ram)}.values())
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._version = 0  # counts what `wait_for_change` waits for
        self._waiting = 0  # threads in it
        self._evictor = Evictor(ram, self.devices, containment=containment)
        self.homes = HomeExperts(ram, self._evictor, self._lock)

    # --- the compute thread's calls -------------------------------------------------------------------------

    def begin(self, layer: int, demanded: IntArray) -> None:
        """Opens a layer-step. Tells the policies the distinct experts [n] that decoding tokens demand of the layer."""
        with self._lock:
            self._begin(layer, demanded)

    def pin_if_all_resident(
        self, device: int, layer: int, experts: IntArray, prefill_only: BoolArray | None
    ) -> IntArray | None:
        """Opens a layer-step as `begin` does, and pins the experts [n] if all of them are in the device.

        Returns their slots [n], pinned until `release`; None, with nothing pinned, where one is missing.
        `prefill_only` [n] marks those that only prefill needs: the policies do not see them as demanded.
        """
        top = self.tops[device]
        with self._lock:
            self._begin(layer, experts if prefill_only is None else experts[~prefill_only])
            slots: IntArray = top.where[layer].take(experts)
            if slots.min() < 0:
                return None
            top.pin(slots, prefill_only)
            self.served[top.tier] += len(slots)
            return slots

    def acquire(
        self,
        device: int,
        layer: int,
        experts: IntArray,
        arrivals: SimpleQueue[Transfer],
        *,
        prefill_only: BoolArray | None = None,
        limit: int | None = None,
    ) -> SlotClaim:
        """Pins the distinct `experts` [n] that are in the device, and slots for as many others as there is room.

        Experts marked in `prefill_only` [n] are the first to be evicted again. Begins at most `limit` loads. Puts each
        load under way into `arrivals` when its bytes are there, or when it has failed.
        """
        top = self.tops[device]
        with self._lock:
            slots: IntArray = top.where[layer].take(experts)
            ready = slots >= 0
            top.pin(slots[ready], None if prefill_only is None else prefill_only[ready])
            self.served[top.tier] += int(np.count_nonzero(ready))
            self._evictor.need(layer, experts)
            absent = self._join_loads(top, layer, experts, slots, prefill_only, arrivals)[:limit]
            flags = [TRANSIENT if prefill_only is not None and prefill_only[i] else 0 for i in absent]
            fetched = [int(experts[i]) for i in absent]
            begun, starts = fetch(self._evictor, self.ram, top, layer, fetched, flags)
            for i, load in zip(absent, begun, strict=True):
                if load is not None:
                    slots[i] = self._join(load, bool(top.flags[load.slot] & TRANSIENT), arrivals)
            return SlotClaim(slots, ready, starts, self._version)

    def release(self, device: int, slots: IntArray) -> None:
        """Unpins the distinct slots [n] of an earlier claim on the device."""
        with self._lock:
            self.tops[device].unpin(slots)
            if self._waiting:  # another thread's layer-step may find room now
                self._version += 1
                self._changed.notify_all()

    def done(self, layer: int, experts: IntArray) -> None:
        """Marks experts as computed by the running layer-step, which needs them no more."""
        self._evictor.done(layer, experts)

    def pin_in_ram(self, layer: int, experts: IntArray, prefill_only: BoolArray | None) -> IntArray:
        """Pins experts [n] in RAM, from where the CPU computes them beside a device.

        Returns their slots [n], pinned until `unpin`; NONE where an expert is not in RAM any more. `prefill_only` [n]
        marks those that only prefill needs.
        """
        with self._lock:
            slots: IntArray = self.ram.where[layer].take(experts)
            there = slots >= 0
            self.ram.pin(slots[there], None if prefill_only is None else prefill_only[there])
            self.served[Tier.RAM] += int(np.count_nonzero(there))
            return slots

    def wait_for_change(self, version: int, timeout_s: float) -> bool:
        """Waits until a load has ended or slots were unpinned since the claim of this version.

        Returns False where nothing changed within `timeout_s`.
        """
        with self._changed:
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: self._version != version, timeout_s)
            finally:
                self._waiting -= 1

    # --- the loader's calls -----------------------------------------------------------------------------------

    def reserve(self, move: Move, priority: PrefetchPriority) -> Transfer | None:
        """Begins the load of a prefetch request. Returns None where no slot is free or of lower utility.

        Returns None also where the expert is there already, or on its way, and for a copy whose source is not in RAM.
        """
        layer, expert = move.expert
        pool = self.ram if move.target is Tier.RAM else self.tops[self.device_of[layer, expert]]
        with self._lock:
            source = NONE if pool is self.ram else int(self.ram.where[layer, expert])
            if not pool.is_missing(layer, expert) or (pool is not self.ram and source < 0):
                return None
            if source >= 0:
                self.ram.pins[source] += 1
            slot = self._evictor.take_below(pool, priority.utility(move.score))
            if slot is None:
                if source >= 0:
                    self.ram.pins[source] -= 1
                return None
            load = pool.place(slot, layer, expert, priority.flags, self._evictor.clock, demand=False)
            load.source = source
            pool.utility[load.slot] = move.score
            return load

    def arrive(self, load: Transfer) -> Sequence[Transfer]:
        """Records that the load's bytes are in place. Returns the copies that waited for them, their source pinned."""
        with self._lock:
            load.pool.settle(load)
            for copy in load.then:
                copy.source = load.slot
                self.ram.pins[load.slot] += 1
            self._tell(load)
            return load.then

    def unpin(self, slots: int | IntArray) -> None:
        """Drops one pin of a slot of RAM, or of each of several distinct slots."""
        with self._lock:
            self.ram.pins[slots] -= 1
            self._version += 1
            self._changed.notify_all()

    def fail(self, load: Transfer, error: Exception) -> None:
        """Ends the load, and the copies that waited for it, with `error`. Their slots become free once unpinned."""
        with self._lock:
            for failed in (load, *load.then):
                failed.error = error
                failed.pool.abandon(failed)
                self._tell(failed)

    def pin(self, layer: int, expert: int) -> int:
        """Pins an expert in RAM until `unpin`. Returns its slot; NONE where the expert is not in RAM."""
        with self._lock:
            slot = int(self.ram.where[layer, expert])
            if slot >= 0:
                self.ram.pins[slot] += 1
            return slot

    # --- integrity ----------------------------------------------------------------------------------------------

    def check_integrity(self, *, idle: bool = False) -> None:
        """Asserts every invariant; with `idle`, also that nothing is pinned or on its way. Raises AssertionError."""
        with self._lock:
            for pool in (self.ram, *self.devices):
                pool.check_integrity(idle=idle)
            for index, pool in enumerate(self.devices):
                held = pool.where >= 0
                assert (self.device_of[held] == index).all(), "an expert is in another's device"
                if self.containment:
                    assert (self.ram.where[held] >= 0).all(), "an expert is in a device but not in RAM"
                for key, load in pool.loads.items():
                    sourced = load.source >= 0 and self.ram.pins[load.source] > 0
                    assert sourced or load in self.ram.loads[key].then, f"{load} has no source"

    # --- under the lock -------------------------------------------------------------------------------------------

    def _begin(self, layer: int, demanded: IntArray) -> None:
        """Does what `begin` does."""
        self._evictor.begin(layer)
        if len(demanded):
            for policy in self._policies:
                policy.touch(layer, demanded)

    def _join_loads(
        self,
        top: SlotPool,
        layer: int,
        experts: IntArray,
        slots: IntArray,
        prefill_only: BoolArray | None,
        arrivals: SimpleQueue[Transfer],
    ) -> list[int]:
        """Joins the loads under way and notes their slots. Returns the indices of experts without a load."""
        absent = []
        for i in np.flatnonzero(slots < 0).tolist():
            load = top.loads.get(layer * top.experts + int(experts[i]))
            if load is None:
                absent.append(i)
            else:
                slots[i] = self._join(load, prefill_only is not None and bool(prefill_only[i]), arrivals)
        return absent

    def _join(self, load: Transfer, prefill_only: bool, arrivals: SimpleQueue[Transfer]) -> int:
        """Adds a demand to a load under way. Returns its slot."""
        pool = load.pool
        pool.pins[load.slot] += 1
        pool.flags[load.slot] &= TRANSIENT if prefill_only else 0
        load.demand = True
        load.waiters.append(arrivals)
        self.served[Tier.NVME if load.cold else Tier.RAM] += 1
        return load.slot

    def _tell(self, load: Transfer) -> None:
        """Hands an ended load to those that wait for it, and wakes `wait_for_change`."""
        for waiter in load.waiters:
            waiter.put(load)
        self._version += 1
        self._changed.notify_all()
