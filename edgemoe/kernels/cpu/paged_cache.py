"""Describes paged keys and values to the kernels that read and write them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import fields

BLOCK = 16  # tokens
EVERYTHING = 1 << 40  # a window that no context fills


class PagedCache(NamedTuple):
    """The addresses and shapes of one layer's keys and values, and the window of tokens seen. Strides are in bytes."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int  # a value is the first part of a line as wide as a key
    scale: float  # of the scores
    keys: int  # address of block 0, KV head 0
    values: int  # the same
    block_stride: int  # from block to block
    head_stride: int  # from KV head to KV head
    window: int = EVERYTHING  # tokens that a token sees, itself among them
    sinks: int = 0  # address of float32 [heads], or 0
    codes: bool = False  # keys and values are int8, and the scales of a head's lines lie behind them


def fill_cache(job: npt.NDArray[np.void], cache: PagedCache) -> None:
    """Writes a layer's keys and values into an ATTENTION or PREFILL record."""
    for name in PagedCache._fields:
        if name != "scale":
            job[name] = getattr(cache, name)


# The record of one call that computes the attention of single new tokens; arrays are addresses.
# * `queries` [tokens, heads, head_dim] float32, packed and scaled
# * `out` [tokens, heads * value_dim] float32, packed unless `plain`
# * `tables` [tokens, table_width] int64, block ids
# * `contexts` [tokens] int64, tokens of each context, the new one among them; `longest` is the largest
# * `keys` and `values` of block 0 and KV head 0
# * `block_stride` and `head_stride` bytes from block to block and from KV head to KV head
# * `scores` and `parts` scratch memory, see `decode_attention.scratch_floats`
# * `iota` 0, 1, 2, ... int64
# * `window` tokens that a token sees, itself among them
# * `sinks` [heads] float32, or 0
# * `codes` 1 if keys and values are int8 (see `kv_codes`)
ATTENTION = fields(
    *("queries", "out", "tokens", "heads", "kv_heads", "head_dim", "value_dim", "tables", "table_width", "contexts"),
    *("keys", "values", "block_stride", "head_stride", "scores", "parts", "longest", "iota", "plain"),
    *("window", "sinks", "codes"),
)
