"""Where each layer's keys and values lie in a block: a block is bytes, and the layout has one row per layer.

A row holds the keys [kv_heads, 16, key_width], and behind them the values [kv_heads, 16, value_width]. In multi-head
latent attention [DeepSeek-V2, 2.1] a value is the first part of its key, and is stored with it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edgemoe.types.experts import DTYPE_BYTES
from edgemoe.types.step import BLOCK_TOKENS

ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class KVRow:
    """One layer's keys and values in a block. Without heads it is empty: the layer keeps none."""

    kv_heads: int = 0
    key_width: int = 0  # elements
    value_width: int = 0
    dtype: str = "float32"
    values_in_keys: bool = False  # a value is the first part of its key
    offset: int = 0  # bytes from the start of the block

    @property
    def key_bytes(self) -> int:
        return self.kv_heads * BLOCK_TOKENS * self.key_width * DTYPE_BYTES[self.dtype]

    @property
    def value_bytes(self) -> int:
        """Of the values that lie behind the keys."""
        if self.values_in_keys:
            return 0
        return self.kv_heads * BLOCK_TOKENS * self.value_width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The rows of all layers, one after the other."""

    rows: tuple[KVRow, ...]
    block_bytes: int

    @classmethod
    def of(cls, rows: Iterable[KVRow]) -> KVLayout:
        """Gives each row its offset."""
        placed, offset = [], 0
        for row in rows:
            placed.append(replace(row, offset=offset))
            size = row.key_bytes + row.value_bytes
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(placed), offset)
