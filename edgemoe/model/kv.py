"""Keys and values in blocks of 16 tokens. A block holds all layers, so that it is copied as one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from edgemoe.families.kv_layout import KVLayout, KVRow
from edgemoe.model.memory import zeros
from edgemoe.model.states import StateCache
from edgemoe.types.step import BLOCK_TOKENS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LayerKV(NamedTuple):
    """Views of one layer's keys [B, kv_heads, 16, key_width] and values [B, kv_heads, 16, value_width] in all blocks.

    Where the values are the first part of the keys, both views show the same memory.
    """

    keys: torch.Tensor
    values: torch.Tensor


class KVCache:
    """Owns `data` [blocks, block_bytes] uint8; `layers` are views of it, as the layout says.

    The block manager decides who uses which block. Memory is allocated once and never grows. `states` are what a model
    remembers of a sequence beside keys and values.
    """

    def __init__(
        self, layout: KVLayout, blocks: int, device: torch.device | str = "cpu", states: StateCache | None = None
    ) -> None:
        self.states = states
        self.data = zeros((blocks, layout.block_bytes), torch.uint8, device)
        self.layers = tuple(self._views(row) for row in layout.rows)

    def _views(self, row: KVRow) -> LayerKV:
        between = row.offset + row.key_bytes
        keys = self._view(row, row.offset, between, row.key_width)
        if row.values_in_keys:
            return LayerKV(keys, keys[..., : row.value_width])
        return LayerKV(keys, self._view(row, between, between + row.value_bytes, row.value_width))

    def _view(self, row: KVRow, start: int, end: int, width: int) -> torch.Tensor:
        part = self.data[:, start:end].view(DTYPES[row.dtype])
        return part.view(len(self.data), row.kv_heads, BLOCK_TOKENS, width)

    @property
    def blocks(self) -> int:
        return len(self.data)

    @property
    def block_bytes(self) -> int:
        return self.data.stride(0)

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        """Returns a copy of these blocks in host memory, one row each: [n, block_bytes] uint8."""
        return self.data[torch.tensor(blocks, dtype=torch.int64, device=self.data.device)].cpu()

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Writes rows that `gather` returned into these blocks."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.data.device)
        self.data.index_copy_(0, index, rows.to(self.data.device))
