"""Computes the causal attention of a prompt's chunk over paged keys and values, with grouped queries.

It passes over the context once, on tiles that stay in the second-level cache [FlashAttention, Algorithm 1]. A token's
result is the same bits for any cut of the prompt into chunks. docs/design/kernels.md has the order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np
from llvmlite import ir

from edgemoe.jit.intrinsics import (
    F32,
    I64,
    INT,
    LANES,
    call_rows,
    cgutils,
    f32_at,
    i64_at,
    intrinsic,
    jit,
    load_bf16,
    load_f32,
    record,
    rounded,
    store_bf16,
    store_f32,
    types,
    u16_at,
    u32_at,
)
from edgemoe.jit.object_cache import Code, address_of, chunk, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.encoded.kv_codes import make_decode_lines
from edgemoe.kernels.cpu.gemm_tile import make_tile
from edgemoe.kernels.cpu.paged_cache import BLOCK
from edgemoe.kernels.cpu.panels import make_fill, panel_words
from edgemoe.kernels.cpu.vector import exp32
from edgemoe.types.arrays import fields

TILE = 64  # tokens of context
MOST_ROWS = 512  # of one piece of work at most: tokens times query heads
PIECES = 7  # for each thread: the last piece of a slow core is waited for
KEY_LINE, VALUE_LINE = 4 * TILE, 4  # bytes of a panel's line, of values per element
LOWEST = np.float32(-3e38)

# The record of one call; arrays are addresses.
# * `queries` [tokens, heads, head_dim] and `out` [tokens, heads, value_dim] in the model's type
# * `tokens` the last ones of `context`
# * `table` [blocks] int64, block ids
# * `keys`, `values`, `block_stride`, `head_stride`, `window`, `sinks` and `codes` as in ATTENTION
# * `scratch` `piece_bytes` for each piece of work, see `scratch_floats`
# * `span` tokens of one piece
# * `scale` of the scores
PREFILL = np.dtype(
    [
        *fields(
            *("queries", "out", "tokens", "heads", "kv_heads", "head_dim", "value_dim", "table", "context"),
            *("keys", "values", "block_stride", "head_stride", "scratch", "span", "piece_bytes", "window", "sinks"),
            "codes",
        ).descr,
        ("scale", np.float64),
    ]
)


def span_tokens(heads: int, kv_heads: int, tokens: int, threads: int) -> int:
    """Returns the tokens of one piece of work: its scores stay in the cache, and each thread has several pieces."""
    return max(1, min(MOST_ROWS * kv_heads // heads, -(-tokens * kv_heads // (threads * PIECES))))


def scratch_floats(heads: int, kv_heads: int, head_dim: int, value_dim: int, span: int) -> int:
    """Returns the scratch float32 of one piece: a tile of keys, of values and of scores, the sums and their scales."""
    rows, wide = heads // kv_heads * span, padded(value_dim)
    return TILE * head_dim + TILE * wide + rows * (TILE + wide + 2) + TILE


def padded(value_dim: int) -> int:
    """Returns `value_dim` rounded up to whole vectors."""
    return -(-value_dim // LANES) * LANES


_padded = jit(padded)


def _folded(name: str, combine: Callable[[Any, Any, Any], Any]) -> Callable[[int], Any]:
    """Makes the function that folds the TILE float32 at an address into one, by vectors; LLVM would go one by one."""

    @intrinsic
    def fold(typing: Any, address: Any) -> Any:
        def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
            kind = ir.VectorType(F32, LANES)
            places = (builder.add(args[0], ir.Constant(I64, 4 * k)) for k in range(0, TILE, LANES))
            parts = [builder.load(builder.inttoptr(place, kind.as_pointer()), align=4) for place in places]
            whole = reduce(lambda a, b: combine(builder, a, b), parts)
            first = [ir.Constant(F32, 0.0)] if name == "fadd" else []
            function = ir.FunctionType(F32, [*(F32 for _ in first), kind])
            across = cgutils.get_or_insert_function(builder.module, function, f"llvm.vector.reduce.{name}.v{LANES}f32")
            return builder.call(across, [*first, whole], fastmath=("reassoc", "nnan"))

        return types.float32(types.int64), emit

    return fold  # type: ignore[no-any-return]


peak = _folded("fmax", lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
mass = _folded("fadd", lambda b, x, y: b.fadd(x, y))


def _make_fill_keys(bf16: bool) -> Callable[..., None]:
    """Makes the function that gathers a tile of keys."""
    size, (column, _), (code_column, _) = 2 if bf16 else 4, make_fill(bf16), make_decode_lines(bf16)

    @jit
    def fill_keys(p: int, head: int, start: int, count: int, panel: int) -> None:
        """Writes keys as columns. Columns beyond the context keep their finite values, and are masked."""
        a = record(p, PREFILL)
        table, words = i64_at(a.table), a.head_dim * size // 4
        for j in range(count):
            at = start + j
            source, inside = a.keys + table[at // BLOCK] * a.block_stride + head * a.head_stride, at % BLOCK
            if a.codes:
                scale = source + BLOCK * a.head_dim + inside * 4
                code_column(panel, KEY_LINE, j, source + inside * a.head_dim, scale, a.head_dim)
            else:
                column(panel, KEY_LINE, j, source + inside * a.head_dim * size, words)

    return fill_keys  # type: ignore[no-any-return]


def _make_copy_line(bf16: bool) -> Callable[..., None]:
    """Makes the function that writes one token's values as a line."""
    load, paired = (load_bf16, panel_words(TILE, bf16) < TILE) if bf16 else (load_f32, False)

    @jit
    def copy_line(panel: int, line: int, number: int, source: int, n: int) -> None:
        if paired:  # the even elements in the lower halves, the odd ones in the upper
            to, bits, shift = u32_at(panel + number // 2 * line), u16_at(source), np.uint32(16 * (number % 2))
            for d in range(n):
                to[d] |= np.uint32(bits[d]) << shift
        else:
            values = f32_at(panel + number * line)
            for d in range(n):
                values[d] = load(source, d)

    return copy_line  # type: ignore[no-any-return]


def _make_fill_values(bf16: bool) -> Callable[..., None]:
    """Makes the function that gathers a tile of values."""
    size, value_lines, copy_line = 2 if bf16 else 4, panel_words(TILE, bf16), _make_copy_line(bf16)
    _, code_line = make_decode_lines(bf16)

    @jit
    def fill_values(p: int, head: int, start: int, count: int, panel: int) -> None:
        """Writes values as lines, zero beyond the context and beyond the head's own elements."""
        a = record(p, PREFILL)
        table, line = i64_at(a.table), _padded(a.value_dim) * VALUE_LINE
        to = f32_at(panel)
        for k in range(value_lines * line // 4):
            to[k] = np.float32(0)
        for j in range(count):
            at = start + j
            source, inside = a.values + table[at // BLOCK] * a.block_stride + head * a.head_stride, at % BLOCK
            if a.codes:
                scale = source + BLOCK * a.head_dim + inside * 4
                code_line(panel, line, j, source + inside * a.head_dim, scale, a.value_dim)
            else:
                copy_line(panel, line, j, source + inside * a.head_dim * size, a.value_dim)

    return fill_values  # type: ignore[no-any-return]


def _make_weigh(bf16: bool) -> Callable[..., None]:
    """Makes the function that carries on the softmax of one row by a tile."""

    @jit
    def weigh(scores: int, unseen: int, seen: int, scale: float, state: int, sums: int, wide: int, probs: int) -> None:
        """Turns scores into probabilities in the model's type; those from `unseen` to `seen` count.

        `state` is the largest score and the mass so far.
        """
        s, p, m = f32_at(scores), f32_at(probs), f32_at(state)
        if seen > unseen:
            for k in range(unseen):
                s[k] = LOWEST
            for k in range(seen, TILE):
                s[k] = LOWEST
            largest = peak(scores)
            if largest > m[0]:
                less, o = exp32((m[0] - largest) * np.float32(scale)), f32_at(sums)
                m[0], m[1] = largest, m[1] * less
                for d in range(wide):
                    o[d] *= less
            base = m[0]
            for k in range(TILE):
                p[k] = exp32((s[k] - base) * np.float32(scale))
        for k in range(unseen):
            p[k] = np.float32(0)
        for k in range(max(seen, unseen), TILE):
            p[k] = np.float32(0)
        m[1] += mass(probs)
        if bf16:
            to = u32_at(scores)
            for k in range(TILE // 2):
                to[k] = (rounded(p[2 * k]) >> np.uint32(16)) | rounded(p[2 * k + 1])
        else:
            for k in range(TILE):
                s[k] = p[k]

    return weigh  # type: ignore[no-any-return]


def _make_attend(bf16: bool, tile_code: Code) -> Code:
    """Makes the chunk that computes one piece of work."""
    multiply, weigh = address_of(tile_code), _make_weigh(bf16)
    fill_keys, fill_values = _make_fill_keys(bf16), _make_fill_values(bf16)
    size, store = (2, store_bf16) if bf16 else (4, store_f32)
    tile_words = TILE * size // 4

    @chunk
    def attend(job: int, number: int) -> None:
        a = record(job, PREFILL)
        spans = (a.tokens + a.span - 1) // a.span
        head, first = number // spans, (spans - 1 - number % spans) * a.span  # the longest ones first
        count, group, wide = min(a.span, a.tokens - first), a.heads // a.kv_heads, _padded(a.value_dim)
        rows, position = group * count, a.context - a.tokens + first
        keys = a.scratch + number * a.piece_bytes
        values = keys + TILE * a.head_dim * 4
        scores = values + TILE * wide * 4
        sums = scores + rows * TILE * 4
        state = sums + rows * wide * 4
        probs = state + rows * 8
        scale, line = np.float32(a.scale), a.heads * a.head_dim * size
        o = f32_at(sums)
        for k in range(rows * wide):
            o[k] = np.float32(0)
        for row in range(rows):
            begin, f32_at(state)[2 * row + 1] = LOWEST, np.float32(0)
            if a.sinks:
                begin, f32_at(state)[2 * row + 1] = f32_at(a.sinks)[head * group + row // count] / scale, np.float32(1)
            f32_at(state)[2 * row] = begin
        words = a.head_dim * size // 4
        for start in range(max(position + 1 - a.window, 0) // TILE * TILE, position + count, TILE):
            there = min(TILE, position + count - start)
            fill_keys(job, head, start, there, keys)
            fill_values(job, head, start, there, values)
            for g in range(group):
                q = a.queries + first * line + (head * group + g) * a.head_dim * size
                to = scores + g * count * TILE * 4
                call_rows(multiply(), q, line, count, q, keys, KEY_LINE, words, to, TILE * 4, TILE, 1)
            for row in range(rows):
                after = position + row % count + 1 - start
                unseen, seen = min(max(after - a.window, 0), TILE), min(TILE, after)
                weigh(scores + row * TILE * 4, unseen, seen, scale, state + row * 8, sums + row * wide * 4, wide, probs)
            call_rows(multiply(), scores, TILE * 4, rows, scores, values, wide * 4, tile_words, sums, wide * 4, wide, 0)
        for row in range(rows):
            whole = f32_at(state)[2 * row + 1]
            token, g = first + row % count, row // count
            out, o = a.out + ((token * a.heads + head * group + g) * a.value_dim) * size, f32_at(sums + row * wide * 4)
            for d in range(a.value_dim):
                store(out, d, o[d] / whole)

    return attend


@cache
def make_prefill_attention(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel run(control, address of a PREFILL record). Returns it and all code that it refers to."""
    tile_code = make_tile(bf16)
    attend = _make_attend(bf16, tile_code)
    attending = address_of(attend)

    @code(INT, INT)
    def run(control: int, job: int) -> None:
        a = record(job, PREFILL)
        parallel(control, attending(), job, a.kv_heads * ((a.tokens + a.span - 1) // a.span))

    return run, (tile_code, attend, run)
