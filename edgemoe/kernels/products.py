"""Experts of one layer, by whichever way is the faster one: the CPU kernel for a few tokens per expert, torch's
products for many, and always on a GPU.

Both read the experts in their slots; nothing is gathered. Only this file of the package needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import grouped_mm, silu

from edgemoe.kernels.compute import FloatArray, IntArray, Kernels

TRIED_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # tokens per expert at which the two ways are timed
FEW_TOKENS = 128  # of one expert; up to here their number is rounded up to an eighth of this, then to a half
KERNEL_BYTES = 64 << 20  # of intermediate values, at most
TRIAL_BYTES = 64 << 20  # of experts read by a trial


class ExpertSlab:
    """Slots of experts as matrices: gate and up rows [S, 2I, H], then down [S, H, I]. Owns nothing."""

    def __init__(self, slab: torch.Tensor, hidden: int, width: int, bf16: bool) -> None:
        """`slab` is uint8 [S, stride], with the experts' bytes at the front of each slot."""
        self.hidden, self.width, self.bf16 = hidden, width, bf16
        dtype = torch.bfloat16 if bf16 else torch.float32
        item, split = dtype.itemsize, 2 * width * hidden
        rows = slab[:, : 3 * width * hidden * item].view(dtype)  # [S, 3 * I * H]
        self.gate_up = rows[:, :split].view(len(slab), 2 * width, hidden)
        self.down = rows[:, split:].view(len(slab), hidden, width)
        self.address, self.stride_bytes, self.device = slab.data_ptr(), slab.stride(0), slab.device


class ExpertMath:
    """Called on the compute thread only."""

    def __init__(self, kernels: Kernels | None = None, crossover: float = 8.0) -> None:
        """`crossover` is the mean number of tokens per expert from which torch's products are used."""
        self._kernels, self.crossover = kernels, crossover

    def add(
        self,
        slab: ExpertSlab,
        slots: IntArray,
        offsets: IntArray,
        index: IntArray,
        weights: FloatArray,
        x: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Adds the weighted outputs of the experts in `slots` [n] to `out` [T, H] float32.

        Slot i serves the pairs offsets[i]:offsets[i + 1]; pair p is token `index[p]` of `x` [T, H], in the slab's
        type, with routing weight `weights[p]`.
        """
        few = len(index) < self.crossover * len(slots) and 4 * len(index) * slab.width <= KERNEL_BYTES
        if self._kernels is not None and few and slab.device.type == "cpu":
            self._by_kernel(slab, slots, offsets, index, weights, x, out)
        else:
            by_products(slab, slots, offsets, index, weights, x, out)

    def _by_kernel(
        self,
        slab: ExpertSlab,
        slots: IntArray,
        offsets: IntArray,
        index: IntArray,
        weights: FloatArray,
        x: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        assert self._kernels is not None
        self._kernels.experts(
            slab.address,
            slab.stride_bytes,
            slots,
            offsets,
            index,
            weights,
            x.data_ptr(),
            slab.bf16,
            out.data_ptr(),
            len(x),
            slab.hidden,
            slab.width,
        )

    def calibrate(self, hidden: int, width: int, bf16: bool) -> None:
        """Measures the crossover for experts of this shape; takes about a tenth of a second."""
        if self._kernels is None:
            return
        trial = _Trial(hidden, width, bf16)
        for tokens in TRIED_TOKENS:
            self.crossover = float(tokens)
            if trial.seconds(by_products, tokens) < trial.seconds(self._by_kernel, tokens):
                return
        self.crossover = float("inf")


def by_products(
    slab: ExpertSlab,
    slots: IntArray,
    offsets: IntArray,
    index: IntArray,
    weights: FloatArray,
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As `ExpertMath.add`."""
    if x.device.type == "cpu":
        one_by_one(slab, slots, offsets, index, weights, x, out)
    else:
        grouped(slab, slots, offsets, index, weights, x, out)


def one_by_one(
    slab: ExpertSlab,
    slots: IntArray,
    offsets: IntArray,
    index: IntArray,
    weights: FloatArray,
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Each expert's own products, its weights on the left: on CPUs up to twice as fast as grouped products.

    Numbers of tokens are rounded up, for each shape that oneDNN has not met lately costs it a millisecond.
    """
    counts = np.diff(offsets)
    step = np.where(counts <= FEW_TOKENS, FEW_TOKENS // 8, FEW_TOKENS // 2)
    ends = np.cumsum(-(-counts // step) * step)
    starts = np.concatenate(([0], ends[:-1]))
    places = torch.from_numpy(np.repeat(starts - offsets[:-1], counts) + np.arange(len(index)))
    rows = torch.from_numpy(index)
    inputs = x.new_zeros((int(ends[-1]), slab.hidden))
    inputs[places] = x[rows]
    results = torch.empty_like(inputs)
    for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        gate, up = torch.mm(slab.gate_up[slot], inputs[start:end].T).chunk(2)
        torch.mm(slab.down[slot], silu(gate).mul_(up), out=results[start:end].T)
    out.index_add_(0, rows, results[places].float().mul_(torch.from_numpy(weights)[:, None]))


def grouped(
    slab: ExpertSlab,
    slots: IntArray,
    offsets: IntArray,
    index: IntArray,
    weights: FloatArray,
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One group per slot of the slab, empty where the slot is not asked for."""
    order = np.argsort(slots, kind="stable")
    counts = np.diff(offsets)[order]
    starts = np.repeat(offsets[:-1][order] - np.cumsum(counts) + counts, counts)
    pairs = starts + np.arange(len(index))  # the pairs in the order of slots
    ends = np.zeros(len(slab.down), np.int32)
    ends[slots] = np.diff(offsets)
    groups = torch.from_numpy(np.cumsum(ends, dtype=np.int32)).to(x.device)
    rows = torch.from_numpy(index[pairs]).to(x.device)
    gate, up = grouped_mm(x[rows], slab.gate_up.transpose(1, 2), offs=groups).chunk(2, dim=-1)
    result = grouped_mm(silu(gate) * up, slab.down.transpose(1, 2), offs=groups).float()
    result *= torch.from_numpy(weights[pairs]).to(x.device)[:, None]
    out.index_put_((rows,), result, accumulate=True)  # index_add_ adds in no certain order on a GPU


class _Trial:
    """Random experts that the two ways are timed on."""

    def __init__(self, hidden: int, width: int, bf16: bool) -> None:
        size = 3 * hidden * width * (2 if bf16 else 4)
        self._experts = max(2, min(16, TRIAL_BYTES // size))
        dtype = torch.bfloat16 if bf16 else torch.float32
        weights = torch.randn(self._experts, size // dtype.itemsize).mul_(0.02).to(dtype)
        self._slab = ExpertSlab(weights.view(torch.uint8), hidden, width, bf16)

    def seconds(self, way: Callable[..., None], tokens: int) -> float:
        """The best of three, with so many tokens for each expert."""
        slots, offsets = np.arange(self._experts), np.arange(self._experts + 1) * tokens
        index = np.tile(np.arange(tokens), self._experts)
        weights = np.ones(len(index), np.float32)
        x = torch.randn(tokens, self._slab.hidden).to(self._slab.down.dtype)
        out = torch.zeros(tokens, self._slab.hidden)
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            way(self._slab, slots, offsets, index, weights, x, out)
            taken.append(time.perf_counter() - start)
        return min(taken)
