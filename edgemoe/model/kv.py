"""Keys and values in blocks of 16 tokens. A block holds all layers of its kind, and is copied as one run of bytes.

Layers with windows are one kind, and all others another: the first kind has few blocks of each sequence.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from edgemoe.families.spec import SCALE_BYTES, KVLayout, KVRow, ModelSpec
from edgemoe.families.state_mechanisms import StateHeads
from edgemoe.types.step import BLOCK_TOKENS, Batch


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Returns zeros on `device`. Host memory is committed page by page on first touch, and freed with the tensor."""
    if torch.device(device).type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))


def write_rows(data: torch.Tensor, places: Sequence[int], rows: torch.Tensor) -> None:
    """Writes rows to their places in `data`: in host memory as bytes, since `index_copy_` goes by elements."""
    if data.device.type == "cpu":
        for place, row in zip(places, rows.cpu(), strict=True):
            data[place].copy_(row)
    else:
        data.index_copy_(0, torch.tensor(places, dtype=torch.int64, device=data.device), rows.to(data.device))


class LayerStates(NamedTuple):
    """One layer's states of all slots. Views of a `StateCache`."""

    tails: torch.Tensor  # [slots, taps - 1, channels]: the last inputs of the convolution, the latest one last
    matrices: torch.Tensor  # [slots, value_heads, key_dim, value_dim]; without elements where there are none


