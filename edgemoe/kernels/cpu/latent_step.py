"""Multi-head latent attention of single new tokens, absorbed [DeepSeek-V2, 2.1.2]: the stages between its products."""

from __future__ import annotations

from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import f32_at, i64_at, record, store_bf16, store_f32
from edgemoe.jit.object_cache import Code, chunk
from edgemoe.kernels.cpu.decode_stages import STEP_TOKENS
from edgemoe.kernels.cpu.encoded.kv_codes import store_codes
from edgemoe.kernels.cpu.paged_cache import ATTENTION, BLOCK
from edgemoe.kernels.cpu.vector import make_place, normalise, turn
from edgemoe.types.arrays import fields

# The record of one layer; arrays are addresses, of float32 unless stated.
# * `queries` [tokens, heads, plain + dim]; their last `dim` turn by the angles `cos` and `sin` [tokens, dim / 2]
# * `latents` [tokens, rank + dim + index]: latent, of which `norm` [rank] is the norm, and the key that all heads share
# * `index` the width of the indexer's key behind them, 0 without one; its norm has weights and biases [index]
# * `asked` [tokens, heads, plain] the queries' first parts, packed for the matrices of keys
# * `absorbed` [tokens, heads, rank] their products
# * `means` [tokens, heads, rank] attention's output; `packed` the same, packed for the matrices of values
# * `attention` the ATTENTION record, whose queries are written; `scale` of scores
LATENT = np.dtype(
    [
        *fields(
            *("step", "heads", "plain", "dim", "rank", "index", "queries", "latents", "norm", "cos", "sin"),
            *("index_norm", "index_bias"),
            *("asked", "absorbed", "means", "packed", "attention"),
        ).descr,
        ("scale", np.float64),
        ("eps", np.float64),
    ]
)


def _make_place_latents(bf16: bool) -> Code:
    """Makes the chunk that rotates one token's queries and keys, and writes its latent to the cache."""
    place, (size, store) = make_place(bf16), (2, store_bf16) if bf16 else (4, store_f32)

    @chunk
    def place_latents(job: int, token: int) -> None:
        l = record(job, LATENT)  # noqa: E741
        s, a, half = record(l.step, STEP_TOKENS), record(l.attention, ATTENTION), l.dim // 2
        width = l.rank + l.dim + l.index
        cos, sin = l.cos + token * half * 4, l.sin + token * half * 4
        for head in range(l.heads):
            query = l.queries + (token * l.heads + head) * (l.plain + l.dim) * 4
            turn(query + l.plain * 4, cos, sin, l.dim)
            q, to = f32_at(query), f32_at(l.asked + (token * l.heads + head) * l.plain * 4)
            for k in range(l.plain):
                to[place(k, l.plain)] = q[k]
        line = l.latents + token * width * 4
        normalise(line, l.norm, l.rank, l.eps, 0, line)
        turn(line + l.rank * 4, cos, sin, l.dim)
        if l.index:
            key = line + (l.rank + l.dim) * 4
            normalise(key, l.index_norm, l.index, l.eps, 1, key)
            numbers, bias = f32_at(key), f32_at(l.index_bias)
            for k in range(l.index):
                numbers[k] += bias[k]
            turn(key, cos, sin, l.dim)
        position = i64_at(s.positions)[token]
        keys = a.keys + i64_at(a.tables)[token * a.table_width + position // BLOCK] * a.block_stride
        if a.codes:
            store_codes(line, width, keys + position % BLOCK * width, keys + BLOCK * width + position % BLOCK * 4)
        else:
            values = f32_at(line)
            for k in range(width):
                store(keys + position % BLOCK * width * size, k, values[k])

    return place_latents


def _make_ask_latents(bf16: bool) -> Code:
    """Makes the chunk that packs one head's query to latents, scaled."""
    place = make_place(bf16)

    @chunk
    def ask_latents(job: int, number: int) -> None:
        l = record(job, LATENT)  # noqa: E741
        width, scale = l.rank + l.dim + l.index, np.float32(l.scale)
        to = f32_at(record(l.attention, ATTENTION).queries + number * width * 4)
        absorbed = f32_at(l.absorbed + number * l.rank * 4)
        turned = f32_at(l.queries + (number * (l.plain + l.dim) + l.plain) * 4)
        for k in range(l.rank):
            to[place(k, width)] = absorbed[k] * scale
        for k in range(l.dim):
            to[place(l.rank + k, width)] = turned[k] * scale
        for k in range(l.rank + l.dim, width):  # attention does not see the indexer's keys
            to[place(k, width)] = np.float32(0)

    return ask_latents


def _make_pack_means(bf16: bool) -> Code:
    """Makes the chunk that packs one head's mean latent for its matrix of values."""
    place = make_place(bf16)

    @chunk
    def pack_means(job: int, number: int) -> None:
        l = record(job, LATENT)  # noqa: E741
        mean, to = f32_at(l.means + number * l.rank * 4), f32_at(l.packed + number * l.rank * 4)
        for k in range(l.rank):
            to[place(k, l.rank)] = mean[k]

    return pack_means


@cache
def make_latent(bf16: bool) -> tuple[Code, Code, Code]:
    """Makes the stages before the product with keys, before attention, and before the product with values."""
    return _make_place_latents(bf16), _make_ask_latents(bf16), _make_pack_means(bf16)
