"""States of sequences, in slots: what a layer that is not attention remembers of all tokens so far.

A slot holds all such layers, so that it is copied as one run of bytes. Unlike keys and values a state is not paged:
its size does not depend on the number of tokens. A step reads a sequence's state from one slot and writes the new one
to another, so a step that fails has changed nothing, and a slot can be kept for the prefix cache without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from edgemoe.families.delta import DeltaHeads
from edgemoe.families.spec import ModelSpec
from edgemoe.model.memory import zeros
from edgemoe.types.step import Batch


class LayerStates(NamedTuple):
    """One layer's states of all slots. Views of a `StateCache`."""

    tails: torch.Tensor  # [slots, taps - 1, channels]: the last inputs of the convolution, the latest one last
    matrices: torch.Tensor  # [slots, value_heads, key_dim, value_dim]


class StateCache:
    """Owns `data` [slots, layers, floats] float32: for each layer the convolution's tail, then the heads' matrices.

    Slot 0 is the state before the first token, all zeros; it is never written. The block manager decides who uses the
    others. Memory is allocated once and never grows.
    """

    def __init__(self, heads: DeltaHeads, layers: int, slots: int, device: torch.device | str = "cpu") -> None:
        self.data = zeros((slots, layers, heads.state_floats), torch.float32, device)
        self._tail = (heads.taps - 1, heads.channels)
        self._matrices = (heads.count, heads.dim, heads.value_dim)

    @classmethod
    def of(cls, spec: ModelSpec, slots: int, device: torch.device | str = "cpu") -> StateCache | None:
        """Returns the states of a model, all of whose layers with states are alike; None where it has none."""
        kinds = {spec.attention[layer].heads for layer in spec.state_layers}
        if not kinds:
            return None
        (heads,) = kinds
        assert isinstance(heads, DeltaHeads)
        return cls(heads, len(spec.state_layers), slots, device)

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


class Stretch(NamedTuple):
    """A run of one sequence's tokens: rows first:after of the step, and the slots of the states before and after."""

    first: int
    after: int
    read: int
    write: int


@dataclass(frozen=True, slots=True)
class StepStates:
    """Says which rows of a step lead from which slot to which: sequences of one token together, others in stretches."""

    rows: torch.Tensor  # [S] of sequences of one token
    reads: torch.Tensor  # [S] slots
    writes: torch.Tensor  # [S] slots
    stretches: Sequence[Stretch] = ()

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> StepStates:
        """Returns what a batch says."""
        starts = np.cumsum([0, *batch.query_lens]).tolist()
        used = list(zip(batch.states, starts, batch.query_lens, strict=False))
        single = [(start, use.read, use.writes[-1][1]) for use, start, count in used if count == 1]
        columns = torch.tensor(single, dtype=torch.int64).view(-1, 3).T.contiguous().to(device)
        stretches: list[Stretch] = []
        for use, start, count in used:
            done, read = 0, use.read
            for after, slot in use.writes if count > 1 else ():
                stretches.append(Stretch(start + done, start + after, read, slot))
                done, read = after, slot
        rows, reads, writes = columns.unbind(0)
        return cls(rows, reads, writes, stretches)
