"""Steps of few rows of layers with states on a GPU, between their products.

They are gated delta nets [GatedDeltaNet, Eq. 10], Mamba-2 and short convolutions [LFM2]. A step reads one slot of
states and writes another, so that rows which are copies of each other write the same numbers.
Parameters of Triton functions have no annotations, because Triton would evaluate them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgemoe.kernels.gpu.launches import await_inputs, launch, launch_options
from edgemoe.kernels.gpu.weights import jit

CHANNELS = 256  # of one program
WARPS = 8  # that hold one head's matrix


@jit
def convolve(  # type: ignore[no-untyped-def]
    x,  # [T, from `line` to `line`]: the channels from number `first` on
    taps,  # float32 [TAPS, CHANNELS], the current token's last
    bias,  # float32 [CHANNELS], if BIAS
    tails,  # float32 [slots, TAPS - 1, CHANNELS], `slot` numbers from slot to slot
    reads,  # [T] slots
    writes,  # [T] slots
    out,  # [T, CHANNELS] out
    line: tl.constexpr,
    first: tl.constexpr,
    slot: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,  # `x` is a gate before, a gate after, and the channels; else SiLU is applied
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = c < CHANNELS
    before = tails + tl.load(reads + row).to(tl.int64) * slot + c
    after = tails + tl.load(writes + row).to(tl.int64) * slot + c
    total = tl.zeros((COLS,), tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(before + tap * CHANNELS, mask=live, other=0.0)
        total += old * tl.load(taps + tap * CHANNELS + c, mask=live, other=0.0)
    await_inputs(EARLY)
    source = x + row * line + c
    new = tl.load(source + first, mask=live, other=0.0).to(tl.float32)
    if GATED:
        new *= tl.load(source, mask=live, other=0.0).to(tl.float32)
    total += new * tl.load(taps + (TAPS - 1) * CHANNELS + c, mask=live, other=0.0)
    if BIAS:
        total += tl.load(bias + c, mask=live, other=0.0)
    if GATED:
        total *= tl.load(source + CHANNELS, mask=live, other=0.0).to(tl.float32)
    else:
        total *= tl.sigmoid(total)
    tl.store(out + row * CHANNELS + c, total.to(out.dtype.element_ty), mask=live)
    for tap in tl.static_range(1, TAPS - 1):
        tl.store(after + (tap - 1) * CHANNELS, tl.load(before + tap * CHANNELS, mask=live, other=0.0), mask=live)
    tl.store(after + (TAPS - 2) * CHANNELS, new, mask=live)


@jit
def softplus(x):  # type: ignore[no-untyped-def]
    """Returns log(1 + exp(x))."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def of_head(head, d, v, DIM: tl.constexpr, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the places of rows d and columns v of a head's matrix in its slot, and which of them exist."""
    at = head * (DIM * VALUE) + d[:, None] * VALUE + v[None, :]
    return at, (d < DIM)[:, None] & (v < VALUE)[None, :]


