"""States of sequences, in slots: what a layer that is not attention remembers of all tokens so far.

A slot holds all such layers, so that it is copied as one run of bytes. Unlike keys and values a state is not paged:
its size does not depend on the number of tokens. A step reads a sequence's state from one slot and writes the new one
to another, so a step that fails has changed nothing, and a slot can be kept for the prefix cache without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from edgemoe.families.delta import DeltaSpec
from edgemoe.model.memory import zeros


class LayerStates(NamedTuple):
    """One layer's states of all slots. Views of a `StateCache`."""

    tails: torch.Tensor  # [slots, taps - 1, channels]: the last inputs of the convolution, the latest one last
    matrices: torch.Tensor  # [slots, value_heads, key_dim, value_dim]


class StateCache:
    """Owns `data` [slots, layers, floats] float32: for each layer the convolution's tail, then the heads' matrices.

    Slot 0 is the state before the first token, all zeros; it is never written. The block manager decides who uses the
    others. Memory is allocated once and never grows.
    """

    def __init__(self, spec: DeltaSpec, layers: int, slots: int, device: torch.device | str = "cpu") -> None:
        self.data = zeros((slots, layers, spec.state_floats), torch.float32, device)
        self._tail = (spec.taps - 1, spec.channels)
        self._matrices = (spec.value_heads, spec.key_dim, spec.value_dim)

    @property
    def slot_bytes(self) -> int:
        return self.data.stride(0) * self.data.element_size()

    def layer(self, number: int) -> LayerStates:
        """Returns the states of one layer, counted among those that have states."""
        tails, matrices = torch.split(self.data[:, number], [prod(self._tail), prod(self._matrices)], dim=1)
        return LayerStates(tails.view(-1, *self._tail), matrices.view(-1, *self._matrices))

    def gather(self, slots: Sequence[int]) -> torch.Tensor:
        """Returns a copy of these slots in host memory, one row each."""
        return self.data[torch.tensor(slots, dtype=torch.int64, device=self.data.device)].cpu()

    def scatter(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Writes rows that `gather` returned into these slots."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.data.device)
        self.data.index_copy_(0, index, rows.to(self.data.device))