class StateCache:
    """Owns `data` [slots, layers, floats] float32: for each layer the convolution's tail, then the heads' matrices.

    Slot 0 is the state before the first token, all zeros; it is never written. The block manager hands out the others.
    Memory is allocated once and never grows.
    """

    def __init__(self, heads: StateHeads, layers: int, slots: int, device: torch.device | str = "cpu") -> None:
        self.data = zeros((slots, layers, heads.state_floats), torch.float32, device)
        self._tail = (heads.taps - 1, heads.channels)
        self._matrices = heads.matrices

    @classmethod
    def of(cls, spec: ModelSpec, slots: int, device: torch.device | str = "cpu") -> StateCache | None:
        """Returns the states of a model, all of whose layers with states are alike; None where it has none."""
        kinds = {spec.attention[layer].heads for layer in spec.state_layers}
        if not kinds:
            return None
        (heads,) = kinds
        assert isinstance(heads, StateHeads)
        return cls(heads, len(spec.state_layers), slots, device)

    @property
    def slot_bytes(self) -> int:
        return self.data.stride(0) * self.data.element_size()

    def layer(self, number: int) -> LayerStates:
        """Returns the states of one layer, counted among layers with states."""
        tails, matrices = torch.split(self.data[:, number], [prod(self._tail), prod(self._matrices)], dim=1)
        slots = len(self.data)
        return LayerStates(tails.view(slots, *self._tail), matrices.view(slots, *self._matrices))

    def gather(self, slots: Sequence[int]) -> torch.Tensor:
        """Returns a copy of these slots in host memory, one row each."""
        return self.data[torch.tensor(slots, dtype=torch.int64, device=self.data.device)].cpu()

    def scatter(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Writes rows that `gather` returned into these slots."""
        write_rows(self.data, slots, rows)


class TokenSpan(NamedTuple):
    """A run of one sequence's tokens: rows first:after of the step, and the slots of the states before and after."""

    first: int
    after: int
    read: int
    write: int


@dataclass(frozen=True, slots=True)
class StepStates:
    """Says which rows of a step lead from which slot to which: sequences of one token together, others in spans."""

    rows: torch.Tensor  # [S] of sequences of one token
    reads: torch.Tensor  # [S] slots
    writes: torch.Tensor  # [S] slots
    spans: Sequence[TokenSpan] = ()
    singles: Sequence[TokenSpan] = ()  # `rows` once more, as spans; by `of` alone

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> StepStates:
        """Builds the step's reads and writes of states from the batch."""
        starts = np.cumsum([0, *batch.query_lens]).tolist()
        used = list(zip(batch.states, starts, batch.query_lens, strict=False))
        single = [(start, use.read, use.writes[-1][1]) for use, start, count in used if count == 1]
        columns = torch.tensor(single, dtype=torch.int64).view(-1, 3).T.contiguous().to(device)
        spans: list[TokenSpan] = []
        for use, start, count in used:
            done, read = 0, use.read
            for after, slot in use.writes if count > 1 else ():
                spans.append(TokenSpan(start + done, start + after, read, slot))
                done, read = after, slot
        rows, reads, writes = columns.unbind(0)
        return cls(rows, reads, writes, spans, [TokenSpan(row, row + 1, *slots) for row, *slots in single])


def convolve(x: torch.Tensor, taps: torch.Tensor, step: StepStates, states: LayerStates) -> torch.Tensor:
    """Returns the convolution of `x` [T, channels] float32 by `taps` [taps, channels], and writes the tails."""
    out = torch.empty_like(x)
    if len(step.rows):
        window = torch.cat([states.tails[step.reads], x[step.rows, None]], dim=1)  # [S, taps, channels]
        out[step.rows] = (window * taps).sum(1)
        states.tails[step.writes] = window[:, 1:]
    for part in step.spans:
        line = torch.cat([states.tails[part.read], x[part.first : part.after]])  # [taps - 1 + t, channels]
        count = part.after - part.first
        out[part.first : part.after] = sum(line[tap : tap + count] * weight for tap, weight in enumerate(taps))
        states.tails[part.write] = line[count:]
    return out


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST = 127.0  # the largest code
EVERY = slice(None)  # element


class LayerKV(NamedTuple):
    """Views of one layer's keys [B, kv_heads, 16, key_width] and values [B, kv_heads, 16, value_width] in all blocks.

    Where the values are the first part of the keys, both views show the same memory.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def store(self, blocks: torch.Tensor, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Writes keys and values [T, kv_heads, D] to places of blocks; `v` is None where the keys hold the values."""
        self.keys[blocks, :, places] = k
        if v is not None:
            self.values[blocks, :, places] = v

    def read_keys(self, blocks: torch.Tensor, part: slice = EVERY) -> torch.Tensor:
        """Returns a copy of the keys [..., kv_heads, 16, D] of blocks [...], or of a part of their elements."""
        return self.keys[..., part][blocks]

    def read_tokens(self, blocks: torch.Tensor, places: torch.Tensor, part: slice) -> torch.Tensor:
        """Returns a part of the keys [..., D] of the only head, of tokens at places [...] of blocks [...]."""
        return self.keys[:, 0, :, part][blocks, places]

    def read_values(self, blocks: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the values of blocks."""
        return self.values[blocks]


class CodedKV(NamedTuple):
    """Stores and reads int8 codes as `LayerKV` does numbers. Each line has a scale, [B, kv_heads, 16] float32."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    dtype: torch.dtype  # of keys and values outside the cache

    def store(self, blocks: torch.Tensor, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self.keys[blocks, :, places], self.key_scales[blocks, :, places] = encode(k)
        if v is not None:
            self.values[blocks, :, places], self.value_scales[blocks, :, places] = encode(v)

    def read_keys(self, blocks: torch.Tensor, part: slice = EVERY) -> torch.Tensor:
        return self._decoded(self.keys[..., part], self.key_scales, blocks)

    def read_tokens(self, blocks: torch.Tensor, places: torch.Tensor, part: slice) -> torch.Tensor:
        codes = self.keys[:, 0, :, part][blocks, places].float()
        return (codes * self.key_scales[:, 0][blocks, places][..., None]).to(self.dtype)

    def read_values(self, blocks: torch.Tensor) -> torch.Tensor:
        return self._decoded(self.values, self.value_scales, blocks)

    def _decoded(self, codes: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return (codes[blocks].float() * scales[blocks][..., None]).to(self.dtype)


def encode(lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of lines [..., D], and their scales [...]: a 127th of a line's largest number."""
    lines = lines.float()
    largest = lines.abs().amax(-1)
    codes = (lines * (MOST / largest)[..., None]).nan_to_num_(0.0, 0.0, 0.0).round_()
    return codes.to(torch.int8), largest / MOST


class BlockPool:
    """Owns `data` [blocks, block_bytes] uint8, the blocks of one kind of layers. Memory never grows."""

    def __init__(self, blocks: int, block_bytes: int, device: torch.device | str = "cpu") -> None:
        self.data = zeros((blocks, block_bytes), torch.uint8, device)

    @property
    def blocks(self) -> int:
        return len(self.data)

    @property
    def block_bytes(self) -> int:
        return self.data.shape[1]

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        """Returns a copy of these blocks in host memory, one row each: [n, block_bytes] uint8."""
        return self.data[torch.tensor(blocks, dtype=torch.int64, device=self.data.device)].cpu()

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Writes rows that `gather` returned into these blocks."""
        write_rows(self.data, blocks, rows)

    def views(self, row: KVRow) -> LayerKV | CodedKV:
        """Returns the views of one layer."""
        if not row.kv_heads:
            empty = torch.empty((len(self.data), 0, BLOCK_TOKENS, 0), dtype=DTYPES[row.dtype], device=self.data.device)
            return LayerKV(empty, empty)
        between = row.offset + row.key_bytes
        if row.int8:
            return self._coded_views(row, between)
        keys = self._view(row, row.offset, between, row.key_width)
        if row.values_in_keys:
            return LayerKV(keys, keys[..., : row.value_width])
        return LayerKV(keys, self._view(row, between, between + row.value_bytes, row.value_width))

    def _coded_views(self, row: KVRow, between: int) -> CodedKV:
        keys, key_scales = self._codes(row, row.offset, between, row.key_width)
        values, value_scales = keys[..., : row.value_width], key_scales
        if not row.values_in_keys:
            values, value_scales = self._codes(row, between, between + row.value_bytes, row.value_width)
        return CodedKV(keys, values, key_scales, value_scales, DTYPES[row.dtype])

    def _codes(self, row: KVRow, start: int, end: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of a layer's codes and of their scales."""
        codes_bytes, head_bytes = BLOCK_TOKENS * width, BLOCK_TOKENS * (width + SCALE_BYTES)
        part = self.data[:, start:end].view(len(self.data), row.kv_heads, head_bytes)
        codes, scales = part[..., :codes_bytes].view(torch.int8), part[..., codes_bytes:].view(torch.float32)
        return codes.view(*codes.shape[:2], BLOCK_TOKENS, width), scales

    def _view(self, row: KVRow, start: int, end: int, width: int) -> torch.Tensor:
        part = self.data[:, start:end].view(DTYPES[row.dtype])
        return part.view(len(self.data), row.kv_heads, BLOCK_TOKENS, width)


class KVCache(BlockPool):
    """The blocks of layers that see all tokens, the `windows` of the others, and the `states` of those without either.

    `layers` are views, as the layout says. The block manager hands out blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        device: torch.device | str = "cpu",
        states: StateCache | None = None,
        window_blocks: int = 0,
    ) -> None:
        """Allocates `window_blocks` blocks for layers with windows; with 0, as many as for the other layers."""
        super().__init__(blocks, layout.block_bytes, device)
        self.states = states
        self.windows = BlockPool(window_blocks or blocks, layout.window_block_bytes, device) if layout.window else None
        self.windowed = tuple(row.windowed for row in layout.rows)
        self.layers = tuple(self._pool(row).views(row) for row in layout.rows)

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        blocks: int,
        state_slots: int,
        device: torch.device | str = "cpu",
        window_blocks: int = 0,
    ) -> KVCache:
        """Returns a model's cache with `blocks` blocks and, if the model has states, `state_slots` slots for them."""
        return cls(spec.kv_layout, blocks, device, StateCache.of(spec, state_slots, device), window_blocks)

    def _pool(self, row: KVRow) -> BlockPool:
        if not row.windowed:
            return self
        assert self.windows is not None
        return self.windows
