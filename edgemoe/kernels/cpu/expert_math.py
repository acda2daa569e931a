"""Experts of one layer on the CPU, by whichever way is the fastest: the kernels, or torch's products where these are
better at many tokens per expert.

All read the experts in their slots; nothing is gathered. Only this file of the package needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import silu

from edgemoe.kernels.cpu.runtime import FloatArray, IntArray, Kernels

TRIED_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # per expert, at which the ways are timed
FEW_TOKENS = 128  # of one expert; up to here their number is rounded up to an eighth of this, then to a half
SCRATCH_BYTES = 32 << 20  # of intermediate values of one call, if one expert alone needs no more
TRIAL_BYTES = 64 << 20  # of experts read by a trial
Part = tuple[IntArray, IntArray, IntArray, FloatArray]  # slots, offsets, index and weights, as in `ExpertMath.add`
Way = Callable[..., None]


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
        self.address, self.stride_bytes = slab.data_ptr(), slab.stride(0)


class ExpertMath:
    """Called on the compute thread only.

    Three ways, by the mean number of tokens per expert: dot products for a few, tiles from `tiles_from` on, torch's
    products from `products_from` on, and always without kernels.
    """

    def __init__(self, kernels: Kernels | None = None, tiles_from: float = 8.0, products_from: float = np.inf) -> None:
        self._kernels, self.tiles_from, self.products_from = kernels, tiles_from, products_from

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
        tokens = len(index) / max(len(slots), 1)
        if self._kernels is None or tokens >= self.products_from:
            one_by_one(slab, slots, offsets, index, weights, x, out)
            return
        tiles = tokens >= self.tiles_from and slab.hidden % 2 == slab.width % 2 == 0
        for part in _pieces(slab, slots, offsets, index, weights):
            job = (slab.address, slab.stride_bytes, *part, x.data_ptr())
            if tiles:
                self._kernels.many_tokens(*job, out.data_ptr(), slab.hidden, slab.width)
            else:
                self._kernels.experts(*job, slab.bf16, out.data_ptr(), len(x), slab.hidden, slab.width)

    def calibrate(self, hidden: int, width: int, bf16: bool) -> None:
        """Measures from where on which way is the fastest for experts of this shape; takes some tenths of a second."""
        if self._kernels is None:
            return
        trial = _Trial(hidden, width, bf16)
        few, many = ExpertMath(self._kernels, np.inf).add, ExpertMath(self._kernels, 0.0).add
        self.tiles_from = trial.first_faster(many, few)
        self.products_from = trial.first_faster(one_by_one, ExpertMath(self._kernels, self.tiles_from).add)

    def twin(self, kernels: Kernels | None) -> ExpertMath:
        """One for another thread, with kernels of its own."""
        return ExpertMath(kernels, self.tiles_from, self.products_from)


def _pieces(slab: ExpertSlab, slots: IntArray, offsets: IntArray, index: IntArray, weights: FloatArray) -> list[Part]:
    """Runs of slots whose intermediate values fit, mostly one; a run has at least one slot."""
    most = max(1, SCRATCH_BYTES // (4 * (slab.hidden + slab.width)))  # pairs
    if len(index) <= most:
        return [(slots, offsets, index, weights)]
    parts, first = [], 0
    while first < len(slots):
        start = offsets[first]
        after = max(first + 1, int(np.searchsorted(offsets, start + most, side="right")) - 1)
        end = offsets[after]
        parts.append((slots[first:after], offsets[first : after + 1] - start, index[start:end], weights[start:end]))
        first = after
    return parts


def one_by_one(
    slab: ExpertSlab,
    slots: IntArray,
    offsets: IntArray,
    index: IntArray,
    weights: FloatArray,
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As `ExpertMath.add`: each expert's own products, weights on the left, up to twice as fast as grouped products.

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


class _Trial:
    """Random experts that the two ways are timed on."""

    def __init__(self, hidden: int, width: int, bf16: bool) -> None:
        size = 3 * hidden * width * (2 if bf16 else 4)
        self._experts = max(2, min(16, TRIAL_BYTES // size))
        dtype = torch.bfloat16 if bf16 else torch.float32
        weights = torch.randn(self._experts, size // dtype.itemsize).mul_(0.02).to(dtype)
        self._slab = ExpertSlab(weights.view(torch.uint8), hidden, width, bf16)

    def first_faster(self, way: Way, than: Way) -> float:
        """From how many tokens per expert on `way` is faster; infinite where it never is."""
        return next((float(n) for n in TRIED_TOKENS if self.seconds(way, n) < self.seconds(than, n)), np.inf)

    def seconds(self, way: Way, tokens: int) -> float:
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
