"""Knows which tier holds each expert, and moves experts between RAM, the devices and NVMe.

Each change is one compiled operation (`residency_ops`, whose header says what the lock is). A `Transfer` is handed out
when it can start; when it has ended, every thread that waits for it receives it.
The states of an expert and their transitions: docs/design/residency.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Self

import numpy as np

from edgemoe.experts.tiers import residency_ops
from edgemoe.experts.tiers.assignments import DeviceAssignment, Extents, HomeExperts, deal_to_devices
from edgemoe.experts.tiers.residency_ops import ASKS, RAM_RANKS, RANKS
from edgemoe.experts.tiers.residency_records import (
    COUNT,
    FLAGS,
    LAYER,
    LIMIT,
    NONE,
    NVME,
    OURS,
    POOL_AT,
    RAM,
    RAM_RANKS_AT,
    RANKS_AT,
    SEEN,
    START_COUNT,
    STATE,
    VRAM,
    RequestRecords,
    SharedRecord,
)
from edgemoe.experts.tiers.slots import BoolArray, PrefetchPriority, SlotClaim, SlotPool, TierUsage, Transfer, Waiters
from edgemoe.jit.intrinsics import place_of
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import LivePolicy, Move, Tier


class TierPools:
    """The pool of RAM and that of each device; experts are dealt to devices in proportion to their memory."""

    def __init__(self, ram: SlotPool, devices: Sequence[SlotPool]) -> None:
        """`devices` is empty where RAM is the top tier."""
        self.ram = ram
        self.devices = tuple(devices)
        self.tops = self.devices or (ram,)
        self.device_of = deal_to_devices(ram.where.shape, [pool.layout.size_bytes for pool in self.tops])  # [L, E]
        for index, pool in enumerate((ram, *self.devices)):
            pool.set_index(index)

    def all_on_top(self, layer: int, experts: IntArray) -> bool:
        """Whether all of the experts [n] are in the device that computes them."""
        if len(self.tops) == 1:
            return NONE not in self.tops[0].where[layer].take(experts).tolist()
        homes = self.device_of[layer, experts]
        return all((pool.where[layer, experts[homes == i]] >= 0).all() for i, pool in enumerate(self.tops))

    @property
    def fastest(self) -> Tier:
        """The tier that experts are computed from where there is room."""
        return self.tops[0].tier

    @property
    def policy(self) -> LivePolicy:
        """The one that ranks what the fastest tier has."""
        return self.tops[0].policy

    def slots_of(self, device: int, layer: int) -> int:
        """Slots of one device for experts of a layer; of RAM where there is none."""
        pool = self.tops[device]
        return pool.slots_of(pool.layout.classes.layer_class[layer])

    @property
    def has_all(self) -> bool:
        """Whether the fastest tier has every expert now, and for good: with so many slots it evicts none."""
        classes = self.ram.layout.classes
        for size_class, count in enumerate(classes.counts):
            if sum(pool.slots_of(size_class) for pool in self.tops) < count:
                return False
        return sum(int((pool.where >= 0).sum()) for pool in self.tops) == sum(classes.counts)

    def resident_mask(self, tier: Tier = Tier.RAM) -> BoolArray:
        """Which experts [L, E] the tier has now."""
        mask: BoolArray = np.logical_or.reduce([pool.where >= 0 for pool in self._pools(tier)])
        return mask

    def missing_from_ram(self, layer: int, experts: IntArray) -> BoolArray:
        """Which of the experts [n] are not in RAM now."""
        missing: BoolArray = self.ram.where[layer].take(experts) < 0
        return missing

    def usage(self, tier: Tier) -> TierUsage:
        """The tier's slots and what has moved."""
        usages = [pool.usage for pool in self._pools(tier)]
        return TierUsage(*(sum(usage[i] for usage in usages) for i in range(len(TierUsage._fields))))

    def tiers_of(self, layer: int, experts: IntArray) -> IntArray:
        """The fastest tier that has each of the experts [n] now."""
        tiers = np.where(self.ram.where[layer].take(experts) >= 0, RAM, NVME)
        for i, pool in enumerate(self.devices):
            here = (self.device_of[layer].take(experts) == i) & (pool.where[layer].take(experts) >= 0)
            tiers[here] = VRAM
        return tiers

    def _pools(self, tier: Tier) -> Sequence[SlotPool]:
        return self.devices if tier is Tier.VRAM else (self.ram,)


