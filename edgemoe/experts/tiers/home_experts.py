"""Experts at home: what the boxes agreed to keep here is, once it is in RAM, not dropped from it."""

from __future__ import annotations

import threading

import numpy as np

from edgemoe.errors import CapacityError
from edgemoe.experts.tiers.eviction import Evictor
from edgemoe.experts.tiers.slots import BoolArray, SlotPool
from edgemoe.types.experts import ExpertId

MIN_PASSING, PASSING_SHARE = 2, 16  # slots of RAM that are nobody's home: so many, or one in so many


class HomeExperts:
    """The plan's part for this box. Thread-safe: `lock` is residency's."""

    def __init__(self, ram: SlotPool, evictor: Evictor, lock: threading.Lock) -> None:
        self._ram, self._evictor, self._lock = ram, evictor, lock

    def keep(self, homes: BoolArray) -> None:
        """Experts [L, E] that, once in RAM, stay there; replaces earlier ones. Raises CapacityError."""
        if (count := int(np.count_nonzero(homes))) > self.slots:
            raise CapacityError(f"{count} experts are to be at home here, RAM has room for {self.slots}")
        with self._lock:
            self._evictor.keep(homes)

    def forget_former(self) -> None:
        """Ranks the homes of the plan before like other experts; until then they are evicted last."""
        with self._lock:
            self._evictor.forget_former()

    def in_ram(self) -> BoolArray:
        """Experts [L, E] that are at home here and in RAM: no other load takes their place."""
        here = self._ram.where >= 0
        return here & self._evictor.homes.reshape(here.shape) if self._evictor.homes is not None else here & False

    @property
    def slots(self) -> int:
        """Returns the most experts that can be at home here; some slots stay free for others."""
        return max(0, self._ram.slots - max(MIN_PASSING, self._ram.slots // PASSING_SHARE))

    def missing(self) -> list[ExpertId]:
        """Returns the homes that are not in RAM."""
        homes = self._evictor.homes
        if homes is None:
            return []
        missing = np.flatnonzero(homes & (self._ram.where.ravel() < 0))
        return [ExpertId(*divmod(key, self._ram.experts)) for key in missing.tolist()]
