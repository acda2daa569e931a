"""Where each layer's keys and values lie in a block: a block is bytes, and the layout has one row per layer.

A row holds the keys [kv_heads, 16, key_width], and behind them the values [kv_heads, 16, value_width]. In multi-head
latent attention [DeepSeek-V2, 2.1] a value is the first part of its key, and is stored with it alone. In int8 a line of
a head has one scale, a float32; the scales [16] of a head follow its lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edgemoe.types.experts import DTYPE_BYTES
from edgemoe.types.step import BLOCK_TOKENS

ALIGNMENT = 64  # bytes: a cache line
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVRow:
    """One layer's keys and values in a block. Without heads it is empty: the layer keeps none."""

    kv_heads: int = 0
    key_width: int = 0  # elements
    value_width: int = 0
    dtype: str = "float32"
    values_in_keys: bool = False  # a value is the first part of its key
    int8: bool = False  # lines are codes with a scale, and stand for numbers of `dtype`
    offset: int = 0  # bytes from the start of the block

    @property
    def key_bytes(self) -> int:
        return self._bytes(self.key_width)

    @property
    def value_bytes(self) -> int:
        """Of the values that lie behind the keys."""
        if self.values_in_keys:
            return 0
        return self._bytes(self.value_width)

    def _bytes(self, width: int) -> int:
        line = width + SCALE_BYTES if self.int8 else width * DTYPE_BYTES[self.dtype]
        return self.kv_heads * BLOCK_TOKENS * line


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
