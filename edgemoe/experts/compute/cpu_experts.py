"""Computes experts on the CPU from the RAM tier, while others are copied to the devices."""

from __future__ import annotations

import time

import numpy as np
import torch

from edgemoe.experts.compute.cost_model import CostModel
from edgemoe.experts.compute.dispatch import ExpertCompute
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import BoolArray
from edgemoe.kernels.cpu.expert_math import ExpertMath
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import TokenGroups

NO_SLOTS: IntArray = np.empty(0, np.int64)


class CpuExperts:
    """Computes the CPU's part of one thread's layer-steps.

    Each layer calls `begin`, any number of `claim`, `compute` and `drop`, then `end`.
    """

    def __init__(self, residency: Residency, compute: ExpertCompute, costs: CostModel) -> None:
        """Takes a `compute` over the RAM tier's slots."""
        self.costs = costs
        self.experts, self.took_s = 0, 0.0  # computed; in all
        self._residency, self._compute = residency, compute
        self._slots = NO_SLOTS  # pinned, to be computed

    def begin(self, hidden: torch.Tensor) -> None:
        """Starts a layer with `hidden` [T, H] on any device, which is copied only if needed."""
        self._hidden, self._used = hidden, False

    def claim(self, layer: int, group: TokenGroups, prefill_only: BoolArray | None) -> BoolArray | None:
        """Pins the group's experts that the CPU should compute. Returns their mask [n]; None for none."""
        chosen = self.costs.for_cpu(layer, group)
        if chosen is None:
            return None
        if not self._used:  # now, because later it would wait for the devices' work
            self._compute.begin(layer, self._hidden.to("cpu"))
            self._used = True
        slots = self._residency.pin_in_ram(
            layer, group.experts[chosen], None if prefill_only is None else prefill_only[chosen]
        )
        self._slots = slots[slots >= 0]
        chosen[chosen] = slots >= 0  # without experts that were evicted meanwhile
        self._layer, self._group = layer, group.only(chosen)
        return chosen if len(self._slots) else None

    def compute(self) -> None:
        """Computes the claimed experts, if any, and unpins them."""
        if not len(self._slots):
            return
        began_s = time.perf_counter()
        self._compute.add(self._slots, self._group)
        took_s = time.perf_counter() - began_s
        self.costs.observe_cpu(self._layer, float(work_units(self._group.offsets).sum()), took_s)
        self.experts += len(self._slots)
        self.took_s += took_s
        self.drop()

    def drop(self) -> None:
        """Unpins claimed experts that were not computed."""
        slots, self._slots = self._slots, NO_SLOTS
        if len(slots):
            self._residency.unpin(slots)

    def end(self) -> torch.Tensor | None:
        """Returns the sum, [T, H] float32; None where nothing was computed."""
        return self._compute.end() if self._used else None

    def clone_for_thread(self, residency: Residency, math: ExpertMath, costs: CostModel) -> CpuExperts:
        """Returns another one over the same slots for another thread, which has its own measurements."""
        return type(self)(residency, self._compute.clone_for_thread(math), costs)
