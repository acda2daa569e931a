"""What all layers of one step share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from edgemoe.families.records import RopeSpec
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import StepAttention
from edgemoe.model.kv import KVCache, StepStates
from edgemoe.model.rope import Angles, Rope
from edgemoe.types.step import Batch


class StepContext:
    """One step's attention, states and cache, and what is computed from its positions once for all layers."""

    def __init__(
        self,
        kv: KVCache,
        kernels: Kernels | None,
        attention: StepAttention,
        states: Callable[[], StepStates],
        angles: Callable[[RopeSpec], Angles],
    ) -> None:
        """`states` and `angles` are called once for what layers ask for."""
        self.kv, self.kernels, self.attention = kv, kernels, attention
        self._find_states, self._find_angles = states, angles
        self._angles: dict[RopeSpec, Angles] = {}

    @classmethod
    def of(cls, batch: Batch, kv: KVCache, kernels: Kernels | None, ropes: Mapping[RopeSpec, Rope]) -> StepContext:
        """Returns the context of a batch of any sequences."""
        return cls(
            kv,
            kernels,
            StepAttention(batch, kv, kernels),
            lambda: StepStates.of(batch, kv.data.device),
            lambda rope: ropes[rope](batch.positions),
        )

    @cached_property
    def states(self) -> StepStates:
        """Returns which rows of the step lead from which state to which."""
        return self._find_states()

    def angles(self, rope: RopeSpec) -> Angles:
        """Returns cos and sin [T, dims / 2] of the step's positions."""
        if rope not in self._angles:
            self._angles[rope] = self._find_angles(rope)
        return self._angles[rope]


def ropes_of(spec: ModelSpec, device: torch.device) -> dict[RopeSpec, Rope]:
    """Returns the rotary embeddings of a model's layers."""
    records = {attention.rope for attention in spec.attention if attention.rope is not None}
    return {record: Rope(record, device) for record in records}
