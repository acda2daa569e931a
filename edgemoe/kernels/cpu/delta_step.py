"""Computes the states of gated delta nets for single new tokens, from the input projection to the gated norm.

A chunk is one value head of one token. Its matrix is read for the products with key and query, then again, from the
second-level cache, to write the new state into another slot. Four rows go together, so that the sums are not loaded and
stored for each. See docs/design/kernels.md for the formulas.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import INT, f32_at, i64_at, jit, record, summing
from edgemoe.jit.object_cache import Code, address_of, chunk, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.vector import exp32, log32, norm_scale
from edgemoe.types.arrays import fields

# The record of one call; arrays are addresses, of float32 unless stated.
# * `projected` [tokens, channels + values]: queries, keys, values, output gate
# * `own` [tokens, 2 * value_heads]: beta, decay
# * `convolution` [taps, channels]
# * `rates` and `dt_bias` [value_heads]; `norm` [value_dim]
# * `tails` and `matrices` of slot 0; `slot_stride` bytes from slot to slot
# * `reads` and `writes` [tokens] int64, slots
# * `out` [tokens, values]
# * `scratch` see `scratch_floats`
DELTA = np.dtype(
    [
        *fields(
            *("tokens", "key_heads", "value_heads", "key_dim", "value_dim", "taps", "channels"),
            *("projected", "own", "convolution", "rates", "dt_bias", "norm"),
            *("tails", "matrices", "slot_stride", "reads", "writes", "out", "scratch"),
        ).descr,
        ("eps", np.float64),
    ]
)
NORM_EPS = np.float32(1e-6)  # of queries and keys
_ONE, _TWO, _ZERO = np.float32(1), np.float32(2), np.float32(0)
_LINEAR_FROM = np.float32(16)  # softplus(x) is x in float32


def scratch_floats(tokens: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Returns the size of the scratch array: query, key, value and two sums for each chunk."""
    return tokens * value_heads * (2 * key_dim + 3 * value_dim)


@jit
def _softplus(x: float) -> float:
    """Returns log(1 + exp(x)) with an error of 3e-7: `log32`, bettered by one step of Halley's method."""
    if x > _LINEAR_FROM:
        return x
    u = _ONE + exp32(x)
    y = log32(u)
    v = exp32(y)
    return y + _TWO * (u - v) / (u + v)  # type: ignore[no-any-return]


@jit
def _convolve(job: int, token: int, first: int, count: int, is_writer: bool, out: int) -> None:
    """Writes silu of the convolution of channels first:first + count to `out`, and as writer their new tails."""
    a = record(job, DELTA)
    read = a.tails + i64_at(a.reads)[token] * a.slot_stride + first * 4
    write = f32_at(a.tails + i64_at(a.writes)[token] * a.slot_stride + first * 4)
    line = a.channels + a.value_heads * a.value_dim
    x, to = f32_at(a.projected + (token * line + first) * 4), f32_at(out)
    latest = f32_at(a.convolution + ((a.taps - 1) * a.channels + first) * 4)
    for c in range(count):
        to[c] = x[c] * latest[c]
    for tap in range(a.taps - 1):
        past, weight = f32_at(read + tap * a.channels * 4), f32_at(a.convolution + (tap * a.channels + first) * 4)
        for c in range(count):
            to[c] += past[c] * weight[c]
    for c in range(count):
        to[c] = to[c] / (_ONE + exp32(-to[c]))
    if is_writer:
        for tap in range(a.taps - 2):
            later = f32_at(read + (tap + 1) * a.channels * 4)
            for c in range(count):
                write[tap * a.channels + c] = later[c]
        for c in range(count):
            write[(a.taps - 2) * a.channels + c] = x[c]


@summing
def _dot(x: int, y: int, n: int) -> float:
    """Returns the sum of x [n] * y [n]."""
    a, b, result = f32_at(x), f32_at(y), _ZERO
    for i in range(n):
        result += a[i] * b[i]
    return result  # type: ignore[return-value]


@jit
def _scale(x: int, n: int, factor: float) -> None:
    values = f32_at(x)
    for i in range(n):
        values[i] *= factor


