"""Computes the experts of one layer on the CPU in the fastest way: by the kernels, or by torch for many tokens each.

All ways read the experts in their slots and gather nothing. `ExpertTable` lists the slots for a whole step in one call.
Of this package only this file needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import gelu, silu

from edgemoe.encodings.codec import pack, unpack
from edgemoe.kernels.cpu import experts_decode, experts_prefill
from edgemoe.kernels.cpu.decode_step import PLACES
from edgemoe.kernels.cpu.experts_decode import EXPERTS, ExpertLayout, rows_in_chunks, run_experts, scratch_floats
from edgemoe.kernels.cpu.experts_prefill import PREFILL_EXPERTS, make_prefill_experts
from edgemoe.kernels.cpu.runtime import KernelContext
from edgemoe.types.arrays import FloatArray, IntArray, place_of
from edgemoe.types.encoding import BFLOAT16, FLOAT32
from edgemoe.types.experts import Activation

SLAB, STRIDE, X, X_BF16, OUT = (place_of(EXPERTS, name) for name in ("slab", "stride", "x", "x_bf16", "out"))
SLOTS, OFFSETS, INDEX, WEIGHTS = (place_of(EXPERTS, name) for name in ("slots", "offsets", "index", "weights"))


class LayerPlaces(NamedTuple):
    """The address and layout of one layer's slots, and the tokens per expert above which another kernel is faster."""

    layout: ExpertLayout
    slab: int  # address of slot `first`
    stride_bytes: int
    first: int  # slot
    most_tokens: float


class ExpertTable:
    """Holds the records of all layers. For the thread that runs the kernels."""

    def __init__(self, kernels: KernelContext, layers: Sequence[LayerPlaces], where: IntArray) -> None:
        """Takes `where` [L, E], the slot of each expert, which is read at each step and must live as long."""
        self._kernels, self._where = kernels, where
        self._shapes = {(layer.layout.hidden, layer.layout.width) for layer in layers}
        self._jobs, self._places = np.zeros(len(layers), EXPERTS), np.zeros(len(layers), PLACES)
        for number, layer in enumerate(layers):
            self._fill(self._jobs[number : number + 1], self._places[number : number + 1], number, layer)

    def _fill(self, job: npt.NDArray[np.void], place: npt.NDArray[np.void], number: int, layer: LayerPlaces) -> None:
        rows = self._kernels.row_code(layer.layout.encoding)
        down = self._kernels.row_code(layer.layout.down_encoding)
        layer.layout.fill(job)
        job["slab"], job["stride"], job["x_bf16"] = layer.slab, layer.stride_bytes, self._kernels.bf16
        job["multiply"], job["pack"] = rows.rows.address, rows.pack.address
        job["down_multiply"], job["down_pack"] = down.rows.address, down.pack.address
        job["iota"], job["threads"] = self._kernels.iota, self._kernels.pool.threads
        job["gate_rows"], job["down_rows"] = rows_in_chunks(layer.layout.hidden, self._kernels.pool.threads)
        place["job"], place["where"], place["first"] = job.ctypes.data, self._where[number].ctypes.data, layer.first
        place["most"] = layer.most_tokens

    def address(self, tokens: int, pairs: int) -> int:
        """Returns the address of the PLACES records [L], for a step of `tokens` tokens and `pairs` calls of experts."""
        sizes = [scratch_floats(*shape, tokens, pairs, pairs) for shape in self._shapes]
        for name in sizes[0]:
            self._jobs[name] = self._kernels.scratch(f"table.{name}", max(size[name] for size in sizes))
        return int(self._places.ctypes.data)


