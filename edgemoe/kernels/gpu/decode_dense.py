"""Multiplies few rows with dense matrices on a GPU, places heads in the cache, and chooses experts: a launch each.

Weights are read once for all rows and multiplied in registers; norms are part of the products that follow them.
Parameters of Triton functions have no annotations, because Triton would evaluate them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgemoe.kernels.gpu.experts_decode import plane_of
from edgemoe.kernels.gpu.launches import await_inputs, launch, launch_options
from edgemoe.kernels.gpu.weights import jit

MOST_ROWS = 2  # that are multiplied in registers; matrix units are faster from 4 on
PER_PROGRAM = 4  # rows of a matrix
WARPS = 4
COLUMNS = 2048  # in one step of a program, for one row


@jit
def columns_of(lines, step: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the weights [r, COLS] of rows that begin at `lines` [r], of one step; zero beyond K."""
    k = step * COLS + tl.arange(0, COLS)
    if K % COLS == 0:
        return tl.load(lines[:, None] + k[None, :], eviction_policy="evict_first")
    return tl.load(lines[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@jit
def product(  # type: ignore[no-untyped-def]
    x,  # [T, K]
    norm,  # float32 [K], if NORM
    weight,  # [N, K]
    bias,  # [N], if BIAS
    out,  # [T, N], to which the product is added if ADD
    planes,  # float32 [T, K] out, if KIND is not -1: x normalised, in planes
    eps,
    factor,
    N: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,  # normalised numbers go to planes as bfloat16 has them
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of planes that a program writes, and the power of two that holds them
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, T)
    lines = weight + tl.minimum(rows, N - 1).to(tl.int64) * K
    first = columns_of(lines, 0, K, COLS)
    await_inputs(EARLY)
    total = tl.zeros((T, ROWS, COLS), tl.float32)
    squares = tl.zeros((T, COLS), tl.float32)
    for step in tl.static_range((K + COLS - 1) // COLS):
        k = step * COLS + tl.arange(0, COLS)
        if step == 0:
            w = first.to(tl.float32)
        else:
            w = columns_of(lines, step, K, COLS).to(tl.float32)
        if K % COLS == 0:
            given = tl.load(x + t[:, None] * K + k[None, :]).to(tl.float32)
            if NORM:
                w *= tl.load(norm + k)[None, :]
        else:
            given = tl.load(x + t[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
            if NORM:
                w *= tl.load(norm + k, mask=k < K, other=0.0)[None, :]
        total += w[None, :, :] * given[:, None, :]
        if NORM:
            squares += given * given
    result = tl.sum(total, 2)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        result *= scale[:, None]
    if BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    at = out + t[:, None] * N + rows[None, :]
    live = (rows < N)[None, :] & (t < T)[:, None]
    if ADD:
        result = tl.load(at, mask=live, other=0.0).to(tl.float32) + factor * result
    tl.store(at, result.to(out.dtype.element_ty), mask=live)
    if KIND != -1:
        c = tl.program_id(0) * CHUNK + tl.arange(0, CHUNKS)
        mine = (tl.arange(0, CHUNKS) < CHUNK) & (c < K)
        given = tl.load(x + t[:, None] * K + c[None, :], mask=mine[None, :], other=0.0).to(tl.float32)
        given = given * scale[:, None] * tl.load(norm + c, mask=mine, other=0.0)[None, :]
        if ROUNDED:
            given = given.to(tl.bfloat16).to(tl.float32)
        tl.store(planes + t[:, None] * K + plane_of(c, K, KIND)[None, :], given, mask=mine[None, :])


def _columns(columns: int, rows: int) -> int:
    return min(COLUMNS // rows, max(16, 1 << (columns - 1).bit_length()))


class GpuProduct(NamedTuple):
    """The options of a product besides its rows and its matrix."""

    norm: Any = None  # float32 [K]: rows are normalised before
    eps: float = 0.0
    bias: Any = None  # [N]
    add: bool = False  # the product, times `factor`, to `out`
    factor: float = 1.0
    planes: Any = None  # float32 [T, K] to write normalised rows to, see `experts_decode`
    kind: int = -1  # of the weights that the planes are for
    rounded: bool = False  # to bfloat16, in the planes


def multiplied(x: Any, weight: Any, out: Any, how: GpuProduct) -> None:
    """Writes x [T, K] times weight [N, K] transposed to `out` [T, N], or adds it. At most MOST_ROWS rows."""
    (rows, columns), count = x.shape, len(weight)
    programs = triton.cdiv(count, PER_PROGRAM)
    chunk = triton.cdiv(columns, programs)
    launch(
        product,
        (programs,),
        x,
        x if how.norm is None else how.norm,
        weight,
        x if how.bias is None else how.bias,
        out,
        x if how.planes is None else how.planes,
        how.eps,
        how.factor,
        N=count,
        K=columns,
        T=rows,
        NORM=how.norm is not None,
        BIAS=how.bias is not None,
        ADD=how.add,
        KIND=how.kind,
        ROUNDED=how.rounded,
        ROWS=PER_PROGRAM,
        COLS=_columns(columns, rows),
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunk),
        num_warps=WARPS,
        **launch_options(x.device),
    )


@jit
def normalise(  # type: ignore[no-untyped-def]
    x,  # float32 [T, K]
    norm,  # float32 [GROUPS, K], for each row in turn
    out,  # [T, K] out
    planes,  # float32 [T, K] out, if KIND is not -1: the rows of `out` in planes
    eps,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    at = tl.program_id(0) * K
    c = tl.arange(0, COLS)
    weight = tl.load(norm + tl.program_id(0) % GROUPS * K + c, mask=c < K, other=0.0)
    await_inputs(EARLY)
    given = tl.load(x + at + c, mask=c < K, other=0.0)
    result = (given * tl.rsqrt(tl.sum(given * given, 0) / K + eps) * weight).to(out.dtype.element_ty)
    tl.store(out + at + c, result, mask=c < K)
    if KIND != -1:
        tl.store(planes + at + plane_of(c, K, KIND), result.to(tl.float32), mask=c < K)


def normalised(x: Any, norm: Any, eps: float, dtype: Any, planes: Any = None, kind: int = -1) -> Any:
    """Returns float32 rows x [T, K] divided by their root mean square and weighted, in a type.

    Row t is weighted by line t % groups of `norm` [groups * K]. The rows are written to `planes`, too,
    for weights of a kind.
    """
    import torch

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    launch(
        normalise,
        (len(x),),
        x,
        norm,
        out,
        x if planes is None else planes,
        eps,
        K=x.shape[1],
        GROUPS=norm.numel() // x.shape[1],
        KIND=kind,
        COLS=triton.next_power_of_2(x.shape[1]),
        num_warps=8,
        **launch_options(x.device),
    )
    return out


class HeadPlaces(NamedTuple):
    """The norms and layout of queries, keys and values between their product and attention."""

    q_norm: Any  # float32 [dim], or None
    k_norm: Any
    eps: float
    heads: int
    kv_heads: int
    dim: int
    turned: int  # numbers of a head that turn; 0: none
    clip: float
    after: bool  # norms come after turning
    v_norm: bool
    v_is_k: bool


@jit
def place(  # type: ignore[no-untyped-def]
    given,  # [T, line]: queries, keys, values if any, and columns that are ignored
    q_norm,
    k_norm,
    cos,  # float32 [T, TURNED / 2]
    sin,
    blocks,  # [T]
    positions,  # [T]
    q,  # [T, COUNT, DIM] out
    keys,  # out: see `decode_attention.attend`
    values,
    eps,
    line: tl.constexpr,
    block: tl.constexpr,
    value_block: tl.constexpr,
    head: tl.constexpr,
    value_head: tl.constexpr,
    COUNT: tl.constexpr,
    KV_COUNT: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TURNED: tl.constexpr,
    CLIP: tl.constexpr,
    NORM: tl.constexpr,
    AFTER: tl.constexpr,
    V_NORM: tl.constexpr,
    V_IS_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    number = tl.program_id(1)
    d = tl.arange(0, DIMS)
    live = d < DIM
    source = number
    if V_IS_K:
        source = tl.where(number >= COUNT + KV_COUNT, number - KV_COUNT, number)
    at = given + row * line + source * DIM
    place_in = tl.load(positions + row) % 16
    page = tl.load(blocks + row)
    await_inputs(EARLY)
    x = tl.load(at + d, mask=live, other=0.0).to(tl.float32)
    if number < COUNT + KV_COUNT:
        half: tl.constexpr = TURNED // 2
        other = tl.where(d < half, d + half, d - half)
        if TURNED > 0:
            y = tl.load(at + other, mask=d < TURNED, other=0.0).to(tl.float32)
        weight = tl.full((DIMS,), 1.0, tl.float32)
        if NORM:
            if number < COUNT:
                weight = tl.load(q_norm + d, mask=live, other=0.0)
            else:
                weight = tl.load(k_norm + d, mask=live, other=0.0)
            if not AFTER:
                scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
                x = x * scale * weight
                if TURNED > 0:
                    if number < COUNT:
                        y *= tl.load(q_norm + other, mask=d < TURNED, other=0.0) * scale
                    else:
                        y *= tl.load(k_norm + other, mask=d < TURNED, other=0.0) * scale
        if CLIP > 0:
            x = tl.minimum(tl.maximum(x, -CLIP), CLIP)
            if TURNED > 0:
                y = tl.minimum(tl.maximum(y, -CLIP), CLIP)
        if TURNED > 0:
            angle = row * half + d % half
            turns = d < TURNED
            c = tl.load(cos + angle, mask=turns, other=1.0)
            s = tl.load(sin + angle, mask=turns, other=0.0)
            x = x * c + tl.where(d < half, -y, y) * s
        if NORM and AFTER:
            x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * weight
        if number < COUNT:
            tl.store(q + (row * COUNT + number) * DIM + d, x.to(q.dtype.element_ty), mask=live)
        else:
            to = keys + page * block + (number - COUNT) * head + place_in * DIM
            tl.store(to + d, x.to(keys.dtype.element_ty), mask=live)
    else:
        if CLIP > 0:
            x = tl.minimum(tl.maximum(x, -CLIP), CLIP)
        if V_NORM:
            x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
        to = values + page * value_block + (number - COUNT - KV_COUNT) * value_head + place_in * DIM
        tl.store(to + d, x.to(values.dtype.element_ty), mask=live)


def placed(given: Any, heads: HeadPlaces, angles: Any, blocks: Any, positions: Any, pages: Any, q: Any) -> None:
    """Writes queries [T, count, dim] to `q`, keys and values to the pages of a layer, of products `given` [T, line]."""
    cos, sin = angles if angles is not None else (given, given)
    launch(
        place,
        (len(given), heads.heads + 2 * heads.kv_heads),
        given,
        given if heads.q_norm is None else heads.q_norm,
        given if heads.k_norm is None else heads.k_norm,
        cos,
        sin,
        blocks,
        positions,
        q,
        pages.keys,
        pages.values,
        heads.eps,
        line=given.shape[1],
        block=pages.keys.stride(0),
        value_block=pages.values.stride(0),
        head=pages.keys.stride(1),
        value_head=pages.values.stride(1),
        COUNT=heads.heads,
        KV_COUNT=heads.kv_heads,
        DIM=heads.dim,
        DIMS=triton.next_power_of_2(heads.dim),
        TURNED=heads.turned if angles is not None else 0,
        CLIP=heads.clip,
        NORM=heads.q_norm is not None,
        AFTER=heads.after,
        V_NORM=heads.v_norm,
        V_IS_K=heads.v_is_k,
        num_warps=1,
        **launch_options(q.device),
    )


@jit
def choose(  # type: ignore[no-untyped-def]
    logits,  # float32 [T, E]
    logit_bias,  # float32 [E], where LOGIT_BIAS
    selection_bias,  # float32 [E], where SELECTION_BIAS
    expert_scale,  # float32 [E], where EXPERT_SCALE
    ids,  # int64 [T, k] out
    shares,  # float32 [T, k] out
    E: tl.constexpr,
    ES: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    LOGIT_BIAS: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    EXPERT_SCALE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    LEAST_MASS: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    KS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    e = tl.arange(0, ES)
    live = e < E
    await_inputs(EARLY)
    score = tl.load(logits + row * E + e, mask=live, other=float("-inf"))
    if LOGIT_BIAS:
        score += tl.load(logit_bias + e, mask=live, other=0.0)
    if SOFTMAX:
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    else:
        score = tl.sigmoid(score)
    choice = tl.where(live, score, float("-inf"))
    if SELECTION_BIAS:
        choice += tl.load(selection_bias + e, mask=live, other=0.0)
    if GROUPS > TOP_GROUPS:  # and E is a power of two
        grouped = tl.reshape(choice, (GROUPS, E // GROUPS))
        best = tl.max(grouped, 1)
        if TOP2:
            first = tl.argmax(grouped, 1)
            inner = tl.arange(0, E // GROUPS)
            best += tl.max(tl.where(inner[None, :] == first[:, None], float("-inf"), grouped), 1)
        g = tl.arange(0, GROUPS)
        open_to = g < 0
        for _ in tl.static_range(TOP_GROUPS):
            taken = tl.argmax(best, 0)
            open_to = open_to | (g == taken)
            best = tl.where(g == taken, float("-inf"), best)
        grouped = tl.where(open_to[:, None], grouped, float("-inf"))
        choice = tl.reshape(grouped, (ES,))
    j = tl.arange(0, KS)
    chosen = tl.zeros((KS,), tl.int32)
    weight = tl.zeros((KS,), tl.float32)
    for i in tl.static_range(K):
        taken = tl.argmax(choice, 0)
        chosen = tl.where(j == i, taken, chosen)
        weight = tl.where(j == i, tl.sum(tl.where(e == taken, score, 0.0), 0), weight)
        choice = tl.where(e == taken, float("-inf"), choice)
    if RENORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, 0), LEAST_MASS)
    if EXPERT_SCALE:
        weight *= tl.load(expert_scale + chosen)
    tl.store(ids + row * K + j, chosen.to(tl.int64), mask=j < K)
    tl.store(shares + row * K + j, weight * SCALE, mask=j < K)


class GateRule(NamedTuple):
    """States how experts are chosen by the logits of their gate (see `families.spec.RouterSpec`)."""

    top_k: int
    softmax: bool
    logit_bias: Any  # float32 [E], or None
    selection_bias: Any
    expert_scale: Any
    renormalise: bool
    least_mass: float
    scale: float
    groups: int
    top_groups: int
    top2: bool


def chosen(logits: Any, how: GateRule, ids: Any, shares: Any) -> None:
    """Writes the experts chosen by logits [T, E], float32, to `ids` [T, k], int64, and their weights to `shares`."""
    experts = logits.shape[1]
    launch(
        choose,
        (len(logits),),
        logits,
        *(logits if each is None else each for each in (how.logit_bias, how.selection_bias, how.expert_scale)),
        ids,
        shares,
        E=experts,
        ES=triton.next_power_of_2(experts),
        K=how.top_k,
        SOFTMAX=how.softmax,
        LOGIT_BIAS=how.logit_bias is not None,
        SELECTION_BIAS=how.selection_bias is not None,
        EXPERT_SCALE=how.expert_scale is not None,
        RENORMALISE=how.renormalise,
        LEAST_MASS=how.least_mass,
        SCALE=how.scale,
        GROUPS=how.groups,
        TOP_GROUPS=how.top_groups,
        TOP2=how.top2,
        KS=triton.next_power_of_2(how.top_k),
        num_warps=1 if experts <= 128 else 2,
        **launch_options(logits.device),
    )
