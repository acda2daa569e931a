"""Computes a layer-step that waits for experts: resident ones are computed while others are loaded.

Where the experts outnumber the slots, they are loaded in turns: computed experts make room for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty

import numpy as np

from edgemoe.errors import MissingExpert
from edgemoe.experts.compute.dispatch import ExpertCompute
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import NONE, NVME, RAM
from edgemoe.experts.tiers.slots import BoolArray, SlotClaim, SlotTransfer
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import TokenGroups

PREFILL_ONLY_SHARE = 8  # prefill loads at most one slot in this number at a time


class DeviceShare:
    """Tracks the experts [n] of a layer-step that one device computes: slot, ready, pinned, waiting."""

    def __init__(
        self, device: int, slots: int, compute: ExpertCompute, group: TokenGroups, prefill_only: BoolArray | None
    ) -> None:
        """Starts with none claimed. `slots` is the device's number of slots; `prefill_only` [n] marks experts."""
        self.device, self.compute, self.group, self.prefill_only = device, compute, group, prefill_only
        n = len(group.experts)
        self.slots: IntArray = np.full(n, NONE, np.int64)
        self.ready: BoolArray = np.zeros(n, np.bool_)  # loaded, and not computed yet
        self.pinned: BoolArray = np.zeros(n, np.bool_)
        self.waiting: dict[int, int] = {}  # expert on its way -> index
        # indices without a slot yet, the experts for decode first
        self.left: IntArray = np.arange(n) if prefill_only is None else np.argsort(prefill_only, kind="stable")
        self._most = n if prefill_only is None else max(1, slots // PREFILL_ONLY_SHARE)

    @property
    def limit(self) -> int:
        """Counts the loads that may be started now."""
        return self._most - len(self.waiting)

    def absorb(self, claim: SlotClaim) -> None:
        """Records the claim for the experts in `left`."""
        asked, got = self.left, claim.slots >= 0
        self.slots[asked] = claim.slots
        self.pinned[asked[got]] = True
        self.ready[asked[claim.ready]] = True
        coming = asked[got & ~claim.ready]
        self.waiting.update(zip(self.group.experts[coming].tolist(), coming.tolist(), strict=True))
        self.left = asked[~got]

    def waits_for(self, load: SlotTransfer) -> bool:
        """Returns whether an ended load of the layer is one that this part waits for."""
        index = self.waiting.get(load.expert)
        return index is not None and self.slots.item(index) == load.slot and load.has_ended


class LayerStep:
    """Computes the parts of a layer-step and waits for missing experts."""

    def __init__(
        self,
        residency: Residency,
        loader: ExpertLoader,
        layer: int,
        parts: Sequence[DeviceShare],
        deadline_s: float,
        all_there: Callable[[], object],
    ) -> None:
        """Prepares the step. `all_there` is called once, when the last expert has arrived, before it is computed."""
        self._residency, self._loader, self._layer, self._parts = residency, loader, layer, parts
        self._all_there = all_there
        self._clock = loader.clock
        self._deadline_s, self._end_s = deadline_s, self._clock() + deadline_s
        self._arrivals = loader.arrivals()
        self.stall_s = [0.0, 0.0, 0.0]  # by the tier that was waited for
        self._version = 0

    def run(self, all_claimed: Callable[[], object], meanwhile: Callable[[], object]) -> None:
        """Computes everything. Calls `all_claimed` once, when the last load has been started.

        Calls `meanwhile` once, when loads have been started and the devices have their first work. Raises a load's
        error, and MissingExpert at the deadline. Leaves no slot pinned.
        """
        claimed = begun = False
        try:
            while True:
                for part in self._parts:
                    self._claim(part)
                if not self._left and not claimed:
                    claimed = True
                    all_claimed()
                last = not self._waiting and not self._left
                if last:
                    self._all_there()
                computed = [self._compute(part) for part in self._parts]
                if not begun:
                    begun = True
                    meanwhile()
                if last:
                    return
                if not (self._left and any(computed)):  # else there is room again
                    self._wait()
        finally:
            self._residency.stop_arrivals(self._arrivals)
            for part in self._parts:
                self._release(part, part.pinned)

    @property
    def _left(self) -> bool:
        return any(len(part.left) for part in self._parts)

    @property
    def _waiting(self) -> bool:
        return any(part.waiting for part in self._parts)

    def _claim(self, part: DeviceShare) -> None:
        if not len(part.left) or part.limit <= 0:
            return
        claim = self._residency.acquire(
            part.device,
            self._layer,
            part.group.experts[part.left],
            self._arrivals,
            prefill_only=None if part.prefill_only is None else part.prefill_only[part.left],
            limit=part.limit,
        )
        self._version = claim.version
        part.absorb(claim)
        self._loader.start(claim.loads)

    def _compute(self, part: DeviceShare) -> bool:
        """Computes the ready experts; returns False if none is. Keeps pins to the end, unless others need the room."""
        if not part.ready.any():
            return False
        computed = part.ready.copy()
        part.ready[:] = False
        part.compute.add(part.slots[computed], part.group.only(computed))
        self._residency.mark_computed(self._layer, part.group.experts[computed])
        if self._left:
            self._release(part, part.pinned & computed)
        return True

    def _wait(self) -> None:
        """Waits until at least one expert is ready, or there may be room for more. Raises MissingExpert."""
        began_s = self._clock()
        if self._waiting:
            while (tier := self._on_arrival(self._next_arrival())) is None:
                pass
            while not self._arrivals.empty():
                self._on_arrival(self._arrivals.get_nowait())
        else:
            tier = NVME
            if not self._residency.wait_for_change(self._version, self._remaining_s):
                raise self._overdue()
        self.stall_s[tier] += self._clock() - began_s

    def _next_arrival(self) -> SlotTransfer:
        try:
            return self._arrivals.get(timeout=self._remaining_s)
        except Empty:
            raise self._overdue() from None

    def _on_arrival(self, load: SlotTransfer) -> int | None:
        """Marks an expert as ready. Returns the tier that it came from. Raises the load's error.

        Returns None for a load that this layer-step does not wait for: another thread's, or an earlier arrival.
        """
        for part in self._parts:
            if load.layer == self._layer and part.waits_for(load):
                if load.error is not None:
                    raise load.error
                part.ready[part.waiting.pop(load.expert)] = True
                return NVME if load.cold else RAM
        return None

    @property
    def _remaining_s(self) -> float:
        return max(0.0, self._end_s - self._clock())

    def _overdue(self) -> MissingExpert:
        late = [expert for part in self._parts for expert in (*part.waiting, *part.group.experts[part.left].tolist())]
        return MissingExpert(self._layer, late[0], f"it was not loaded within {self._deadline_s:g} s")

    def _release(self, part: DeviceShare, which: BoolArray) -> None:
        slots = part.slots[which]
        part.pinned &= ~which
        if len(slots):
            self._residency.release(part.device, slots)