CHECKS = 1000  # of integrity, until one finds that nothing has changed meanwhile
NOW, VERSION, CHANGES = (place_of(STATE, name) for name in ("layer", "version", "changes"))


class Residency(TierPools):
    """Moves experts between the tiers. Thread-safe."""

    def __init__(
        self, ram: SlotPool, devices: Sequence[SlotPool] = (), *, containment: bool = True, wait: Waiters | None = None
    ) -> None:
        """Takes over the pools. With `containment`, what is in a device is in RAM too. `wait` is for simulated time."""
        super().__init__(ram, devices)
        self.containment = containment
        self._policies = tuple({id(pool.policy): pool.policy for pool in (*self.devices, ram)}.values())
        self._ours = 1  # demands are this box's own
        self._waiters = wait or Waiters()
        self._arrivals: dict[SimpleQueue[Transfer], int] = {}  # who waits for loads, and of which layer
        self._shared = shared = SharedRecord(STATE)
        self._state, self.address = shared.numbers, shared.address  # of the STATE record, for compiled code
        layers, experts = shape = ram.where.shape
        shared["layers"], shared["experts"], shared["devices"] = layers, experts, len(self.devices)
        shared["containment"] = containment
        shared.set_array("pools", np.array([pool.address for pool in (ram, *self.devices)]))
        shared.set_array("device_of", self.device_of)
        self.device_assignment = DeviceAssignment(self.address, experts, shared.array("running", 2, NONE))
        shared["classes"] = len(ram.classes)
        shared.set_array("class_of", ram.layer_class)
        shared.array("visited", layers, NONE)
        self._needed = tuple(shared.array("needed", shape, NONE))  # L rows [E]
        self._served: IntArray = shared.array("served", len(Tier))
        self.homes = HomeExperts(ram, self.address, shared.array("kept", shape))
        self.extents = Extents(self.address, self._waiters)
        self._records = RequestRecords(self.address, experts)
        self._pin_all, self._acquire, self._unpin = (
            residency_ops.PIN_ALL.call_briefly,
            residency_ops.ACQUIRE.call_briefly,
            residency_ops.UNPIN.call_briefly,
        )

    def for_peers(self) -> Self:
        """Returns the same for demands of peers, of which no policy hears, and which leave no mark on prefetches."""
        other = copy.copy(self)
        other._policies, other._ours, other.device_assignment = (), 0, self.device_assignment.for_peers()
        return other

    @property
    def served(self) -> list[int]:
        """Returns the counts of demanded experts by the tier that had them."""
        return self._served.tolist()  # type: ignore[no-any-return]

    def count_served(self, experts: int) -> None:
        """Adds to `served` experts that the fastest tier had, and that were computed without asking."""
        self._served[self.fastest] += experts

    # --- the compute thread's calls -------------------------------------------------------------------------

    def begin_layer(self, layer: int, demanded: IntArray) -> None:
        """Opens a layer-step. Tells the policies the distinct experts [n] that decoding tokens demand of the layer."""
        self._touch_policies(layer, demanded)
        if self._ours:
            residency_ops.BEGIN_LAYER.call_briefly(self.address, layer)

    def pin_if_all_resident(
        self, device: int, layer: int, experts: IntArray, prefill_only: BoolArray | None
    ) -> IntArray | None:
        """Opens a layer-step as `begin_layer` does, and pins the experts [n] if all of them are in the device.

        Returns their slots [n], pinned until `release`; None, with nothing pinned, where one is missing.
        `prefill_only` [n] marks those that only prefill needs: the policies do not see them as demanded.
        """
        self._touch_policies(layer, experts if prefill_only is None else experts[~prefill_only])
        call = self._records.mine
        n = call.set(self.tops[device].index, layer, experts, prefill_only)
        call.fields[OURS] = self._ours
        return call.slots[n].copy() if self._pin_all(call.address) else None

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

        Experts marked in `prefill_only` [n] are the first to be evicted again. Begins at most `limit` loads. Until
        `stop_arrivals`, each demanded load of the layer is put into `arrivals` when it has completed or failed, also
        the loads that another thread demands.
        """
        self._arrivals[arrivals] = layer  # before the call, so that no end goes unnoticed
        top, call = self.tops[device], self._records.mine
        n, fields = call.set(top.index, layer, experts, prefill_only), call.fields
        fields[OURS], fields[LIMIT] = self._ours, n if limit is None else limit
        fields[RANKS_AT] = fields[RAM_RANKS_AT] = 0
        while asked := self._acquire(call.address):
            if asked & RANKS:
                ranks = top.ranks(self._layer)
                fields[RANKS_AT] = ranks.address
            if asked & RAM_RANKS:
                ram_ranks = self.ram.ranks(self._layer)
                fields[RAM_RANKS_AT] = ram_ranks.address
        starts = [
            Transfer(top if pool else self.ram, layer, expert, slot, source)
            for pool, expert, slot, source in call.starts[: fields[START_COUNT]].tolist()
        ]
        return SlotClaim(call.slots[n].copy(), call.ready[n].copy(), starts, fields[SEEN])

    def stop_arrivals(self, arrivals: SimpleQueue[Transfer]) -> None:
        """Puts no more loads into `arrivals`."""
        self._arrivals.pop(arrivals, None)

    def release(self, device: int, slots: IntArray) -> None:
        """Unpins the distinct slots [n] of an earlier claim on the device."""
        self._drop_pins(self.tops[device], slots)

    def mark_computed(self, layer: int, experts: IntArray) -> None:
        """Marks experts as computed by the running layer-step, which needs them no more."""
        self._needed[layer][experts] = NONE

    def pin_in_ram(self, layer: int, experts: IntArray, prefill_only: BoolArray | None) -> IntArray:
        """Pins experts [n] in RAM, from where the CPU computes them beside a device.

        Returns their slots [n], pinned until `unpin`; NONE where an expert is not in RAM any more. `prefill_only` [n]
        marks those that only prefill needs.
        """
        call = self._records.mine
        n = call.set(self.ram.index, layer, experts, prefill_only)
        call.fields[OURS] = self._ours
        residency_ops.PIN.call_briefly(call.address)
        return call.slots[n].copy()

    def wait_for_change(self, version: int, timeout_s: float) -> bool:
        """Waits until a load has ended or slots were unpinned since the claim of this version.

        Returns False where nothing changed within `timeout_s`.
        """
        return self._waiters.wait_for(lambda: self._state[VERSION] != version, timeout_s)

    # --- the loader's calls -----------------------------------------------------------------------------------

    def reserve(self, move: Move, priority: PrefetchPriority, device: int | None = None) -> Transfer | None:
        """Begins the load of a prefetch request, into no other than `device` where one is named.

        Returns None where no slot is free or of lower utility, where the expert is there already, on its way or
        another device's, and for a copy whose source is not in RAM.
        """
        layer, expert = move.expert
        device = self.device_of[layer, expert] if device is None else device
        pool = self.ram if move.target is Tier.RAM else self.tops[device]
        fields = (call := self._records.mine).fields
        fields[POOL_AT], fields[LAYER], call.ids[1][0], fields[FLAGS] = pool.index, layer, expert, priority.flags
        call.worths[0], call.worths[1], fields[RANKS_AT] = priority.utility(move.score), move.score, 0
        while (slot := residency_ops.RESERVE.call_briefly(call.address)) == ASKS:
            ranks = pool.ranks(self._layer)
            fields[RANKS_AT] = ranks.address
        source, near = int(call.slots[1][0]), priority.for_one_layer
        return Transfer(pool, layer, expert, slot, source, near=near) if slot >= 0 else None

    def complete_load(self, load: Transfer) -> Sequence[Transfer]:
        """Records that the load's bytes are in place. Returns the copies that waited for them, their source pinned."""
        copy_slot, demanded = divmod(residency_ops.ARRIVE.call_briefly(self.address, load.pool.index, load.slot), 2)
        self._deliver(load, bool(demanded))
        return (self._copy_after(load, copy_slot - 1),) if copy_slot else ()

    def unpin(self, slots: int | IntArray) -> None:
        """Drops one pin of a slot of RAM, or of each of several distinct slots."""
        self._drop_pins(self.ram, slots)

    def fail_load(self, load: Transfer, error: Exception) -> None:
        """Ends the load, and the copies that waited for it, with `error`. Their slots become free once unpinned."""
        copy_slot, demanded = divmod(residency_ops.FAIL.call_briefly(self.address, load.pool.index, load.slot), 2)
        load.error = error
        self._deliver(load, bool(demanded))
        if copy_slot:
            waiting = self._copy_after(load, copy_slot - 1)
            waiting.error = error
            self._deliver(waiting, demanded=True)

    def withdraw_load(self, load: Transfer) -> bool:
        """Drops a prefetch to a device unless it is demanded. Returns whether it did; its source stays pinned."""
        gone = bool(residency_ops.WITHDRAW.call_briefly(self.address, load.pool.index, load.slot))
        if gone:
            self._waiters.wake()
        return gone

    def pin(self, layer: int, expert: int) -> int:
        """Pins an expert in RAM until `unpin`. Returns its slot; NONE where the expert is not in RAM."""
        return int(residency_ops.PIN_IN_RAM.call_briefly(self.address, layer * self.ram.experts + expert))

    # --- integrity ----------------------------------------------------------------------------------------------

    def check_integrity(self, *, idle: bool = False) -> None:
        """Asserts every invariant; with `idle`, also that nothing is pinned or on its way. Raises AssertionError."""
        for _ in range(CHECKS):
            changes = self._state[CHANGES]
            try:
                self._check(idle)
            except AssertionError:
                if self._state[CHANGES] == changes:
                    raise
            else:
                return

    def _check(self, idle: bool) -> None:
        for pool in (self.ram, *self.devices):
            pool.check_integrity(idle=idle)
        for index, pool in enumerate(self.devices):
            held = pool.where >= 0
            assert (self.device_of[held] == index).all(), "an expert is in another's device"
            if self.containment:
                assert (self.ram.where[held] >= 0).all(), "an expert is in a device but not in RAM"
            for key, load in pool.loads.items():
                sourced = load.source >= 0 and self.ram.pins[load.source] > 0
                assert sourced or self.ram.coming.ravel()[key] >= 0, f"{load} has no source"

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _layer(self) -> int:
        return self._state[NOW]

    def _touch_policies(self, layer: int, demanded: IntArray) -> None:
        if len(demanded):
            for policy in self._policies:
                policy.touch(layer, demanded)

    def _drop_pins(self, pool: SlotPool, slots: int | IntArray) -> None:
        call, n = self._records.mine, 1 if isinstance(slots, int) else len(slots)
        call.fields[POOL_AT], call.fields[COUNT] = pool.index, n
        call.slots[n][...] = slots
        self._unpin(call.address)
        self._waiters.wake()  # another thread's layer-step may find room now

    def _copy_after(self, read: Transfer, slot: int) -> Transfer:
        """Returns the transfer to a device's slot that waited for a read into RAM."""
        pool = self.tops[self.device_of[read.layer, read.expert]]
        return Transfer(pool, read.layer, read.expert, slot, read.slot, cold=True)

    def _deliver(self, load: Transfer, demanded: bool) -> None:
        """Hands an ended load into the fastest tier to those that wait for loads, and wakes `wait_for_change`."""
        if demanded and (load.pool is not self.ram or not self.devices):
            for arrivals, layer in self._arrivals.copy().items():
                if layer == load.layer:
                    arrivals.put(load)
        self._waiters.wake()
