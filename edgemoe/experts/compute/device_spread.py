"""Moves experts between devices, and slab extents between size classes, in the pauses between steps.

`DeviceSpread` spreads experts that tokens choose together over the devices. `Rebalancing` gives extents to the size
class whose experts rank higher. Why pairs decide: docs/design/residency.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from edgemoe.experts.compute.dispatch import ExpertCompute
from edgemoe.experts.tiers.device_exchange import SPREAD, SPREADING
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import ALWAYS, SharedRecord
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.policy.class_shares import ClassShare, ExtentExchange, exchange
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier

log = logging.getLogger(__name__)
LOOK_S = 60.0
LEAST_TOKENS = 1000.0  # that have been counted before anything moves
LEAST_GAIN = 2e-3  # of a layer's pairs on one device, that an exchange saves
MOVES = 4  # between two steps
ASKED = 16  # most recently moved experts, which are copied to their new devices


class CountedPairs(Protocol):
    """Counts pairs of experts that a token chose together."""

    @property
    def tokens(self) -> float:
        """Returns how many tokens are counted."""

    @property
    def pairs(self) -> FloatArray:
        """Returns how often, [L, E, E], each pair in one of its places or both; [0, E, E] where it is not counted."""


class DeviceSpread:
    """Plans exchanges of experts between devices on a thread of its own, and makes them between steps."""

    def __init__(
        self, residency: Residency, loader: ExpertLoader, geometry: ExpertGeometry, activity: CountedPairs
    ) -> None:
        """Goes by the pairs in `activity`; where it counts none, nothing moves."""
        self._residency, self._loader, self._geometry, self._activity = residency, loader, geometry, activity
        self._moves: deque[tuple[ExpertId, int]] = deque()  # to be made, and to which device
        self._moved: deque[ExpertId] = deque(maxlen=ASKED)
        self.moved = 0

    async def run(self) -> None:
        """Plans moves every minute until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.plan_moves)

    def plan_moves(self) -> None:
        """Plans moves of experts. Does nothing while moves are pending."""
        pairs = self._activity.pairs
        if not len(pairs) or self._moves or self._activity.tokens < LEAST_TOKENS:
            return
        now = self._residency.device_of
        goal = spread(pairs, now, list(map(self._geometry.experts_of, range(self._geometry.layers))))
        if moves := _in_turn(now, goal):
            log.info("experts that are chosen together go to different devices", extra={"experts": len(moves)})
            self._moves.extend(moves)

    def on_step_ended(self) -> None:
        """Gives a few experts to their new devices. On the compute thread, between steps."""
        if not self._moves:
            return
        for _ in range(min(MOVES, len(self._moves))):
            expert, device = self._moves.popleft()
            given = self._residency.device_assignment.move_expert(*expert, device)
            self.moved += given > 0  # the next plan finds experts that are in use now
            if given == 2:
                self._moved.append(expert)
        requests = [Move(expert, Tier.RAM, Tier.VRAM, ALWAYS) for expert in self._moved]
        self._loader.prefetch(requests, PrefetchPriority.USED)
        if not self._moves:
            self._moved.clear()


def spread(pairs: FloatArray, device_of: IntArray, experts: Sequence[int]) -> IntArray:
    """Returns a better device of each expert [L, E], for pairs [L, E, E] and the numbers of each layer's experts.

    Every device keeps as many of each layer as it had. Releases the GIL.
    """
    goal = device_of.copy()
    layers, stride = goal.shape
    call = SharedRecord(SPREADING)
    call["stride"], call["devices"], call["most"] = stride, int(goal.max()) + 1, stride
    call.array("together", (stride, int(goal.max()) + 1), dtype=np.float32)
    call.set_array("least", np.array([LEAST_GAIN], np.float32))
    for layer in range(layers):
        call["experts"], call["pairs"], call["device"] = (
            experts[layer],
            pairs[layer].ctypes.data,
            goal[layer].ctypes.data,
        )
        SPREAD.call(call.address)
    return goal


def _in_turn(now: IntArray, goal: IntArray) -> list[tuple[ExpertId, int]]:
    """Returns the moves and their devices, layer by layer, from the devices in turn, so that each has room."""
    moves = []
    for layer in range(len(now)):
        experts = np.flatnonzero(goal[layer] != now[layer])
        former = now[layer, experts]
        place = np.array([np.count_nonzero(former[:i] == former[i]) for i in range(len(former))], np.int64)
        for expert in experts[np.lexsort((former, place))].tolist():
            moves.append((ExpertId(layer, expert), int(goal[layer, expert])))
    return moves


EVERY = 8  # steps
TRIES = 8  # extents at a look, where some are in use


class Rebalancing:
    """Adapts the shares of size classes in each tier, on the compute thread while no step has pinned experts."""

    def __init__(self, residency: Residency, computes: Sequence[ExpertCompute] = ()) -> None:
        """Takes the `computes` of the residency's devices, if it has any."""
        self._residency, self._steps = residency, 0
        self.moved = 0  # extents
        self._pools: list[tuple[SlotPool, Callable[[], object]]] = [(residency.ram, int)]  # it has nothing to wait for
        self._pools += [(pool, each.synchronize) for pool, each in zip(residency.devices, computes, strict=False)]
        self._keys = residency.ram.layout.classes.keys(residency.ram.experts)  # of the experts of each class

    def on_step_ended(self) -> None:
        """Compares the shares every few steps, and moves at most one extent of each tier."""
        if len(self._keys) == 1:
            return
        self._steps += 1
        if self._steps % EVERY == 0:
            for pool, settle in self._pools:
                self._rebalance_pool(pool, settle)

    def _rebalance_pool(self, pool: SlotPool, settle: Callable[[], object]) -> None:
        ranks = pool.policy.rank(pool.layers - 1)
        found = exchange([self._share(pool, i, ranks) for i in range(len(pool.classes))])
        for number in [] if found is None else self._extents(pool, found, ranks)[:TRIES].tolist():
            assert found is not None
            if self._residency.extents.remove(pool, number, homes=found.due):
                settle()  # computations from it and copies into it
                self._residency.extents.add(pool, number, found.taker)
                self.moved += 1
                return

    def _share(self, pool: SlotPool, size_class: int, ranks: FloatArray) -> ClassShare:
        residency, layout = self._residency, pool.layout
        per, extents = layout.per_extent[size_class], int(np.count_nonzero(pool.extents == size_class))
        in_devices = sum(device.slots_of(size_class) for device in residency.devices) if residency.containment else 0
        least, most = 1, layout.most[size_class]
        if pool is residency.ram:  # RAM needs room for the devices' experts and the home experts
            least = max(least, -(-max(residency.homes.needed_slots(size_class), in_devices + 1) // per))
        elif residency.containment:
            spare = residency.ram.slots_of(size_class) - 1 - in_devices
            most = min(most, extents + max(0, spare) // per)
        return ClassShare(ranks.ravel()[self._keys[size_class]], extents, per, least, most)

    def _extents(self, pool: SlotPool, found: ExtentExchange, ranks: FloatArray) -> IntArray:
        """Returns the giver's extents, ordered by experts worth keeping, then by all experts."""
        numbers = np.flatnonzero(pool.extents == found.giver)
        per = pool.layout.per_extent[found.giver]
        slots = pool.layout.first(found.giver) + numbers[:, None] * per + np.arange(per)
        owners = pool.owner[slots]  # [extents, slots]
        kept = (owners >= 0) & (ranks.ravel()[np.maximum(owners, 0)] > found.rank)
        order: IntArray = np.lexsort(((owners >= 0).sum(axis=1), kept.sum(axis=1)))
        return numbers[order]
