"""The arithmetic of experts: tokens grouped by expert, and the products on host memory."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch

from edgemoe.experts.arena import ExpertShape, Slab
from edgemoe.experts.pool import BoolArray
from edgemoe.kernels.compute import MAX_TOKENS, Kernels
from edgemoe.types import FloatArray, IntArray

KERNEL_TOKENS = min(16, MAX_TOKENS)


class Group(NamedTuple):
    """Distinct experts [n] of T tokens' calls for k each; the i-th has the calls `offsets[i]:offsets[i + 1]`."""

    experts: IntArray  # [n]
    offsets: IntArray  # [n + 1]
    calls: IntArray  # [m] the call's place among all, token * k + j
    tokens: IntArray  # [m] its token
    weights: FloatArray  # [m] its routing weight

    @classmethod
    def of(cls, ids: IntArray, weights: FloatArray) -> Self:
        """The calls of T tokens for k experts each: `ids` and `weights` [T, k]."""
        tokens, k = ids.shape
        flat = ids.ravel()
        if tokens == 1:  # a token's experts are distinct
            return cls(flat, *_of_one_token(k), weights.ravel())
        order = np.argsort(flat, kind="stable")
        ordered = flat[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        offsets = np.concatenate((starts, [len(flat)]))
        return cls(ordered[starts], offsets, order, order // k, weights.ravel()[order])

    def only(self, chosen: BoolArray) -> Self:
        """The calls of the chosen [n] experts."""
        counts = np.diff(self.offsets)
        kept = np.repeat(chosen, counts)
        offsets = np.concatenate(([0], np.cumsum(counts[chosen])))
        return type(self)(self.experts[chosen], offsets, self.calls[kept], self.tokens[kept], self.weights[kept])


@functools.cache
def _of_one_token(k: int) -> tuple[IntArray, IntArray, IntArray]:
    return np.arange(k + 1), np.arange(k), np.zeros(k, np.int64)


class Compute(Protocol):
    """Experts' products on one device. Called on the compute thread only."""

    def begin(self, hidden: torch.Tensor) -> None:
        """Starts a layer: `hidden` [T, H]."""

    def add(self, slots: IntArray, group: Group) -> None:
        """Adds the weighted outputs of the group's experts, the i-th lying in `slots[i]`."""

    def end(self) -> torch.Tensor:
        """The sum, [T, H] as `hidden` was."""


class Products:
    """Experts in a slab on any device, by torch's matrix products, one expert after the other."""

    def __init__(self, slab: torch.Tensor, shape: ExpertShape) -> None:
        """`slab` [S, stride] uint8."""
        dtype = torch.bfloat16 if shape.bf16 else torch.float32
        rows = slab[:, : shape.expert_bytes].view(dtype)
        split = 2 * shape.width * shape.hidden
        self._gate_up = rows[:, :split].view(len(slab), 2 * shape.width, shape.hidden)  # [S, 2I, H]
        self._down = rows[:, split:].view(len(slab), shape.hidden, shape.width)  # [S, H, I]

    def add(self, slots: IntArray, group: Group, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the group's weighted outputs to `out` [T, H] float32."""
        offsets = group.offsets.tolist()
        tokens = torch.from_numpy(group.tokens).to(hidden.device)
        weights = torch.from_numpy(group.weights).to(hidden.device)
        for i, slot in enumerate(slots.tolist()):
            rows = tokens[offsets[i] : offsets[i + 1]]
            gate, up = (hidden[rows] @ self._gate_up[slot].T).chunk(2, dim=-1)
            output = (torch.nn.functional.silu(gate) * up) @ self._down[slot].T
            out.index_add_(0, rows, output.float() * weights[offsets[i] : offsets[i + 1], None])


class HostCompute:
    """Experts in a slab of host memory, computed by the CPU with sums in float32.

    Kernels, which read each weight once where it lies, serve decode-sized batches; torch's products larger ones.
    """

    def __init__(self, slab: Slab, shape: ExpertShape, kernels: Kernels | None) -> None:
        """Without kernels, torch does all."""
        self._slab, self._shape, self._kernels = slab, shape, kernels
        self._products = Products(torch.from_numpy(slab), shape)
        self._address, self._stride_bytes = slab.ctypes.data, slab.shape[1]

    def begin(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden.contiguous()
        self._out = torch.zeros(hidden.shape, dtype=torch.float32)

    def add(self, slots: IntArray, group: Group) -> None:
        if self._kernels is None or len(self._hidden) > KERNEL_TOKENS:
            self._products.add(slots, group, self._hidden, self._out)
            return
        self._kernels.experts(
            self._address,
            self._stride_bytes,
            slots,
            group.offsets,
            group.tokens,
            group.weights,
            self._hidden.data_ptr(),
            self._shape.bf16,
            self._out.data_ptr(),
            len(self._hidden),
            self._shape.hidden,
            self._shape.width,
        )

    def end(self) -> torch.Tensor:
        return self._out.to(self._hidden.dtype)
