"""Steps of few rows of gated delta nets [GatedDeltaNet, Eq. 10] on a GPU, between their products.

A step reads one slot of states and writes another, so that rows which are copies of each other write the same numbers.
Parameters of Triton functions have no annotations, because Triton would evaluate them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgemoe.kernels.gpu.early_start import await_inputs, launch_options
from edgemoe.kernels.gpu.weights import jit

CHANNELS = 256  # of one program
WARPS = 8  # that hold one head's matrix


@jit
def convolve(  # type: ignore[no-untyped-def]
    x,  # [T, from `line` to `line`]: the channels first
    taps,  # float32 [TAPS, CHANNELS], the current token's last
    tails,  # float32 [slots, TAPS - 1, CHANNELS], `slot` numbers from slot to slot
    reads,  # [T] slots
    writes,  # [T] slots
    out,  # float32 [T, CHANNELS] out
    line: tl.constexpr,
    slot: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
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
    new = tl.load(x + row * line + c, mask=live, other=0.0).to(tl.float32)
    total += new * tl.load(taps + (TAPS - 1) * CHANNELS + c, mask=live, other=0.0)
    tl.store(out + row * CHANNELS + c, total * tl.sigmoid(total), mask=live)
    for tap in tl.static_range(1, TAPS - 1):
        tl.store(after + (tap - 1) * CHANNELS, tl.load(before + tap * CHANNELS, mask=live, other=0.0), mask=live)
    tl.store(after + (TAPS - 2) * CHANNELS, new, mask=live)


@jit
def recur(  # type: ignore[no-untyped-def]
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
    there = (d < DIM)[:, None] & (v < VALUE)[None, :]
    at = head * (DIM * VALUE) + d[:, None] * VALUE + v[None, :]
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
    step = tl.load(own + row * (2 * HEADS) + HEADS + head).to(tl.float32) + bias
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
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


class DeltaPlaces(NamedTuple):
    """A layer's sizes and weights between its products (see `delta_net.DeltaWeights`)."""

    heads: int
    key_heads: int
    dim: int  # of a key
    value: int  # of a value
    taps: Any  # float32 [taps, channels]
    rates: Any  # float32 [heads]
    dt_bias: Any  # float32 [heads]
    norm: Any  # float32 [value]
    key_eps: float
    eps: float


def stepped(projected: Any, own: Any, how: DeltaPlaces, states: Any, reads: Any, writes: Any, out: Any) -> None:
    """Writes the gated outputs [T, heads * value] to `out`, and the states after one more token each.

    `projected` [T, channels + values] and `own` [T, 2 * heads] are the products; `states` are a layer's `LayerStates`.
    """
    taps, channels = how.taps.shape
    mixed = how.rates.new_empty((len(projected), channels))
    options = launch_options(out.device)
    convolve[(len(projected), triton.cdiv(channels, CHANNELS))](
        projected,
        how.taps,
        states.tails,
        reads,
        writes,
        mixed,
        line=projected.shape[1],
        slot=states.tails.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        COLS=CHANNELS,
        num_warps=2,
        **options,
    )
    recur[(len(projected), how.heads)](
        mixed,
        projected,
        own,
        how.rates,
        how.dt_bias,
        how.norm,
        states.matrices,
        reads,
        writes,
        out,
        how.dim**-0.5,
        how.key_eps,
        how.eps,
        line=projected.shape[1],
        gate=channels,
        slot=states.matrices.stride(0),
        HEADS=how.heads,
        KEY_HEADS=how.key_heads,
        DIM=how.dim,
        VALUE=how.value,
        DIMS=triton.next_power_of_2(how.dim),
        VALUES=triton.next_power_of_2(how.value),
        num_warps=WARPS,
        **options,
    )
