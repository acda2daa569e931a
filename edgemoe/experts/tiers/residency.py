"""Tracks which tier holds each expert, and moves experts between RAM, the devices and NVMe.

Each change is one compiled operation; see `residency_ops` for the lock. A `SlotTransfer` is handed out when it can
start. When it has ended, every thread that waits for it receives it.
The states of an expert and their transitions: docs/design/residency.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Self

import numpy as np

from edgemoe.experts.tiers import residency_ops
from edgemoe.experts.tiers.assignments import DeviceAssignment, ExtentMoves, HomeExperts, deal_to_devices
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
    ResidencyRequests,
    SharedRecord,
)
from edgemoe.experts.tiers.slots import (
    BoolArray,
    PrefetchPriority,
    ResidencyWaiters,
    SlotClaim,
    SlotPool,
    SlotTransfer,
    TierUsage,
)
from edgemoe.types.arrays import IntArray, place_of
from edgemoe.types.experts import LivePolicy, Move, Tier


class TierPools:
    """The pools of RAM and the devices, and the questions that any thread may ask about them."""

    def __init__(self, ram: SlotPool, devices: Sequence[SlotPool]) -> None:
        """Deals experts to devices in proportion to their memory; without `devices`, RAM is the top tier."""
        self.ram = ram
        self.devices = tuple(devices)
        self.tops = self.devices or (ram,)
        self.device_of = deal_to_devices(ram.where.shape, [pool.layout.size_bytes for pool in self.tops])  # [L, E]
        for index, pool in enumerate((ram, *self.devices)):
            pool.set_index(index)

    def all_on_top(self, layer: int, experts: IntArray) -> bool:
        """Whether all of the experts [n] are in the devices that compute them."""
        if len(self.tops) == 1:
            return NONE not in self.tops[0].where[layer].take(experts).tolist()
        homes = self.device_of[layer, experts]
        return all((pool.where[layer, experts[homes == i]] >= 0).all() for i, pool in enumerate(self.tops))

    @property
    def fastest(self) -> Tier:
        """The fastest tier there is: VRAM with devices, otherwise RAM."""
        return self.tops[0].tier

    @property
    def policy(self) -> LivePolicy:
        """The cache policy of the fastest tier."""
        return self.tops[0].policy

    def slots_of(self, device: int, layer: int) -> int:
        """Counts the slots of one device, or of RAM without devices, for experts of a layer."""
        pool = self.tops[device]
        return pool.slots_of(pool.layout.classes.layer_class[layer])

    @property
    def has_all(self) -> bool:
        """Whether the fastest tier has every expert, and room for all, so that it will evict none."""
        classes = self.ram.layout.classes
        for size_class, count in enumerate(classes.counts):
            if sum(pool.slots_of(size_class) for pool in self.tops) < count:
                return False
        return sum(int((pool.where >= 0).sum()) for pool in self.tops) == sum(classes.counts)

    def resident_mask(self, tier: Tier = Tier.RAM) -> BoolArray:
        """Returns the mask of experts [L, E] that the tier has now."""
        mask: BoolArray = np.logical_or.reduce([pool.where >= 0 for pool in self._pools(tier)])
        return mask

    def missing_from_ram(self, layer: int, experts: IntArray) -> BoolArray:
        """Returns the mask of the experts [n] that are not in RAM now."""
        missing: BoolArray = self.ram.where[layer].take(experts) < 0
        return missing

    def usage(self, tier: Tier) -> TierUsage:
        """Adds up the slots and movements of a tier over its pools."""
        usages = [pool.usage for pool in self._pools(tier)]
        return TierUsage(*(sum(usage[i] for usage in usages) for i in range(len(TierUsage._fields))))

    def tiers_of(self, layer: int, experts: IntArray) -> IntArray:
        """Returns the fastest tier that has each of the experts [n] now."""
        tiers = np.where(self.ram.where[layer].take(experts) >= 0, RAM, NVME)
        for i, pool in enumerate(self.devices):
            here = (self.device_of[layer].take(experts) == i) & (pool.where[layer].take(experts) >= 0)
            tiers[here] = VRAM
        return tiers

    def _pools(self, tier: Tier) -> Sequence[SlotPool]:
        return self.devices if tier is Tier.VRAM else (self.ram,)


CHECKS = 1000  # attempts at an integrity check during which nothing changes
NOW, VERSION, CHANGES = (place_of(STATE, name) for name in ("layer", "version", "changes"))


class Residency(TierPools):
    """Moves experts between the tiers. Thread-safe."""

    def __init__(
        self,
        ram: SlotPool,
        devices: Sequence[SlotPool] = (),
        *,
        containment: bool = True,
        wait: ResidencyWaiters | None = None,
    ) -> None:
        """Takes over the pools. With `containment`, RAM has every expert of a device. `wait` is for simulated time."""
        super().__init__(ram, devices)
        self.containment = containment
        self._policies = tuple({id(pool.policy): pool.policy for pool in (*self.devices, ram)}.values())
        self._ours = 1  # 0 for demands of peers
        self._waiters = wait or ResidencyWaiters()
        self._arrivals: dict[SimpleQueue[SlotTransfer], int] = {}  # queues of waiting layer-steps, with their layer
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
        self.extents = ExtentMoves(self.address, self._waiters)
        self._records = ResidencyRequests(self.address, experts)
        self._pin_all, self._acquire, self._unpin = (
            residency_ops.PIN_ALL.call_briefly,
            residency_ops.ACQUIRE.call_briefly,
            residency_ops.UNPIN.call_briefly,
        )

    def for_peers(self) -> Self:
        """Returns residency for demands of peers, which change neither policies nor prefetch flags."""
        other = copy.copy(self)
        other._policies, other._ours, other.device_assignment = (), 0, self.device_assignment.for_peers()
        return other

    @property
    def served(self) -> list[int]:
        """The counts of demanded experts by the tier that had them."""
        return self._served.tolist()  # type: ignore[no-any-return]

    def count_served(self, experts: int) -> None:
        """Adds to `served` experts that were computed from the fastest tier without `acquire`."""
        self._served[self.fastest] += experts

    # --- the compute thread -------------------------------------------------------------------------

    def count_step(self, needed: BoolArray, outside: BoolArray) -> None:
        """Begins and ends a step of all layers that decoded the experts `needed` [L, E] on one device.

        Experts that are also in `outside` [L, E] were read from RAM, without `acquire`.
        """
        for layer, row in enumerate(needed):
            self._touch_policies(layer, np.flatnonzero(row))
        residency_ops.COUNT_STEP.call_briefly(self.address, self.tops[0].index, needed.ctypes.data, outside.ctypes.data)

    def begin_layer(self, layer: int, demanded: IntArray) -> None:
        """Begins a layer-step, and touches the distinct experts [n] that decoding tokens demand in the policies."""
        self._touch_policies(layer, demanded)
        if self._ours:
            residency_ops.BEGIN_LAYER.call_briefly(self.address, layer)

    def pin_if_all_resident(
        self, device: int, layer: int, experts: IntArray, prefill_only: BoolArray | None
    ) -> IntArray | None:
        """Begins a layer-step as `begin_layer` does, and pins the experts [n] if all of them are in the device.

        Returns their slots [n], pinned until `release`; None, with nothing pinned, if one is missing.
        `prefill_only` [n] marks experts that only prefill needs, which the policies do not count as demanded.
        """
        self._touch_policies(layer, experts if prefill_only is None else experts[~prefill_only])
        request = self._records.mine
        n = request.set(self.tops[device].index, layer, experts, prefill_only)
        request.fields[OURS] = self._ours
        return request.slots[n].copy() if self._pin_all(request.address) else None

    def acquire(
        self,
        device: int,
        layer: int,
        experts: IntArray,
        arrivals: SimpleQueue[SlotTransfer],
        *,
        prefill_only: BoolArray | None = None,
        limit: int | None = None,
    ) -> SlotClaim:
        """Pins the distinct `experts` [n] that are in the device, and slots for as many others as there is room.

        Experts marked in `prefill_only` [n] are the first to be evicted again. Begins at most `limit` loads. Until
        `stop_arrivals`, each demanded load of the layer is put into `arrivals` when it has completed or failed, also
        the loads that another thread demands.
        """
        self._arrivals[arrivals] = layer  # before the operation, so that no completion is missed
        top, request = self.tops[device], self._records.mine
        n, fields = request.set(top.index, layer, experts, prefill_only), request.fields
        fields[OURS], fields[LIMIT] = self._ours, n if limit is None else limit
        fields[RANKS_AT] = fields[RAM_RANKS_AT] = 0
        while asked := self._acquire(request.address):
            if asked & RANKS:
                ranks = top.ranks(self._layer)
                fields[RANKS_AT] = ranks.address
            if asked & RAM_RANKS:
                ram_ranks = self.ram.ranks(self._layer)
                fields[RAM_RANKS_AT] = ram_ranks.address
        starts = [
            SlotTransfer(top if pool else self.ram, layer, expert, slot, source)
            for pool, expert, slot, source in request.starts[: fields[START_COUNT]].tolist()
        ]
        return SlotClaim(request.slots[n].copy(), request.ready[n].copy(), starts, fields[SEEN])

    def stop_arrivals(self, arrivals: SimpleQueue[SlotTransfer]) -> None:
        """Stops putting loads into `arrivals`."""
        self._arrivals.pop(arrivals, None)

    def release(self, device: int, slots: IntArray) -> None:
        """Unpins the distinct slots [n] of an earlier claim on the device."""
        self._drop_pins(self.tops[device], slots)

    def mark_computed(self, layer: int, experts: IntArray) -> None:
        """Marks experts as computed by the running layer-step, which no longer needs them."""
        self._needed[layer][experts] = NONE

    def pin_in_ram(self, layer: int, experts: IntArray, prefill_only: BoolArray | None) -> IntArray:
        """Pins experts [n] in RAM, for the CPU to compute them beside a device.

        Returns their slots [n], pinned until `unpin`; NONE if an expert is no longer in RAM. `prefill_only` [n] marks
        experts that only prefill needs.
        """
        request = self._records.mine
        n = request.set(self.ram.index, layer, experts, prefill_only)
        request.fields[OURS] = self._ours
        residency_ops.PIN.call_briefly(request.address)
        return request.slots[n].copy()

    def wait_for_change(self, version: int, timeout_s: float) -> bool:
        """Waits until a load has ended or slots were unpinned since the claim of this version.

        Returns False if nothing changed within `timeout_s`.
        """
        return self._waiters.wait_for(lambda: self._state[VERSION] != version, timeout_s)

    # --- the loader -----------------------------------------------------------------------------------

    def reserve(self, move: Move, priority: PrefetchPriority, device: int | None = None) -> SlotTransfer | None:
        """Begins the load of a prefetch request, only into `device` if given.

        Returns None if no slot is free or of lower utility, or if the expert is there already or being loaded. The
        same for an expert of another device, and for a copy without its source in RAM.
        """
        layer, expert = move.expert
        device = self.device_of[layer, expert] if device is None else device
        pool = self.ram if move.target is Tier.RAM else self.tops[device]
        fields = (request := self._records.mine).fields
        fields[POOL_AT], fields[LAYER], request.ids[1][0], fields[FLAGS] = pool.index, layer, expert, priority.flags
        request.worths[0], request.worths[1], fields[RANKS_AT] = priority.utility(move.score), move.score, 0
        while (slot := residency_ops.RESERVE.call_briefly(request.address)) == ASKS:
            ranks = pool.ranks(self._layer)
            fields[RANKS_AT] = ranks.address
        source, near = int(request.slots[1][0]), priority.for_one_layer
        return SlotTransfer(pool, layer, expert, slot, source, near=near) if slot >= 0 else None

    def complete_load(self, load: SlotTransfer) -> Sequence[SlotTransfer]:
        """Makes the load's expert resident. Returns the copies that waited for it, with their source pinned."""
        copy_slot, demanded = divmod(residency_ops.ARRIVE.call_briefly(self.address, load.pool.index, load.slot), 2)
        self._deliver(load, bool(demanded))
        return (self._copy_after(load, copy_slot - 1),) if copy_slot else ()

    def unpin(self, slots: int | IntArray) -> None:
        """Drops one pin of a RAM slot, or of each of several distinct slots."""
        self._drop_pins(self.ram, slots)

    def fail_load(self, load: SlotTransfer, error: Exception) -> None:
        """Fails the load, and the copy that waited for it, with `error`. Their slots become free once unpinned."""
        copy_slot, demanded = divmod(residency_ops.FAIL.call_briefly(self.address, load.pool.index, load.slot), 2)
        load.error = error
        self._deliver(load, bool(demanded))
        if copy_slot:
            waiting = self._copy_after(load, copy_slot - 1)
            waiting.error = error
            self._deliver(waiting, demanded=True)

    def withdraw_load(self, load: SlotTransfer) -> bool:
        """Drops a prefetch to a device unless it is demanded.

        Returns whether it was dropped; its source stays pinned.
        """
        gone = bool(residency_ops.WITHDRAW.call_briefly(self.address, load.pool.index, load.slot))
        if gone:
            self._waiters.wake()
        return gone

    def pin(self, layer: int, expert: int) -> int:
        """Pins an expert in RAM until `unpin`. Returns its slot; NONE if the expert is not in RAM."""
        return int(residency_ops.PIN_IN_RAM.call_briefly(self.address, layer * self.ram.experts + expert))

    # --- integrity ----------------------------------------------------------------------------------------------

    def check_integrity(self, *, idle: bool = False) -> None:
        """Asserts every invariant; with `idle`, also the absence of pins and loads. Raises AssertionError."""
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
        request, n = self._records.mine, 1 if isinstance(slots, int) else len(slots)
        request.fields[POOL_AT], request.fields[COUNT] = pool.index, n
        request.slots[n][...] = slots
        self._unpin(request.address)
        self._waiters.wake()  # another thread's layer-step may find room now

    def _copy_after(self, read: SlotTransfer, slot: int) -> SlotTransfer:
        """Returns the transfer to a device's slot that waited for a read into RAM."""
        pool = self.tops[self.device_of[read.layer, read.expert]]
        return SlotTransfer(pool, read.layer, read.expert, slot, read.slot, cold=True)

    def _deliver(self, load: SlotTransfer, demanded: bool) -> None:
        """Puts an ended load of the fastest tier into the waiting queues, and wakes `wait_for_change`."""
        if demanded and (load.pool is not self.ram or not self.devices):
            for arrivals, layer in self._arrivals.copy().items():
                if layer == load.layer:
                    arrivals.put(load)
        self._waiters.wake()
