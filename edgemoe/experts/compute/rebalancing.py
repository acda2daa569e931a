"""Moves extents of slabs between size classes, between two steps, to where the ranks have more use for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgemoe.experts.compute.dispatch import Compute
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import SlotPool
from edgemoe.policy.class_shares import ClassShare, Exchange, exchange
from edgemoe.types.arrays import FloatArray, IntArray

EVERY = 8  # steps
TRIES = 8  # extents at a look, where some are in use


class Rebalancing:
    """Looks at the classes' shares of each tier. Used on the compute thread, where nothing is pinned for a step."""

    def __init__(self, residency: Residency, computes: Sequence[Compute] = ()) -> None:
        """Takes the `computes` of the residency's devices, if it has any."""
        self._residency, self._steps = residency, 0
        self.moved = 0  # extents
        self._pools: list[tuple[SlotPool, Callable[[], object]]] = [(residency.ram, int)]  # it has nothing to wait for
        self._pools += [(pool, each.settle) for pool, each in zip(residency.devices, computes, strict=False)]
        self._keys = residency.ram.layout.classes.keys(residency.ram.experts)  # of the experts of each class

    def step_ended(self) -> None:
        """Looks every few steps, and moves one extent of each tier at most."""
        if len(self._keys) == 1:
            return
        self._steps += 1
        if self._steps % EVERY == 0:
            for pool, settle in self._pools:
                self._look(pool, settle)

    def _look(self, pool: SlotPool, settle: Callable[[], object]) -> None:
        ranks = pool.policy.rank(pool.layers - 1)
        found = exchange([self._share(pool, i, ranks) for i in range(len(pool.classes))])
        for number in [] if found is None else self._extents(pool, found, ranks)[:TRIES].tolist():
            assert found is not None
            if self._residency.extents.remove(pool, number, homes=found.due):
                settle()  # what was computed from it or copied into it
                self._residency.extents.add(pool, number, found.taker)
                self.moved += 1
                return

    def _share(self, pool: SlotPool, size_class: int, ranks: FloatArray) -> ClassShare:
        residency, layout = self._residency, pool.layout
        per, extents = layout.per_extent[size_class], int(np.count_nonzero(pool.extents == size_class))
        in_devices = sum(device.slots_of(size_class) for device in residency.devices) if residency.containment else 0
        least, most = 1, layout.most[size_class]
        if pool is residency.ram:  # what is in devices must be in RAM too, and what is at home here
            least = max(least, -(-max(residency.homes.needed_slots(size_class), in_devices + 1) // per))
        elif residency.containment:
            spare = residency.ram.slots_of(size_class) - 1 - in_devices
            most = min(most, extents + max(0, spare) // per)
        return ClassShare(ranks.ravel()[self._keys[size_class]], extents, per, least, most)

    def _extents(self, pool: SlotPool, found: Exchange, ranks: FloatArray) -> IntArray:
        """Returns the giver's extents, those with the fewest experts worth keeping first, then with the fewest."""
        numbers = np.flatnonzero(pool.extents == found.giver)
        per = pool.layout.per_extent[found.giver]
        slots = pool.layout.first(found.giver) + numbers[:, None] * per + np.arange(per)
        owners = pool.owner[slots]  # [extents, slots]
        kept = (owners >= 0) & (ranks.ravel()[np.maximum(owners, 0)] > found.rank)
        order: IntArray = np.lexsort(((owners >= 0).sum(axis=1), kept.sum(axis=1)))
        return numbers[order]