@jit
def delta(  # type: ignore[no-untyped-def]
    mixed,  # float32 [T, 2 * KEY_HEADS * DIM + HEADS * VALUE]: queries, keys, values
    projected,  # [T, from `line` to `line`], from number `gate` on the gates of outputs
    own,  # [T, 2 * HEADS]: beta and decay of each head
    rates,  # float32 [HEADS]
    dt_bias,  # float32 [HEADS]
    norm,  # float32 [VALUE]
    matrices,  # float32 [slots, HEADS, DIM, VALUE], `slot` numbers from slot to slot
    reads,
    writes,
    out,  # [T, HEADS * VALUE] out
    scale,
    key_eps,
    eps,
    line: tl.constexpr,
    gate: tl.constexpr,
    slot: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
    DIMS: tl.constexpr,  # powers of two that hold these
    VALUES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    head = tl.program_id(1)
    width: tl.constexpr = 2 * KEY_HEADS * DIM + HEADS * VALUE
    d = tl.arange(0, DIMS)
    v = tl.arange(0, VALUES)
    at, there = of_head(head, d, v, DIM, VALUE)
    state = tl.load(matrices + tl.load(reads + row).to(tl.int64) * slot + at, mask=there, other=0.0)
    rate = tl.load(rates + head)
    bias = tl.load(dt_bias + head)
    await_inputs(EARLY)
    source = mixed + row * width
    key = head // (HEADS // KEY_HEADS) * DIM + d
    q = tl.load(source + key, mask=d < DIM, other=0.0)
    k = tl.load(source + KEY_HEADS * DIM + key, mask=d < DIM, other=0.0)
    new = tl.load(source + 2 * KEY_HEADS * DIM + head * VALUE + v, mask=v < VALUE, other=0.0)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + key_eps) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + key_eps)
    beta = tl.sigmoid(tl.load(own + row * (2 * HEADS) + head).to(tl.float32))
    step = softplus(tl.load(own + row * (2 * HEADS) + HEADS + head).to(tl.float32) + bias)
    state = state * tl.exp(-rate * step)
    known = tl.sum(state * k[:, None], 0)
    state += k[:, None] * (beta * (new - known))[None, :]
    tl.store(matrices + tl.load(writes + row).to(tl.int64) * slot + at, state, mask=there)
    result = tl.sum(state * q[:, None], 0)
    weight = tl.load(norm + v, mask=v < VALUE, other=0.0)
    result = result * tl.rsqrt(tl.sum(result * result, 0) / VALUE + eps) * weight
    opened = tl.load(projected + row * line + gate + head * VALUE + v, mask=v < VALUE, other=0.0).to(tl.float32)
    result = result * opened * tl.sigmoid(opened)
    tl.store(out + (row * HEADS + head) * VALUE + v, result.to(out.dtype.element_ty), mask=v < VALUE)


