"""Collects the gates' choices of one step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from edgemoe.experts.compute.dispatch import Group
from edgemoe.experts.tiers.slots import BoolArray
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import StepMeta, StepRouting


class Observations:
    """Collects the gates' choices of one step, layer by layer."""

    def __init__(self, meta: StepMeta, geometry: ExpertGeometry, clock: Callable[[], float]) -> None:
        self.meta = meta
        self.decode: BoolArray | None = None  # [T] rows of decoding sequences, where there are others
        if not meta.decode.all():
            self.decode = np.repeat(meta.decode, meta.query_lens)
        self._geometry = geometry
        self.ids = np.full((geometry.layers, len(meta.tokens), geometry.top_k), -1, np.int16)  # until a layer has run
        self.weights = np.empty(self.ids.shape, np.float32)
        self.hints: dict[int, FloatArray] = {}
        self.hidden: FloatArray | None = None
        self.stall_s = 0.0
        self._clock, self._began_s = clock, clock()

    def observe(self, layer: int, ids: IntArray, weights: FloatArray) -> None:
        """Adds one layer's choice, [T, k]."""
        self.ids[layer] = ids
        self.weights[layer] = weights

    def hint(self, layer: int, distance: int, probs: FloatArray) -> None:
        """Adds a forecast of `layer`'s choice from `distance` layers before it, [T, E]."""
        if distance not in self.hints:
            self.hints[distance] = np.zeros((len(self.ids), len(probs), self._geometry.experts), np.float32)
        self.hints[distance][layer, :, : probs.shape[1]] = probs

    def keep(self, layer: int, hidden: torch.Tensor) -> None:
        """Adds what a layer's experts are given, [T, H], where the step only decodes."""
        if self.decode is not None:
            return
        if self.hidden is None:
            self.hidden = np.empty((len(self.ids), len(hidden), self._geometry.hidden), np.float32)
        self.hidden[layer] = hidden.float().numpy(force=True)

    def prefill_only(self, ids: IntArray, group: Group) -> BoolArray | None:
        """Returns which of the group's experts only prefill needs, [n]; None where the step only decodes."""
        if self.decode is None:
            return None
        return ~np.isin(group.experts, ids[self.decode])

    def routing(self) -> StepRouting:
        """Returns the whole step, which ends now."""
        return StepRouting(
            meta=self.meta,
            ids=self.ids,
            weights=self.weights,
            hints=self.hints,
            step_s=self._clock() - self._began_s,
            stall_s=self.stall_s,
            hidden=self.hidden,
        )
