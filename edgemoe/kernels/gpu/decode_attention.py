"""Attends from one token of each row to its paged keys and values, in two launches [Flash-Decoding].

`attend` cuts a row's context into splits of one program each; `merge` weighs the splits. Both have a fixed number of
programs for all contexts, so that a CUDA graph can hold them. Parameters of Triton functions have no annotations,
because Triton would evaluate them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgemoe.kernels.gpu.launches import await_inputs, launch, launch_options
from edgemoe.kernels.gpu.weights import jit

HEADS = 16  # query heads of one program, the fewest that matrix units multiply
TOKENS = 32  # keys in one step of a program
PROGRAMS = 264  # that a launch should have: two for each multiprocessor of a large GPU
MOST_SPLITS = 32
CLEARED = 8192  # bytes of one program


@jit
def attend(  # type: ignore[no-untyped-def]
    q,  # [T, heads, DIM + TAIL]
    keys,  # of a layer: [blocks, kv_heads, 16, DIM + TAIL], `block` numbers from block to block
    values,  # [blocks, kv_heads, 16, VALUE]
    key_scales,  # float32 [blocks, kv_heads, 16] where CODES, `scale_block` numbers from block to block
    value_scales,
    tables,  # blocks of all rows
    begins,  # [T]: where a row's blocks begin in `tables`
    contexts,  # [T]: tokens, this one among them
    peaks,  # float32 [T, heads, splits] out: largest score
    sums,  # float32 [T, heads, splits] out: of exponentials
    means,  # float32 [T, heads, splits, VALUE] out: weighted by exponentials
    scale,
    block: tl.constexpr,
    value_block: tl.constexpr,
    scale_block: tl.constexpr,
    head: tl.constexpr,  # numbers from one KV head of a block to the next
    value_head: tl.constexpr,
    scale_head: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    COUNT: tl.constexpr,  # query heads
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,  # of a key, but for its TAIL
    TAIL: tl.constexpr,
    VALUE: tl.constexpr,
    DIMS: tl.constexpr,  # powers of two that hold these
    TAILS: tl.constexpr,
    VALUES: tl.constexpr,
    CODES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    share: tl.constexpr = COUNT // KV_HEADS
    tiles: tl.constexpr = (share + ROWS - 1) // ROWS
    row = tl.program_id(0) // (KV_HEADS * tiles)
    kv_head = tl.program_id(0) // tiles % KV_HEADS
    split = tl.program_id(1)
    mine = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    live = mine < share
    heads = kv_head * share + mine
    context = tl.load(contexts + row).to(tl.int32)
    begin = context * 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    each = (context - begin + SPLITS - 1) // SPLITS
    each = (each + STEP - 1) // STEP * STEP
    first = begin + split * each
    last = tl.minimum(first + each, context)
    table = tables + tl.load(begins + row)
    await_inputs(EARLY)
    d = tl.arange(0, DIMS)
    v = tl.arange(0, VALUES)
    asked = q + (row * COUNT + heads)[:, None] * (DIM + TAIL)
    query = tl.load(asked + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    if TAIL > 0:
        e = tl.arange(0, TAILS)
        rest = tl.load(asked + DIM + e[None, :], mask=live[:, None] & (e < TAIL)[None, :], other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, VALUES), tl.float32)
    for start in range(first, last, STEP):
        at = start + tl.arange(0, STEP)
        there = at < last
        page = tl.load(table + at // 16, mask=there, other=0).to(tl.int64)
        from_keys = keys + page * block + kv_head * head + at % 16 * (DIM + TAIL)
        key = tl.load(from_keys[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
        if CODES:
            scales = tl.load(key_scales + page * scale_block + kv_head * scale_head + at % 16, mask=there, other=0.0)
            key = (key.to(tl.float32) * scales[:, None]).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if TAIL > 0:
            more = tl.load(from_keys[:, None] + DIM + e[None, :], mask=there[:, None] & (e < TAIL)[None, :], other=0.0)
            if CODES:
                more = (more.to(tl.float32) * scales[:, None]).to(query.dtype)
            score += tl.dot(rest, tl.trans(more), input_precision="ieee")
        score = tl.where(there[None, :], score * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        kept = tl.exp(peak - higher)
        weight = tl.exp(score - higher[:, None])
        from_values = values + page * value_block + kv_head * value_head
        line: tl.constexpr = VALUE if TAIL == 0 else DIM + TAIL
        value_at = from_values + at % 16 * line
        value = tl.load(value_at[:, None] + v[None, :], mask=there[:, None] & (v < VALUE)[None, :], other=0.0)
        if CODES:
            value_scale = value_scales + page * scale_block + kv_head * scale_head + at % 16
            value = value.to(tl.float32) * tl.load(value_scale, mask=there, other=0.0)[:, None]
            value = value.to(query.dtype)
        total = total * kept + tl.sum(weight, 1)
        mean = mean * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        peak = higher
    out = (row * COUNT + heads) * SPLITS + split
    tl.store(peaks + out, peak, mask=live)
    tl.store(sums + out, total, mask=live)
    tl.store(means + out[:, None] * VALUE + v[None, :], mean, mask=live[:, None] & (v < VALUE)[None, :])


@jit
def merge(  # type: ignore[no-untyped-def]
    peaks,
    sums,
    means,
    sinks,  # float32 [heads], where SINKS: one more score, whose value is zero
    out,  # [T, heads, VALUE]
    SINKS: tl.constexpr,
    COUNT: tl.constexpr,
    VALUE: tl.constexpr,
    VALUES: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    await_inputs(EARLY)
    place = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    v = tl.arange(0, VALUES)
    peak = tl.load(peaks + place * SPLITS + splits)
    highest = tl.max(peak, 0)
    if SINKS:
        sink = tl.load(sinks + place % COUNT)
        highest = tl.maximum(highest, sink)
    share = tl.exp(peak - highest)
    total = tl.sum(share * tl.load(sums + place * SPLITS + splits), 0)
    if SINKS:
        total += tl.exp(sink - highest)
    lines = means + (place * SPLITS + splits)[:, None] * VALUE + v[None, :]
    mean = tl.load(lines, mask=(v < VALUE)[None, :], other=0.0)
    result = tl.sum(mean * share[:, None], 0) / total
    tl.store(out + place * VALUE + v, result.to(out.dtype.element_ty), mask=v < VALUE)


@jit
def clear(data, blocks, positions, size: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeroes the blocks [T] of `data` [blocks, size bytes] that begin with the tokens at `positions` [T]."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    if tl.load(positions + row) % 16 == 0:
        place = data + tl.load(blocks + row) * size + at
        tl.store(place, tl.zeros((BYTES,), tl.uint8), mask=at < size)


class PagedLayer(NamedTuple):
    """States how a layer's keys and values lie in blocks, and how they are attended to. Strides count numbers."""

    keys: Any  # [blocks, kv_heads, 16, key width]
    values: Any
    key_scales: Any  # float32 [blocks, kv_heads, 16] of codes, else None
    value_scales: Any
    scale: float
    window: int  # 0: none
    sinks: Any  # float32 [heads], or None