class ExpertKernels:
    """Runs the kernels of experts. Several may share a context; each sets its addresses again after a change of it."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self._job = np.zeros(1, EXPERTS)
        self._job["threads"] = context.pool.threads
        self._call, self._job_address = self._job.view(np.int64), self._job.ctypes.data
        self._sizes: tuple[ExpertLayout | None, int, int, int, bool] = (None, 0, 0, 0, False)
        self._scratch_changes = 0  # of the context when the record's scratch addresses were set
        self._experts, self._prefill_experts = run_experts.call, make_prefill_experts(context.bf16)[0].call

    def few_tokens(
        self,
        layout: ExpertLayout,
        slab: int,
        stride_bytes: int,
        slots: IntArray,
        offsets: IntArray,
        index: IntArray,
        weights: FloatArray,
        x: int,
        x_bf16: bool,
        out: int,
        tokens: int,
        in_bytes: bool = False,
    ) -> None:
        """Adds the weighted outputs of some experts to `out` [tokens, hidden] float32.

        `slab` is the address of slot 0; a slot holds an expert as `layout` says. Slot `slots[i]` serves the pairs
        offsets[i]:offsets[i + 1]. Pair p is token `index[p]` of `x` [tokens, hidden], bf16 where `x_bf16`, else
        float32, with routing weight `weights[p]`. For a few tokens per expert; for many `in_bytes`, which multiplies
        activations of 8 bits.
        """
        sizes = (layout, tokens, len(index), len(slots), in_bytes)
        if sizes != self._sizes or self._scratch_changes != self._context.scratch_changes:
            self._size_experts(*sizes)
        job = self._call
        job[SLAB], job[STRIDE], job[X], job[X_BF16], job[OUT] = slab, stride_bytes, x, x_bf16, out
        job[SLOTS], job[OFFSETS], job[INDEX] = slots.ctypes.data, offsets.ctypes.data, index.ctypes.data
        job[WEIGHTS] = weights.ctypes.data
        self._experts(self._context.pool.control, self._job_address)

    def _size_experts(self, layout: ExpertLayout, tokens: int, pairs: int, slots: int, in_bytes: bool) -> None:
        """Sets the layout, the sizes and the scratch memory of the EXPERTS record."""
        job = self._job
        layout.fill(job)
        for name, count in scratch_floats(layout.hidden, layout.width, tokens, pairs, slots).items():
            job[name] = self._context.scratch(f"experts.{name}", count)
        for which, encoding in (("", layout.encoding), ("down_", layout.down_encoding)):
            rows = self._context.row_code(encoding)
            multiply, pack = (rows.byte_rows, rows.byte_pack) if in_bytes else (rows.rows, rows.pack)
            assert multiply is not None
            assert pack is not None
            job[f"{which}multiply"], job[f"{which}pack"] = multiply.address, pack.address
        job["tokens"], job["iota"], job["count"] = tokens, self._context.iota, slots
        job["gate_rows"], job["down_rows"] = rows_in_chunks(layout.hidden, self._context.pool.threads)
        self._sizes = (layout, tokens, pairs, slots, in_bytes)
        self._scratch_changes = self._context.scratch_changes

    def many_tokens(
        self,
        layout: ExpertLayout,
        slab: int,
        stride_bytes: int,
        slots: IntArray,
        offsets: IntArray,
        index: IntArray,
        weights: FloatArray,
        x: int,
        out: int,
        tokens: int,
    ) -> None:
        """Computes the same as `few_tokens`, for many tokens per expert.

        `x` is in the model's type, as are weights that are not encoded; hidden size and width are even.
        """
        codes = [self._context.row_code(each) for each in (layout.encoding, layout.down_encoding)]
        if all(each.byte_rows is not None for each in codes):
            experts = (layout, slab, stride_bytes, slots, offsets, index, weights)
            self.few_tokens(*experts, x, self._context.bf16, out, tokens, in_bytes=True)
            return
        job = np.zeros(1, PREFILL_EXPERTS)
        layout.fill(job)
        groups, firsts = experts_prefill.group_pairs(offsets)
        sizes = experts_prefill.scratch_floats(layout.hidden, layout.width, len(groups), len(slots))
        for name, count in sizes.items():
            job[name] = self._context.scratch(f"prefill_experts.{name}", count)
        job["slab"], job["stride"], job["slots"], job["count"] = slab, stride_bytes, slots.ctypes.data, len(slots)
        job["index"], job["weights"], job["x"], job["out"] = index.ctypes.data, weights.ctypes.data, x, out
        job["groups"], job["group_count"], job["firsts"] = groups.ctypes.data, len(groups), firsts.ctypes.data
        job["down_rows"] = experts_prefill.down_rows(self._context.pool.threads)
        if layout.encoding != self._context.dtype:
            each = experts_prefill.decoded_floats(layout.hidden, layout.width)
            self._context.decode_rows(job, codes[0], each)
            assert codes[1].unpack is not None
            job["down_unpack"] = codes[1].unpack.address
            job["ordered"] = self._context.scratch("prefill_experts.ordered", tokens * layout.hidden)
            job["tokens"] = tokens
        self._prefill_experts(self._context.pool.control, job.ctypes.data)


TRIED_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # per expert, at which the ways are timed
FEW_TOKENS = 128  # of one expert; up to here rounded up to a multiple of an eighth of this, beyond of a half
SCRATCH_BYTES = 32 << 20  # of intermediate values of one call, if one expert alone needs no more
TRIAL_BYTES = 64 << 20  # of experts read by a trial
TRIAL_WIDTH = 256  # that a larger expert's width is cut down to a multiple of: every encoding fits it
TRIAL_ROWS = 64  # that are not repeated
TRIAL_RUNS, TRIAL_S = 3, 0.05  # runs of a way at most, and the seconds after which none is begun
Part = tuple[IntArray, IntArray, IntArray, FloatArray]  # slots, offsets, index and weights, as in `ExpertMath.add`
Way = Callable[..., None]


class ExpertSlab:
    """Views slots of experts as rows: gate and up [S, 2I, H], or up alone [S, I, H], and down [S, H, I].

    Owns no memory. Rows in the type of the hidden states are numbers, as `in_place` tells; others are bytes. Where
    experts have biases, `gate_up_bias` [S, 2I] and `down_bias` [S, H] are float32, else None.
    """

    def __init__(self, slab: torch.Tensor, layout: ExpertLayout, bf16: bool) -> None:
        """Views `slab`, uint8 [S, stride], in which each slot begins with an expert; `bf16` are the hidden states."""
        self.layout, self.bf16 = layout, bf16
        hidden, width, encoding, self.activation, biases, _ = layout
        self.hidden, self.width, self.encoding = hidden, width, encoding
        self.in_place = encoding == (BFLOAT16 if bf16 else FLOAT32)
        long, short = encoding.row_bytes(hidden), layout.down_encoding.row_bytes(width)
        first = layout.first_rows
        split, end = first * long, first * long + hidden * short
        self.gate_up = slab[:, :split].view(len(slab), first, long)
        self.down = slab[:, split:end].view(len(slab), hidden, short)
        if self.in_place:
            dtype = torch.bfloat16 if bf16 else torch.float32
            self.gate_up, self.down = self.gate_up.view(dtype), self.down.view(dtype)
        self.address, self.stride_bytes = slab.data_ptr(), slab.stride(0)
        self.gate_up_bias = self.down_bias = None
        if biases:
            floats = slab[:, end : end + 4 * (first + hidden)].view(torch.float32)
            self.gate_up_bias, self.down_bias = floats[:, :first], floats[:, first:]

    @property
    def has_tiles(self) -> bool:
        """Returns whether tiles read the rows: encoded ones, or numbers of the type of the hidden states."""
        return self.in_place or bool(self.encoding.group)

    def matrices(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gate and up [2I, H], or up alone, and down [H, I] of one slot: as they are, else decoded float32."""
        if self.in_place:
            return self.gate_up[slot], self.down[slot]
        gate_up, down = self.gate_up[slot].numpy(), self.down[slot].numpy()
        return (
            torch.from_numpy(unpack(gate_up, self.encoding, self.hidden)),
            torch.from_numpy(unpack(down, self.layout.down_encoding, self.width)),
        )


