"""Computes the attention of single new tokens over paged keys and values, with grouped queries.

docs/design/kernels.md has the layout of the cache and the order of additions. A token's result is the same bits in any
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import INT, call_rows, f32_at, i64_at, jit, load_bf16, load_f32, record
from edgemoe.jit.object_cache import Code, address_of, chunk, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.encoded.kv_codes import multiply_each
from edgemoe.kernels.cpu.gemv import load_code, make_code_rows, make_rows
from edgemoe.kernels.cpu.paged_cache import ATTENTION, BLOCK
from edgemoe.kernels.cpu.vector import exp32, make_place, softmax
from edgemoe.types.arrays import IntArray

SPLITS = 64  # parts of a context at most
SHORTEST = 256  # tokens of a part at least
TILE = 4  # values added side by side
QUERIES = 8  # query heads of a chunk at most; latent attention has all of them on one KV head


def part_tokens(context: int) -> int:
    """Returns the tokens in one part of a context: a whole number of blocks."""
    return max(SHORTEST, (context + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK)


def most_parts(longest: int) -> int:
    """Returns the most parts that a context of up to `longest` tokens has."""
    return min(SPLITS, (longest + SHORTEST - 1) // SHORTEST)


def query_parts(heads: int, kv_heads: int) -> int:
    """Returns how many chunks share the query heads of one KV head."""
    return (heads // kv_heads + QUERIES - 1) // QUERIES


def reach(longest: int, window: int) -> int:
    """Returns the most tokens that are read of a context of up to `longest`: a window begins within a block."""
    return min(longest, window + BLOCK - 1)


def first_block(context: int, window: int) -> int:
    """Returns the first token of the block in which the window begins."""
    return max(context - window, 0) // BLOCK * BLOCK


_part_tokens, _most_parts, _reach, _first_block = jit(part_tokens), jit(most_parts), jit(reach), jit(first_block)
_query_parts = jit(query_parts)


def scratch_floats(heads: int, value_dim: int, tokens: int, longest: int) -> dict[str, int]:
    """Returns the sizes of the scratch arrays, in float32, where at most `longest` tokens of a context are read."""
    parts = most_parts(longest)
    return {
        "scores": tokens * heads * parts * part_tokens(longest),
        "parts": tokens * heads * parts * (value_dim + 2),
    }


def _make_add_values(load: Callable[[int, int], float]) -> Callable[[int, int, int, int, int, int], None]:
    """Makes the function that adds up weighted values, which `load` reads."""

    @jit
    def add_values(values: int, line: int, value_dim: int, count: int, probs: int, out: int) -> None:
        """Computes out [value_dim] += probs [count] . values [count, value_dim], which lie `line` bytes apart."""
        p, o = f32_at(probs), f32_at(out)
        full = count - count % TILE
        for j in range(0, full, TILE):
            at, p0, p1, p2, p3 = values + j * line, p[j], p[j + 1], p[j + 2], p[j + 3]
            for d in range(value_dim):
                o[d] += (
                    p0 * load(at, d)
                    + p1 * load(at + line, d)
                    + p2 * load(at + 2 * line, d)
                    + p3 * load(at + 3 * line, d)
                )
        for j in range(full, count):
            for d in range(value_dim):
                o[d] += p[j] * load(values + j * line, d)

    return add_values  # type: ignore[no-any-return]


def _make_add_context(bf16: bool) -> Callable[..., None]:
    """Makes the function that adds up the values of a part of a context for some query heads."""
    add_values, add_codes = _make_add_values(load_bf16 if bf16 else load_f32), _make_add_values(load_code)
    size = 2 if bf16 else 4

    @jit
    def add_context(
        job: int, table: IntArray, head: int, begin: int, end: int, scores: int, length: int, part: int, group: int
    ) -> None:
        a = record(job, ATTENTION)
        line = a.head_dim if a.codes else a.head_dim * size
        at = begin
        while at < end:
            inside = at % BLOCK
            lines = a.values + table[at // BLOCK] * a.block_stride + head * a.head_stride
            values, count = lines + inside * line, min(BLOCK - inside, end - at)
            for query in range(group):
                probs = scores + (query * length + at - begin) * 4
                to = part + (query * (a.value_dim + 2) + 2) * 4
                if a.codes:
                    multiply_each(probs, lines + BLOCK * line + inside * 4, count)
                    add_codes(values, line, a.value_dim, count, probs, to)
                else:
                    add_values(values, line, a.value_dim, count, probs, to)
            at += count

    return add_context  # type: ignore[no-any-return]


def _make_attend(bf16: bool, row_code: Code, code_rows: Code) -> Code:
    """Makes the chunk that computes one part of a context for at most QUERIES query heads of one KV head."""
    rows, rows_of_codes = address_of(row_code), address_of(code_rows)
    add, size = _make_add_context(bf16), 2 if bf16 else 4

    @chunk
    def attend(job: int, number: int) -> None:
        a = record(job, ATTENTION)
        longest = _reach(a.longest, a.window)
        splits, shared = _most_parts(longest), _query_parts(a.heads, a.kv_heads)
        part_of_queries, number = number % shared, number // shared
        token, head = number // (a.kv_heads * splits), number // splits % a.kv_heads
        context = i64_at(a.contexts)[token]
        base = _first_block(context, a.window)
        length = _part_tokens(context - base)
        start = base + number % splits * length
        if start >= context:
            return
        end, heads = min(start + length, context), a.heads // a.kv_heads
        first = part_of_queries * QUERIES
        group = min(QUERIES, heads - first)
        begin = max(start, context - a.window)  # no later than in the part's first block
        scores = a.scores + (number * heads + first) * _part_tokens(longest) * 4
        queries = a.queries + (token * a.heads + head * heads + first) * a.head_dim * 4
        table = i64_at(a.tables + 8 * token * a.table_width)
        line, multiply = a.head_dim * size, rows()
        if a.codes:
            line, multiply = a.head_dim, rows_of_codes()
        at = begin
        while at < end:
            inside = at % BLOCK
            lines = a.keys + table[at // BLOCK] * a.block_stride + head * a.head_stride
            keys, count, to = lines + inside * line, min(BLOCK - inside, end - at), scores + (at - begin) * 4
            call_rows(
                multiply, keys, line, count, keys, queries, a.head_dim * 4, a.iota, group, a.head_dim, to, length * 4
            )
            if a.codes:
                for query in range(group):
                    multiply_each(to + query * length * 4, lines + BLOCK * line + inside * 4, count)
            at += count
        part = a.parts + (number * heads + first) * (a.value_dim + 2) * 4
        for query in range(group):
            result = f32_at(part + query * (a.value_dim + 2) * 4)
            result[0], result[1] = softmax(scores + query * length * 4, end - begin)
            for d in range(a.value_dim):
                result[2 + d] = np.float32(0)
        add(job, table, head, begin, end, scores, length, part, group)

    return attend


def _make_combine(bf16: bool) -> Code:
    """Makes the chunk that puts the parts of a context together."""
    place = make_place(bf16)

    @chunk
    def combine(job: int, number: int) -> None:
        """Writes the result of one query head of one token, the mean of its parts weighted by their sums."""
        a = record(job, ATTENTION)
        splits = _most_parts(_reach(a.longest, a.window))
        token, head, group = number // a.heads, number % a.heads, a.heads // a.kv_heads
        context = i64_at(a.contexts)[token]
        seen = context - _first_block(context, a.window)
        used = (seen + _part_tokens(seen) - 1) // _part_tokens(seen)
        first = (token * a.kv_heads + head // group) * splits
        line, n = (a.value_dim + 2) * 4, a.heads * a.value_dim
        base = a.parts + (first * group + head % group) * line
        largest, mass = f32_at(base)[0], np.float32(0)
        for split in range(1, used):
            largest = max(largest, f32_at(base + split * group * line)[0])
        if a.sinks:
            sink = f32_at(a.sinks)[head]
            largest = max(largest, sink)
            mass += exp32(sink - largest)
        for split in range(used):
            part = f32_at(base + split * group * line)
            part[0] = exp32(part[0] - largest)
            mass += part[0] * part[1]
        out = f32_at(a.out + token * n * 4)
        for d in range(a.value_dim):
            value = np.float32(0)
            for split in range(used):
                part = f32_at(base + split * group * line)
                value += part[0] * part[2 + d]
            k = head * a.value_dim + d
            out[k if a.plain else place(k, n)] = value / mass

    return combine


@cache
def make_attention(bf16: bool) -> tuple[Callable[[int, int], None], Code, tuple[Code, ...]]:
    """Makes the attention kernel: run(control, address of an ATTENTION record).

    Returns it for kernels, the same for Python, and all code that they refer to.
    """
    row_code, code_rows = make_rows(bf16), make_code_rows(bf16)
    attend, combine = _make_attend(bf16, row_code, code_rows), _make_combine(bf16)
    attending, combining = address_of(attend), address_of(combine)

    @jit
    def run(control: int, job: int) -> None:
        a = record(job, ATTENTION)
        parts = _most_parts(_reach(a.longest, a.window)) * _query_parts(a.heads, a.kv_heads)
        parallel(control, attending(), job, a.tokens * a.kv_heads * parts)
        parallel(control, combining(), job, a.tokens * a.heads)

    attention = code(INT, INT)(run.py_func)
    return run, attention, (row_code, code_rows, attend, combine, attention)
