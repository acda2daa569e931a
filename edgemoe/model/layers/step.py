"""What all layers of one step share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from edgemoe.families.records import RopeSpec
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import StepAttention
from edgemoe.model.kv import KVCache
from edgemoe.model.rope import Angles, Rope
from edgemoe.model.states import StepStates
from edgemoe.types.step import Batch


class StepContext:
    """One step's input and cache, and what is computed from its positions once for all layers."""

    def __init__(self, batch: Batch, kv: KVCache, kernels: Kernels | None, ropes: Mapping[RopeSpec, Rope]) -> None:
        self.batch, self.kv, self.kernels = batch, kv, kernels
        self.attention = StepAttention(batch, kv, kernels)
        self._ropes = ropes
        self._angles: dict[RopeSpec, Angles] = {}

    @cached_property
    def states(self) -> StepStates:
        """Returns which rows of the step lead from which state to which."""
        return StepStates(self.batch, self.kv.data.device)

    def angles(self, rope: RopeSpec) -> Angles:
        """Returns cos and sin [T, dims / 2] of the step's positions."""
        if rope not in self._angles:
            self._angles[rope] = self._ropes[rope](self.batch.positions)
        return self._angles[rope]


def ropes_of(spec: ModelSpec, device: torch.device) -> dict[RopeSpec, Rope]:
    """Returns the rotary embeddings of a model's layers."""
    records = {attention.rope for attention in spec.attention if attention.rope is not None}
    return {record: Rope(record, device) for record in records}
