"""Keeps the home experts: those that the boxes agreed to hold here stay in RAM once they are in it."""

from __future__ import annotations

import numpy as np

from edgemoe.errors import CapacityError
from edgemoe.experts.tiers.calls import FORGET_FORMER, KEEP
from edgemoe.experts.tiers.records import HOME
from edgemoe.experts.tiers.slots import BoolArray, SlotPool
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import ExpertId

MIN_PASSING, PASSING_SHARE = 2, 16  # slots of RAM that are left to other experts: at least so many, and one in so many


class HomeExperts:
    """Holds this box's part of the placement plan. Thread-safe, as residency is."""

    def __init__(self, ram: SlotPool, state: int, kept: IntArray) -> None:
        """Takes the address of residency's STATE record, and its array `kept`, [L, E]."""
        self._ram, self._state, self._kept = ram, state, kept

    def keep(self, homes: BoolArray) -> None:
        """Replaces the home experts by those set in `homes` [L, E].

        Raises CapacityError where RAM lacks room for them.
        """
        homes = homes & (np.arange(self._ram.experts) < np.array(self._ram.layout.classes.layer_experts)[:, None])
        counts = np.bincount(self._ram.layer_class, homes.sum(axis=1), len(self._ram.classes)).astype(int).tolist()
        for size_class, count in enumerate(counts):
            if count > (room := self._room(size_class)):
                size = f" of {self._ram.classes[size_class].expert_bytes} bytes" if len(counts) > 1 else ""
                raise CapacityError(f"{count} experts{size} are to be at home here, RAM has room for {room}")
        flags = np.ascontiguousarray(homes, np.uint8)
        KEEP.call_briefly(self._state, flags.ctypes.data)

    def forget_former(self) -> None:
        """Ranks the homes of the former plan like other experts. Before this call they are the last to be evicted."""
        FORGET_FORMER.call_briefly(self._state)

    def in_ram(self) -> BoolArray:
        """Returns which experts [L, E] are at home here and in RAM, where no other load takes their place."""
        here: BoolArray = (self._ram.where >= 0) & (self._kept == HOME)
        return here

    @property
    def rooms(self) -> tuple[int, ...]:
        """Returns how many experts of each size can be at home here, the smallest first. Some slots stay for others."""
        return tuple(map(self._room, range(len(self._ram.classes))))

    def _room(self, size_class: int) -> int:
        """Returns how many experts of a class can be at home here, as memory was divided at first."""
        slots = self._slots(size_class)
        return max(0, slots - max(MIN_PASSING, slots // PASSING_SHARE))

    def _slots(self, size_class: int) -> int:
        layout = self._ram.layout
        return layout.divided()[size_class] * layout.per_extent[size_class]

    def needed_slots(self, size_class: int) -> int:
        """Returns how many slots of a class the home experts of that class take, with those that stay for others."""
        count = int(np.count_nonzero(self._kept[self._ram.layer_class == size_class] == HOME))
        passing = max(MIN_PASSING, count // (PASSING_SHARE - 1) + 1)
        return min(count + passing, self._slots(size_class)) if count else 0

    def missing(self) -> list[ExpertId]:
        """Returns the home experts that are not in RAM."""
        missing = np.flatnonzero((self._kept == HOME) & (self._ram.where < 0))
        return [ExpertId(*divmod(key, self._ram.experts)) for key in missing.tolist()]