@jit
def mamba(  # type: ignore[no-untyped-def]
    mixed,  # float32 [T, HEADS * VALUE + 2 * GROUPS * DIM]: values, B, C
    projected,  # [T, from `line` to `line`]: gates of outputs, and from number `times` on the steps of time
    rates,  # float32 [HEADS]
    dt_bias,  # float32 [HEADS]
    skip,  # float32 [HEADS]
    matrices,  # float32 [slots, HEADS, DIM, VALUE], `slot` numbers from slot to slot
    reads,
    writes,
    out,  # float32 [T, HEADS * VALUE] out
    line: tl.constexpr,
    times: tl.constexpr,
    slot: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
    DIMS: tl.constexpr,  # powers of two that hold these
    VALUES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    head = tl.program_id(1)
    width: tl.constexpr = HEADS * VALUE
    d = tl.arange(0, DIMS)
    v = tl.arange(0, VALUES)
    at, there = of_head(head, d, v, DIM, VALUE)
    state = tl.load(matrices + tl.load(reads + row).to(tl.int64) * slot + at, mask=there, other=0.0)
    rate = tl.load(rates + head)
    bias = tl.load(dt_bias + head)
    await_inputs(EARLY)
    source = mixed + row * (width + 2 * GROUPS * DIM)
    group = width + head // (HEADS // GROUPS) * DIM + d
    x = tl.load(source + head * VALUE + v, mask=v < VALUE, other=0.0)
    b = tl.load(source + group, mask=d < DIM, other=0.0)
    c = tl.load(source + GROUPS * DIM + group, mask=d < DIM, other=0.0)
    step = softplus(tl.load(projected + row * line + times + head).to(tl.float32) + bias)
    state = state * tl.exp(-rate * step) + b[:, None] * (x * step)[None, :]
    tl.store(matrices + tl.load(writes + row).to(tl.int64) * slot + at, state, mask=there)
    result = tl.sum(state * c[:, None], 0) + tl.load(skip + head) * x
    opened = tl.load(projected + row * line + head * VALUE + v, mask=v < VALUE, other=0.0).to(tl.float32)
    tl.store(out + row * width + head * VALUE + v, result * opened * tl.sigmoid(opened), mask=v < VALUE)


class Convolution(NamedTuple):
    """A layer's convolution, and which slots of its tails are read and written."""

    taps: Any  # float32 [taps, channels]
    bias: Any  # float32 [channels], or None
    tails: Any  # float32 [slots, taps - 1, channels]
    reads: Any  # [T]
    writes: Any  # [T]


def convolved(x: Any, first: int, how: Convolution, out: Any, gated: bool = False) -> None:
    """Writes the convolution, with SiLU, of channels `first` and on of x [T, columns] to `out` [T, channels].

    Where it is `gated`, the columns are a gate before it, a gate after it, and the channels; SiLU is not applied.
    """
    taps, channels = how.taps.shape
    launch(
        convolve,
        (len(x), triton.cdiv(channels, CHANNELS)),
        x,
        how.taps,
        how.taps if how.bias is None else how.bias,
        how.tails,
        how.reads,
        how.writes,
        out,
        line=x.shape[1],
        first=first,
        slot=how.tails.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        BIAS=how.bias is not None,
        GATED=gated,
        COLS=CHANNELS,
        num_warps=2,
        **launch_options(out.device),
    )


class HeadStates(NamedTuple):
    """The states of a layer's heads, their weights, and which slots are read and written."""

    key_heads: int  # of queries and keys, or groups of B and C
    rates: Any  # float32 [heads]
    dt_bias: Any  # float32 [heads]
    matrices: Any  # float32 [slots, heads, dim, value]
    reads: Any  # [T]
    writes: Any  # [T]


def delta_step(
    mixed: Any, projected: Any, own: Any, how: HeadStates, norm: Any, key_eps: float, eps: float, out: Any
) -> None:
    """Writes the gated outputs [T, heads * value] of a delta net to `out`, and its states after one more token each.

    `mixed` [T, channels] are queries, keys and values, float32. The gates are the columns of `projected` after as many,
    and `own` [T, 2 * heads] gives beta and decay.
    """
    _, heads, dim, value = how.matrices.shape
    launch(
        delta,
        (len(mixed), heads),
        mixed,
        projected,
        own,
        how.rates,
        how.dt_bias,
        norm,
        how.matrices,
        how.reads,
        how.writes,
        out,
        dim**-0.5,
        key_eps,
        eps,
        line=projected.shape[1],
        gate=mixed.shape[1],
        slot=how.matrices.stride(0),
        HEADS=heads,
        KEY_HEADS=how.key_heads,
        DIM=dim,
        VALUE=value,
        DIMS=triton.next_power_of_2(dim),
        VALUES=triton.next_power_of_2(value),
        num_warps=WARPS,
        **launch_options(out.device),
    )


def mamba_step(mixed: Any, projected: Any, how: HeadStates, skip: Any, out: Any) -> None:
    """Writes the gated outputs [T, heads * value] of Mamba-2 to `out`, and its states after one more token each.

    `mixed` [T, channels] are values, B and C, float32. `projected` has the gates, `channels` columns, and times.
    """
    _, heads, dim, value = how.matrices.shape
    launch(
        mamba,
        (len(mixed), heads),
        mixed,
        projected,
        how.rates,
        how.dt_bias,
        skip,
        how.matrices,
        how.reads,
        how.writes,
        out,
        line=projected.shape[1],
        times=heads * value + mixed.shape[1],
        slot=how.matrices.stride(0),
        HEADS=heads,
        GROUPS=how.key_heads,
        DIM=dim,
        VALUE=value,
        DIMS=triton.next_power_of_2(dim),
        VALUES=triton.next_power_of_2(value),
        num_warps=WARPS,
        **launch_options(out.device),
    )
