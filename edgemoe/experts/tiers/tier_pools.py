"""What is where: the slots of all tiers, and what any thread may ask of them. Only residency changes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgemoe.experts.tiers.dealing import deal
from edgemoe.experts.tiers.records import NONE, NVME, RAM, VRAM
from edgemoe.experts.tiers.slots import BoolArray, SlotPool, TierUsage
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import LivePolicy, Tier


class TierPools:
    """The pool of RAM and that of each device; experts are dealt to devices in proportion to their memory."""

    def __init__(self, ram: SlotPool, devices: Sequence[SlotPool]) -> None:
        """`devices` is empty where RAM is the top tier."""
        self.ram = ram
        self.devices = tuple(devices)
        self.tops = self.devices or (ram,)
        self.device_of = deal(ram.where.shape, [pool.layout.size_bytes for pool in self.tops])  # [L, E]
        for index, pool in enumerate((ram, *self.devices)):
            pool.join(index)

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