class WayLimits(NamedTuple):
    """The mean numbers of tokens per expert from which on tiles, and torch's products, are faster."""

    tiles: float = 8.0
    products: float = np.inf


USUAL = WayLimits()


class ExpertMath:
    """Computes experts in one of three ways, by the mean number of tokens per expert. Compute thread only.

    The ways are dot products for a few tokens, tiles for more, and torch's products for many, of weights that are not
    encoded. Without kernels all are torch's products.
    """

    def __init__(
        self,
        kernels: KernelContext | None = None,
        usual: WayLimits = USUAL,
        measured: Mapping[ExpertLayout, WayLimits] | None = None,
    ) -> None:
        """Takes the limits of experts that were not measured, and the measured ones."""
        self._kernels, self._usual, self.measured = kernels, usual, dict(measured or {})
        self._expert_kernels = ExpertKernels(kernels) if kernels is not None else None

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

        Slot i serves the pairs offsets[i]:offsets[i + 1]. Pair p is token `index[p]` of `x` [T, H], of the type that
        the slab says, with routing weight `weights[p]`.
        """
        tokens = len(index) / max(len(slots), 1)
        limits = self.measured.get(slab.layout, self._usual)
        if self._expert_kernels is None or tokens >= limits.products:
            one_by_one(slab, slots, offsets, index, weights, x, out)
            return
        tiles = tokens >= limits.tiles and slab.has_tiles and slab.hidden % 2 == slab.width % 2 == 0
        for part in _pieces(slab, slots, offsets, index, weights, tiles):
            job = (slab.layout, slab.address, slab.stride_bytes, *part, x.data_ptr())
            if tiles:
                self._expert_kernels.many_tokens(*job, out.data_ptr(), len(x))
            else:
                self._expert_kernels.few_tokens(*job, slab.bf16, out.data_ptr(), len(x))

    def table(self, layers: Sequence[tuple[ExpertSlab, int]], where: IntArray) -> ExpertTable | None:
        """Builds the table of all layers' experts for steps of few tokens; None without kernels.

        `layers` are each layer's slab and the number of its first slot. `where` [L, E] has the slots of all experts.
        """
        if self._kernels is None:
            return None
        limits = [self.measured.get(slab.layout, self._usual) for slab, _ in layers]
        places = [
            LayerPlaces(slab.layout, slab.address, slab.stride_bytes, first, min(most))
            for (slab, first), most in zip(layers, limits, strict=True)
        ]
        return ExpertTable(self._kernels, places, where)

    def calibrate(self, layouts: Iterable[ExpertLayout], bf16: bool) -> None:
        """Measures at which numbers of tokens the ways change for such experts. Takes tenths of a second for each."""
        if self._kernels is None:
            return
        for layout in layouts:
            trial = _Trial(layout, bf16)
            few, many = (ExpertMath(self._kernels, WayLimits(tiles)).add for tiles in (np.inf, 0.0))
            limits = WayLimits(trial.first_faster(many, few) if trial.slab.has_tiles else np.inf)
            if not layout.encoding.group:
                best = ExpertMath(self._kernels, limits).add
                limits = limits._replace(products=trial.first_faster(one_by_one, best))
            self.measured[layout] = limits

    def clone_for_thread(self, kernels: KernelContext | None) -> ExpertMath:
        """Returns one for another thread, with kernels of its own, and the limits that hold for these too."""
        plain = {layout: limits for layout, limits in self.measured.items() if not layout.encoding.group}
        return ExpertMath(kernels, self._usual, plain)


def _pieces(
    slab: ExpertSlab, slots: IntArray, offsets: IntArray, index: IntArray, weights: FloatArray, tiles: bool
) -> list[Part]:
    """Cuts the slots into runs of at least one slot whose intermediate values fit into SCRATCH_BYTES.

    In `tiles` a slot's pairs take room for whole groups. Its gates take that of one group either way.
    """
    group, pairs = (experts_prefill if tiles else experts_decode).GROUP, np.diff(offsets)
    if tiles:
        pairs = -(-pairs // group) * group
    floats = np.concatenate(([0], np.cumsum(pairs * (slab.hidden + slab.width) + 2 * slab.width * group)))
    most = SCRATCH_BYTES // 4
    if floats[-1] <= most:
        return [(slots, offsets, index, weights)]
    parts, first = [], 0
    while first < len(slots):
        start = offsets[first]
        after = max(first + 1, int(np.searchsorted(floats, floats[first] + most, side="right")) - 1)
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
    """Computes the same as `ExpertMath.add` with torch's products, one expert after the other.

    The weights are the left factor: this is up to twice as fast as grouped products. Numbers of tokens are rounded up,
    because each shape that oneDNN has not met lately costs it a millisecond.
    """
    counts = np.diff(offsets)
    step = np.where(counts <= FEW_TOKENS, FEW_TOKENS // 8, FEW_TOKENS // 2)
    ends = np.cumsum(-(-counts // step) * step)
    starts = np.concatenate(([0], ends[:-1]))
    places = torch.from_numpy(np.repeat(starts - offsets[:-1], counts) + np.arange(len(index)))
    rows = torch.from_numpy(index)
    inputs = torch.zeros((int(ends[-1]), slab.hidden), dtype=x.dtype if slab.in_place else torch.float32)
    inputs[places] = x[rows].to(inputs.dtype)
    results = torch.empty_like(inputs)
    for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        gate_up, down = slab.matrices(slot)
        both = torch.mm(gate_up, inputs[start:end].T)
        if slab.gate_up_bias is not None:
            both = both.float().add_(slab.gate_up_bias[slot][:, None])
        mid = activated(slab.activation, *both.chunk(slab.activation.inputs)).to(inputs.dtype)
        torch.mm(down, mid, out=results[start:end].T)
        if slab.down_bias is not None:
            results[start:end] += slab.down_bias[slot]
    out.index_add_(0, rows, results[places].float().mul_(torch.from_numpy(weights)[:, None]))


def activated(activation: Activation, *products: torch.Tensor) -> torch.Tensor:
    """Applies the activation to gate and up, or to up alone, of any shape. May write into `up`."""
    if activation.kind == "relu2":
        (up,) = products
        return up.relu().square()
    gate, up = products
    if activation.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * up.add_(1)
    if activation.kind == "gelu_tanh":
        return gelu(gate, approximate="tanh").mul_(up)
    assert activation.kind == "silu", activation
    return silu(gate).mul_(up)


def _random(columns: int) -> FloatArray:
    return np.random.default_rng(0).normal(0, 0.02, (TRIAL_ROWS, columns)).astype(np.float32)


class _Trial:
    """Times the ways on random experts, of which two take TRIAL_BYTES at most: of larger ones, on some columns."""

    def __init__(self, layout: ExpertLayout, bf16: bool) -> None:
        hidden, encoding = layout.hidden, layout.encoding
        column_bytes = (layout.activation.inputs + 1) * encoding.row_bytes(hidden)
        width = min(layout.width, max(TRIAL_WIDTH, TRIAL_BYTES // 2 // column_bytes // TRIAL_WIDTH * TRIAL_WIDTH))
        layout = layout._replace(width=width)
        rows = [pack(_random(hidden), encoding), pack(_random(width), layout.down_encoding)]
        gate_up, down = (
            np.resize(some, (count, some.shape[1]))
            for some, count in zip(rows, (layout.first_rows, hidden), strict=True)
        )
        biases = np.zeros(4 * (layout.first_rows + hidden) * layout.biases, np.uint8)
        one = torch.from_numpy(np.concatenate([gate_up.ravel(), down.ravel(), biases]))
        self._experts = max(2, min(16, TRIAL_BYTES // len(one)))
        self.slab = ExpertSlab(one.repeat(self._experts, 1), layout, bf16)

    def first_faster(self, way: Way, than: Way) -> float:
        """Returns from how many tokens per expert on `way` is faster than `than`; infinite where it never is.

        It must be so at the next number that is tried, too: the engine keeps to this for as long as it runs.
        """
        first = np.inf
        for n in TRIED_TOKENS:
            if self.seconds(way, n) >= self.seconds(than, n):
                first = np.inf
            elif first < n:
                break
            else:
                first = float(n)
        return float(first)

    def seconds(self, way: Way, tokens: int) -> float:
        """Returns the shortest run of `way`, in seconds, with `tokens` tokens for each expert."""
        slots, offsets = np.arange(self._experts), np.arange(self._experts + 1) * tokens
        index = np.tile(np.arange(tokens), self._experts)
        weights = np.ones(len(index), np.float32)
        x = torch.randn(tokens, self.slab.hidden).to(torch.bfloat16 if self.slab.bf16 else torch.float32)
        out = torch.zeros(tokens, self.slab.hidden)
        taken: list[float] = []
        while len(taken) < TRIAL_RUNS and sum(taken) < TRIAL_S:
            start = time.perf_counter()
            way(self.slab, slots, offsets, index, weights, x, out)
            taken.append(time.perf_counter() - start)
        return min(taken)