@jit
def _look_up(state: int, rows: int, n: int, k: int, q: int, known: int, asked: int) -> None:
    """Computes known = state^T k and asked = state^T q for state [rows, n]."""
    keys, queries, one, other = f32_at(k), f32_at(q), f32_at(known), f32_at(asked)
    for j in range(n):
        one[j] = _ZERO
        other[j] = _ZERO
    full = rows - rows % 4
    for i in range(0, full, 4):
        s0, s1 = f32_at(state + i * n * 4), f32_at(state + (i + 1) * n * 4)
        s2, s3 = f32_at(state + (i + 2) * n * 4), f32_at(state + (i + 3) * n * 4)
        k0, k1, k2, k3 = keys[i], keys[i + 1], keys[i + 2], keys[i + 3]
        q0, q1, q2, q3 = queries[i], queries[i + 1], queries[i + 2], queries[i + 3]
        for j in range(n):
            one[j] += s0[j] * k0 + s1[j] * k1 + s2[j] * k2 + s3[j] * k3
            other[j] += s0[j] * q0 + s1[j] * q1 + s2[j] * q2 + s3[j] * q3
    for i in range(full, rows):
        s0, k0, q0 = f32_at(state + i * n * 4), keys[i], queries[i]
        for j in range(n):
            one[j] += s0[j] * k0
            other[j] += s0[j] * q0


@jit
def _write_down(state: int, rows: int, n: int, decay: float, k: int, delta: int, to: int) -> None:
    """Computes to = decay * state + k delta^T for state [rows, n]."""
    keys, change = f32_at(k), f32_at(delta)
    for i in range(rows):
        before, after, key = f32_at(state + i * n * 4), f32_at(to + i * n * 4), keys[i]
        for j in range(n):
            after[j] = decay * before[j] + key * change[j]


def _make_advance() -> Code:
    """Makes the chunk that takes one value head of one token from the projection to the gated norm."""

    @chunk
    def advance(job: int, number: int) -> None:
        a = record(job, DELTA)
        token, head = number // a.value_heads, number % a.value_heads
        share, d, n = a.value_heads // a.key_heads, a.key_dim, a.value_dim
        q = a.scratch + number * (2 * d + 3 * n) * 4
        k, v, known, asked = q + d * 4, q + 2 * d * 4, q + (2 * d + n) * 4, q + (2 * d + 2 * n) * 4
        first, is_writer = head // share * d, head % share == 0
        _convolve(job, token, first, d, is_writer, q)
        _convolve(job, token, a.key_heads * d + first, d, is_writer, k)
        _convolve(job, token, 2 * a.key_heads * d + head * n, n, True, v)
        _scale(q, d, _ONE / np.sqrt((_dot(q, q, d) + NORM_EPS) * np.float32(d)))
        _scale(k, d, _ONE / np.sqrt(_dot(k, k, d) + NORM_EPS))
        gate = f32_at(a.projected + ((token + 1) * (a.channels + a.value_heads * n) - (a.value_heads - head) * n) * 4)
        own = f32_at(a.own + (2 * token * a.value_heads + head) * 4)
        beta = _ONE / (_ONE + exp32(-own[0]))
        decay = exp32(-f32_at(a.rates)[head] * _softplus(own[a.value_heads] + f32_at(a.dt_bias)[head]))
        place = head * d * n * 4
        state = a.matrices + i64_at(a.reads)[token] * a.slot_stride + place
        _look_up(state, d, n, k, q, known, asked)
        values, change, seen, overlap = f32_at(v), f32_at(known), f32_at(asked), _dot(q, k, d)
        for j in range(n):
            change[j] = beta * (values[j] - decay * change[j])
            seen[j] = decay * seen[j] + overlap * change[j]
        _write_down(state, d, n, decay, k, known, a.matrices + i64_at(a.writes)[token] * a.slot_stride + place)
        out, norm = f32_at(a.out + (token * a.value_heads + head) * n * 4), f32_at(a.norm)
        scale = norm_scale(asked, n, a.eps)
        for j in range(n):
            out[j] = seen[j] * scale * norm[j] * gate[j] / (_ONE + exp32(-gate[j]))

    return advance


@cache
def make_delta(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel delta(control, address of a DELTA record), for Python, and all code that it refers to.

    It is the same for both weight types, each of which has its own, because each is linked by itself.
    """
    advance = _make_advance()
    advancing = address_of(advance)

    @code(INT, INT)
    def delta(control: int, job: int) -> None:
        a = record(job, DELTA)
        parallel(control, advancing(), job, a.tokens * a.value_heads)

    return delta, (advance, delta)
