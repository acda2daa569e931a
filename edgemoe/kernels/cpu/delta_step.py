"""Computes the states of gated delta nets for single new tokens, from the input projection to the gated norm.

A chunk is one value head of one token. Its matrix is read for the products with key and query, then again, from the
second-level cache, to write the new state into another slot. Four rows go together, so that the sums are not loaded and
stored for each. See docs/design/kernels.md for the formulas.
"""

from __future__ import annotations

import numpy as np

from edgemoe.jit.intrinsics import f32_at, i64_at, jit, record, summing
from edgemoe.jit.object_cache import chunk
from edgemoe.kernels.cpu.state_step import CONVOLUTION, convolve, silu
from edgemoe.kernels.cpu.vector import exp32, norm_scale, softplus
from edgemoe.types.arrays import fields

# The record of one layer; arrays are addresses, of float32 unless stated.
# * `projected` [tokens, channels + values]: queries, keys, values, output gate
# * `own` [tokens, 2 * value_heads]: beta, decay
# * `rates` and `dt_bias` [value_heads]; `norm` [value_dim]
# * `matrices` of slot 0
# * `out` [tokens, values]
# * `scratch` see `scratch_floats`
DELTA = np.dtype(
    [
        *CONVOLUTION.descr,
        *fields(
            *("key_heads", "value_heads", "key_dim", "value_dim", "projected", "own", "rates", "dt_bias", "norm"),
            *("matrices", "out", "scratch"),
        ).descr,
        ("eps", np.float64),
    ]
)
NORM_EPS = np.float32(1e-6)  # of queries and keys
_ONE, _ZERO = np.float32(1), np.float32(0)


def scratch_floats(tokens: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Returns the size of the scratch array: query, key, value and two sums for each chunk."""
    return tokens * value_heads * (2 * key_dim + 3 * value_dim)


@jit
def _mix(job: int, token: int, first: int, count: int, is_writer: bool, out: int) -> None:
    """Writes silu of the convolution of channels first:first + count to `out`, and as writer their new tails."""
    a = record(job, DELTA)
    x = a.projected + (token * (a.channels + a.value_heads * a.value_dim) + first) * 4
    convolve(job, token, first, count, x, out, is_writer)
    silu(out, count)


@summing
def dot(x: int, y: int, n: int) -> float:
    """Returns the sum of x [n] * y [n]."""
    a, b, result = f32_at(x), f32_at(y), _ZERO
    for i in range(n):
        result += a[i] * b[i]
    return result  # type: ignore[return-value]


@jit
def scale_by(x: int, n: int, factor: float) -> None:
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


@chunk
def advance_delta(job: int, number: int) -> None:
    """Takes one value head of one token from the projection to the gated norm."""
    a = record(job, DELTA)
    token, head = number // a.value_heads, number % a.value_heads
    share, d, n = a.value_heads // a.key_heads, a.key_dim, a.value_dim
    q = a.scratch + number * (2 * d + 3 * n) * 4
    k, v, known, asked = q + d * 4, q + 2 * d * 4, q + (2 * d + n) * 4, q + (2 * d + 2 * n) * 4
    first, is_writer = head // share * d, head % share == 0
    _mix(job, token, first, d, is_writer, q)
    _mix(job, token, a.key_heads * d + first, d, is_writer, k)
    _mix(job, token, 2 * a.key_heads * d + head * n, n, True, v)
    scale_by(q, d, _ONE / np.sqrt((dot(q, q, d) + NORM_EPS) * np.float32(d)))
    scale_by(k, d, _ONE / np.sqrt(dot(k, k, d) + NORM_EPS))
    gate = f32_at(a.projected + ((token + 1) * (a.channels + a.value_heads * n) - (a.value_heads - head) * n) * 4)
    own = f32_at(a.own + (2 * token * a.value_heads + head) * 4)
    beta = _ONE / (_ONE + exp32(-own[0]))
    decay = exp32(-f32_at(a.rates)[head] * softplus(own[a.value_heads] + f32_at(a.dt_bias)[head]))
    place = head * d * n * 4
    state = a.matrices + i64_at(a.reads)[token] * a.slot_stride + place
    _look_up(state, d, n, k, q, known, asked)
    values, change, seen, overlap = f32_at(v), f32_at(known), f32_at(asked), dot(q, k, d)
    for j in range(n):
        change[j] = beta * (values[j] - decay * change[j])
        seen[j] = decay * seen[j] + overlap * change[j]
    _write_down(state, d, n, decay, k, known, a.matrices + i64_at(a.writes)[token] * a.slot_stride + place)
    out, norm = f32_at(a.out + (token * a.value_heads + head) * n * 4), f32_at(a.norm)
    scale = norm_scale(asked, n, a.eps)
    for j in range(n):
        out[j] = seen[j] * scale * norm[j] * gate[j] / (_ONE + exp32(-gate[j]))
