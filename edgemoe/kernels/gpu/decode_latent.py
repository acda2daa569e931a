"""Steps of few rows of latent attention [DeepSeek-V2, 2.1] on a GPU, beside its products and attention.

Parameters of Triton functions have no annotations, because Triton would evaluate them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgemoe.kernels.gpu.launches import await_inputs, launch, launch_options
from edgemoe.kernels.gpu.weights import jit

PER_PROGRAM = 8  # rows of a head's matrix


class LatentPlaces(NamedTuple):
    """The sizes of latent attention between its products and its scores (see `mechanisms.LatentHeads`)."""

    heads: int
    plain: int
    turned: int
    rank: int
    norm: Any  # float32 [rank]
    eps: float


@jit
def place_latent(  # type: ignore[no-untyped-def]
    given,  # [T, HEADS * (PLAIN + TURNED)]: queries
    latent,  # [T, RANK + TURNED]: latents and rotary keys
    norm,  # float32, of RANK numbers
    cos,  # float32 [T, TURNED / 2]
    sin,
    blocks,  # [T]
    positions,  # [T]
    q,  # [T, HEADS, RANK + TURNED] out: the rotary parts of queries
    lines,  # out: [blocks, 1, 16, RANK + TURNED], `block` numbers from block to block
    eps,
    block: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    TURNED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,  # powers of two that hold these
    HALVES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    number = tl.program_id(1)
    half: tl.constexpr = TURNED // 2
    h = tl.arange(0, HALVES)
    live = h < half
    line = lines + tl.load(blocks + row) * block + tl.load(positions + row) % 16 * (RANK + TURNED)
    c = tl.load(cos + row * half + h, mask=live, other=1.0)
    s = tl.load(sin + row * half + h, mask=live, other=0.0)
    await_inputs(EARLY)
    if number < HEADS:
        source = given + (row * HEADS + number) * (PLAIN + TURNED) + PLAIN
        low = tl.load(source + h, mask=live, other=0.0).to(tl.float32)
        high = tl.load(source + half + h, mask=live, other=0.0).to(tl.float32)
        to = q + (row * HEADS + number) * (RANK + TURNED) + RANK
        tl.store(to + h, (low * c - high * s).to(q.dtype.element_ty), mask=live)
        tl.store(to + half + h, (high * c + low * s).to(q.dtype.element_ty), mask=live)
    else:
        source = latent + row * (RANK + TURNED)
        d = tl.arange(0, RANKS)
        x = tl.load(source + d, mask=d < RANK, other=0.0).to(tl.float32)
        weight = tl.load(norm + d, mask=d < RANK, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * weight
        tl.store(line + d, x.to(lines.dtype.element_ty), mask=d < RANK)
        low = tl.load(source + RANK + h, mask=live, other=0.0).to(tl.float32)
        high = tl.load(source + RANK + half + h, mask=live, other=0.0).to(tl.float32)
        tl.store(line + RANK + h, (low * c - high * s).to(lines.dtype.element_ty), mask=live)
        tl.store(line + RANK + half + h, (high * c + low * s).to(lines.dtype.element_ty), mask=live)


def placed(
    given: Any, latent: Any, how: LatentPlaces, angles: Any, blocks: Any, positions: Any, lines: Any, q: Any
) -> None:
    """Writes the rotary parts of queries [T, heads, rank + turned] to `q`, and the tokens' cache lines to `lines`."""
    cos, sin = angles
    launch(
        place_latent,
        (len(given), how.heads + 1),
        given,
        latent,
        how.norm,
        cos,
        sin,
        blocks,
        positions,
        q,
        lines,
        how.eps,
        block=lines.stride(0),
        HEADS=how.heads,
        PLAIN=how.plain,
        TURNED=how.turned,
        RANK=how.rank,
        RANKS=triton.next_power_of_2(how.rank),
        HALVES=triton.next_power_of_2(how.turned // 2),
        num_warps=1,
        **launch_options(q.device),
    )


@jit
def by_head(  # type: ignore[no-untyped-def]
    x,  # [T, heads, from `line` to `line`], `head` numbers from head to head
    weight,  # [heads, N, K]
    out,  # the same, `out_line` and `out_head` numbers apart
    line: tl.constexpr,
    head: tl.constexpr,
    out_line: tl.constexpr,
    out_head: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLS)
    wanted = (rows < N)[:, None] & (k < K)[None, :]
    at = weight + (number * N + rows)[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(at, mask=wanted, other=0.0, eviction_policy="evict_first").to(tl.float32)
    await_inputs(EARLY)
    for t in tl.static_range(T):
        given = tl.load(x + t * line + number * head + k, mask=k < K, other=0.0).to(tl.float32)
        total = tl.sum(w * given[None, :], 1)
        tl.store(out + t * out_line + number * out_head + rows, total.to(out.dtype.element_ty), mask=rows < N)


def multiplied_by_head(x: Any, weight: Any, out: Any) -> None:
    """Writes each head's product of x [T, heads, K] with its matrix, weight [heads, N, K], to `out` [T, heads, N].

    Rows of `x` and of `out` may lie apart, but each one's numbers lie side by side.
    """
    heads, count, columns = weight.shape
    launch(
        by_head,
        (heads, triton.cdiv(count, PER_PROGRAM)),
        x,
        weight,
        out,
        line=x.stride(0),
        head=x.stride(1),
        out_line=out.stride(0),
        out_head=out.stride(1),
        N=count,
        K=columns,
        T=len(x),
        ROWS=PER_PROGRAM,
        COLS=triton.next_power_of_2(columns),
        num_warps=4,
        **launch_options(x.device),
    )
