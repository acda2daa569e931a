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
        if (count := int(np.count_nonzero(homes))) > self.slots:
            raise CapacityError(f"{count} experts are to be at home here, RAM has room for {self.slots}")
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
    def slots(self) -> int:
        """Returns how many experts can be at home here at most. Some slots stay for other experts."""
        return max(0, self._ram.slots - max(MIN_PASSING, self._ram.slots // PASSING_SHARE))

    def missing(self) -> list[ExpertId]:
        """Returns the home experts that are not in RAM."""
        missing = np.flatnonzero((self._kept == HOME) & (self._ram.where < 0))
        return [ExpertId(*divmod(key, self._ram.experts)) for key in missing.tolist()]
