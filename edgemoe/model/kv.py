"""Keys and values in blocks of 16 tokens. A block holds all layers, so that it is copied as one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.families.spec import ModelSpec
from edgemoe.model.memory import zeros
from edgemoe.types.step import BLOCK_TOKENS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVCache:
    """Owns `data` [blocks, layers, 2, kv_heads, 16, head_dim]: keys, then values of each layer.

    The block manager decides who uses which block. Memory is allocated once and never grows.
    """

    def __init__(self, spec: ModelSpec, blocks: int, device: torch.device | str = "cpu") -> None:
        shape = (blocks, spec.layers, 2, spec.kv_heads, BLOCK_TOKENS, spec.head_dim)
        self.data = zeros(shape, DTYPES[spec.dtype], device)

    @property
    def blocks(self) -> int:
        return len(self.data)

    @property
    def block_bytes(self) -> int:
        return self.data.stride(0) * self.data.element_size()

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        """Returns a copy of these blocks in host memory, one row each: [n, layers, 2, kv_heads, 16, head_dim]."""
        return self.data[torch.tensor(blocks, dtype=torch.int64, device=self.data.device)].cpu()

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Writes rows that `gather` returned into these blocks."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.data.device)
        self.data.index_copy_(0, index, rows.to(self.data.device))
