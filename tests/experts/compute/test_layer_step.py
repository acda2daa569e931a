"""A layer-step waits for its own experts while other threads load some, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from edgemoe.experts.compute.layer_step import DeviceShare, LayerStep
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import SlotPool, SlotTransfer
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import Tier
from edgemoe.types.step import TokenGroups

E = 8


class Loader:
    """Loads demanded experts at once, but first the ones that another thread demands of the same layer."""

    def __init__(self, residency: Residency, *others: int, error: Exception | None = None) -> None:
        self._residency, self._others, self._error = residency, others, error

    clock = staticmethod(time.monotonic)
    arrivals = SimpleQueue

    def start(self, loads: Sequence[SlotTransfer]) -> None:
        theirs = self._residency.acquire(0, 0, np.array(self._others), SimpleQueue())
        for load in theirs.loads:
            if self._error is None:
                self._residency.complete_load(load)
            else:
                self._residency.fail_load(load, self._error)
        self._residency.release(0, theirs.slots)
        for load in loads:
            self._residency.complete_load(load)


class Computed:
    """Records the computed experts and their slots."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def add(self, slots: IntArray, group: TokenGroups) -> None:
        self.slots |= dict(zip(group.experts.tolist(), slots.tolist(), strict=True))


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")])
def test_another_thread_s_demands_neither_feed_nor_fail_a_layer_step(error: Exception | None) -> None:
    residency = Residency(SlotPool(Tier.RAM, 1, E, E, LRU(1, E)))
    compute: Any = Computed()
    loader: Any = Loader(residency, 5, 6, error=error)
    group = TokenGroups.of(np.array([[1, 2, 3]]), np.ones((1, 3), np.float32))
    part = DeviceShare(0, E, compute, group, None)
    LayerStep(residency, loader, 0, [part], 10.0, lambda: None).run(lambda: None, lambda: None)
    assert compute.slots == {expert: int(residency.ram.where[0, expert]) for expert in (1, 2, 3)}
    residency.check_integrity(idle=True)
