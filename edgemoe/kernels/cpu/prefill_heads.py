"""Takes a step's tokens from the q/k/v product to the cache and to attention's queries, where the step is no plan."""

from __future__ import annotations

from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import f32_at, i64_at, jit, record, store_bf16, store_f32
from edgemoe.jit.object_cache import Code, chunk
from edgemoe.kernels.cpu.decode_stages import HEADS, make_to_cache
from edgemoe.kernels.cpu.vector import widen
from edgemoe.types.arrays import fields

SOME = 8  # tokens of one chunk, which share a line of scratch
# A HEADS record whose `x` [chunks, line] and `values` [chunks, kv_heads * head_dim] are scratch, and
# * `tokens` of the step; `source` [tokens, source_line] in the model's type: the q/k/v product
# * `blocks` and `places` [tokens] int64, where keys and values go
# * `out` [tokens, heads, head_dim] in the model's type: the queries
MANY_HEADS = np.dtype(
    [*HEADS.descr, *fields("tokens", "source", "source_line", "blocks", "places", "out").descr],
)


@cache
def make_many_heads(bf16: bool) -> Code:
    """Makes the chunk that takes SOME tokens from the q/k/v product to attention."""
    to_cache, (size, store) = make_to_cache(bf16), (2, store_bf16) if bf16 else (4, store_f32)

    @jit
    def narrow(values: int, n: int, out: int) -> None:
        v = f32_at(values)
        for k in range(n):
            store(out, k, v[k])

    @chunk
    def place_many(job: int, number: int) -> None:
        h, many = record(job, HEADS), record(job, MANY_HEADS)
        line, values = h.x + number * h.line * 4, h.values + number * h.kv_heads * h.head_dim * 4
        width = h.heads * h.head_dim
        for token in range(number * SOME, min((number + 1) * SOME, many.tokens)):
            widen(many.source + token * many.source_line * size, bf16, h.line, line)
            to_cache(job, token, line, values, i64_at(many.blocks)[token], i64_at(many.places)[token])
            narrow(line, width, many.out + token * width * size)

    return place_many