def power_of_two(count: int) -> int:
    """Returns the least power of two that holds so many, 16 at least, as matrix units want it."""
    return max(16, 1 << (count - 1).bit_length())


def splits_of(rows: int, heads: int, kv_heads: int) -> int:
    """Returns into how many programs the context of a row and a KV head is cut, a power of two."""
    tiles = -(-(heads // kv_heads) // HEADS)
    wanted = max(1, PROGRAMS // (rows * kv_heads * tiles))
    return min(MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def decode_attention(q: Any, pages: PagedLayer, tables: Any, begins: Any, contexts: Any) -> Any:
    """Returns the attention [T, heads, value width] of q [T, heads, key width], in its type.

    Row t has `contexts[t]` tokens, in the blocks `tables[begins[t]]` and on.
    """
    import torch

    rows, heads, width = q.shape
    (kv_heads, value), coded = (pages.keys.shape[1], pages.values.shape[3]), pages.key_scales is not None
    shared = pages.values.data_ptr() == pages.keys.data_ptr() and value < width  # values are the first part of keys
    dim = value if shared else width
    splits = splits_of(rows, heads, kv_heads)
    peaks = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    sums, means = torch.empty_like(peaks), peaks.new_empty((rows, heads, splits, value))
    values = power_of_two(value)
    scales = pages.key_scales if coded else pages.keys
    grid = (rows * kv_heads * -(-(heads // kv_heads) // HEADS), splits)
    launch(
        attend,
        grid,
        q,
        pages.keys,
        pages.values,
        scales,
        pages.value_scales if coded else pages.values,
        tables,
        begins,
        contexts,
        peaks,
        sums,
        means,
        pages.scale,
        block=pages.keys.stride(0),
        value_block=pages.values.stride(0),
        scale_block=scales.stride(0),
        head=pages.keys.stride(1),
        value_head=pages.values.stride(1),
        scale_head=scales.stride(1),
        WINDOW=pages.window,
        COUNT=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        TAIL=width - dim,
        VALUE=value,
        DIMS=power_of_two(dim),
        TAILS=power_of_two(max(1, width - dim)),
        VALUES=values,
        CODES=coded,
        SPLITS=splits,
        ROWS=HEADS,
        STEP=TOKENS if dim <= 256 else TOKENS // 2,
        num_warps=4,
        **launch_options(q.device),
    )
    return _merged(q.new_empty((rows, heads, value)), peaks, sums, means, pages.sinks)


def _merged(out: Any, peaks: Any, sums: Any, means: Any, sinks: Any) -> Any:
    """Returns `out` [T, heads, value width] with the attention of each head's splits."""
    rows, heads, value = out.shape
    launch(
        merge,
        (rows * heads,),
        peaks,
        sums,
        means,
        peaks if sinks is None else sinks,
        out,
        SINKS=sinks is not None,
        COUNT=heads,
        VALUE=value,
        VALUES=power_of_two(value),
        SPLITS=peaks.shape[2],
        num_warps=1 if value <= 128 else 4,
        **launch_options(out.device),
    )
    return out


def clear_begun(data: Any, blocks: Any, positions: Any) -> None:
    """Zeroes the blocks [T] of `data` [blocks, bytes] that begin with the tokens at `positions` [T]."""
    grid = (len(blocks), triton.cdiv(data.shape[1], CLEARED))
    launch(clear, grid, data, blocks, positions, size=data.shape[1], BYTES=CLEARED, num_warps=4)
