"""Short convolutions [LFM2], Mamba-2 [Mamba-2] and gated delta nets for single new tokens, between the projections.

`edgemoe/model/convolution.py`, `mamba.py` and docs/design/kernels.md have the formulas. A state is read in one slot and
written to another. A chunk of a delta net is one value head of one token. Its matrix is read for the products with key
and query, then again, from the second-level cache, to write the new state. Four rows go together, so that the sums are
not loaded and stored for each.
"""

from __future__ import annotations

import numpy as np

from edgemoe.jit.intrinsics import f32_at, i64_at, jit, record, summing
from edgemoe.jit.object_cache import chunk
from edgemoe.kernels.cpu.vector import add_vector, exp32, norm_scale, normalise, pack_vector, softplus
from edgemoe.types.arrays import fields

# The fields of a layer's convolution; arrays are addresses.
# * `convolution` [taps, channels] float32, `conv_bias` [channels] or 0
# * `tails` of slot 0, `slot_stride` bytes from slot to slot; `reads` and `writes` [tokens] int64, slots
CONVOLUTION = fields("channels", "taps", "convolution", "conv_bias", "tails", "slot_stride", "reads", "writes")
_ONE = np.float32(1)


@jit
def convolve(job: int, token: int, first: int, count: int, x: int, out: int, is_writer: bool) -> None:
    """Computes out [count] = the convolution of some channels, whose new inputs are x [count].

    As writer it writes their tails.
    """
    c = record(job, CONVOLUTION)
    read = c.tails + i64_at(c.reads)[token] * c.slot_stride + first * 4
    write = f32_at(c.tails + i64_at(c.writes)[token] * c.slot_stride + first * 4)
    latest = f32_at(c.convolution + ((c.taps - 1) * c.channels + first) * 4)
    new, to = f32_at(x), f32_at(out)
    for k in range(count):
        to[k] = new[k] * latest[k]
    for tap in range(c.taps - 1):
        past, weight = f32_at(read + tap * c.channels * 4), f32_at(c.convolution + (tap * c.channels + first) * 4)
        for k in range(count):
            to[k] += past[k] * weight[k]
    if c.conv_bias:
        add_vector(out, c.conv_bias + first * 4, count)
    if not is_writer:
        return
    for tap in range(c.taps - 2):
        later = f32_at(read + (tap + 1) * c.channels * 4)
        for k in range(count):
            write[tap * c.channels + k] = later[k]
    for k in range(count):
        write[(c.taps - 2) * c.channels + k] = new[k]


@jit
def silu(values: int, n: int) -> None:
    v = f32_at(values)
    for k in range(n):
        v[k] = v[k] / (_ONE + exp32(-v[k]))


# The record of a short convolution between two gates; arrays are addresses, of float32.
# * `x` [tokens, 3 * channels]: gates before, gates after, values; `bias` [3 * channels] or 0
# * `out` [tokens, channels], packed by `packs` [pack_count]
CONV = np.dtype([*CONVOLUTION.descr, *fields("x", "bias", "out", "packs", "pack_count").descr])


@chunk
def convolve_token(job: int, token: int) -> None:
    """Computes one token's short convolution."""
    c = record(job, CONV)
    n, before, out = c.channels, c.x + token * 3 * c.channels * 4, c.out + token * c.channels * 4
    if c.bias:
        add_vector(before, c.bias, 3 * n)
    gate, after, values = f32_at(before), f32_at(before + n * 4), f32_at(before + 2 * n * 4)
    for k in range(n):
        values[k] *= gate[k]
    convolve(job, token, 0, n, before + 2 * n * 4, out, True)
    result = f32_at(out)
    for k in range(n):
        result[k] *= after[k]
    pack_vector(c.packs, c.pack_count, out, n, token)


# The record of a Mamba-2 layer; arrays are addresses, of float32.
# * `x` [tokens, values + channels + heads]: output gates, the convolution's inputs, steps of time; `bias` as long, or 0
# * `mixed` [tokens, channels]: values, then B and C of each group
# * `rates`, `skip` and `dt_bias` [heads]; `norm` [values]
# * `matrices` [heads, state, value_dim] of slot 0
# * `out` [tokens, values], packed by `packs` [pack_count]
MAMBA = np.dtype(
    [
        *CONVOLUTION.descr,
        *fields(
            *("heads", "groups", "state", "value_dim", "x", "bias", "mixed", "rates", "skip", "dt_bias", "norm"),
            *("matrices", "out", "packs", "pack_count"),
        ).descr,
        ("eps", np.float64),
    ]
)
PARTS = 8  # into which the channels of one token are cut


@chunk
def mix_channels(job: int, number: int) -> None:
    """Computes the convolution of some of one token's channels, and its activation."""
    m = record(job, MAMBA)
    token, each, values = number // PARTS, (m.channels + PARTS - 1) // PARTS, m.heads * m.value_dim
    first = number % PARTS * each
    count = min(each, m.channels - first)
    if count <= 0:
        return
    x = m.x + (token * (values + m.channels + m.heads) + values + first) * 4
    out = m.mixed + (token * m.channels + first) * 4
    if m.bias:
        add_vector(x, m.bias + (values + first) * 4, count)
    convolve(job, token, first, count, x, out, True)
    silu(out, count)


@chunk
def advance_mamba(job: int, number: int) -> None:
    """Advances the state of one head by one token, and reads it."""
    m = record(job, MAMBA)
    token, head, n = number // m.heads, number % m.heads, m.value_dim
    values, group = m.heads * n, head // (m.heads // m.groups)
    step = f32_at(m.x + (token * (values + m.channels + m.heads) + values + m.channels) * 4)[head]
    if m.bias:
        step += f32_at(m.bias + (values + m.channels) * 4)[head]
    dt = softplus(step + f32_at(m.dt_bias)[head])
    decay, skip = exp32(-f32_at(m.rates)[head] * dt), f32_at(m.skip)[head]
    line = m.mixed + token * m.channels * 4
    x, b = f32_at(line + head * n * 4), f32_at(line + (values + group * m.state) * 4)
    c = f32_at(line + (values + (m.groups + group) * m.state) * 4)
    place, out = head * m.state * n * 4, f32_at(m.out + (token * values + head * n) * 4)
    read = m.matrices + i64_at(m.reads)[token] * m.slot_stride + place
    write = m.matrices + i64_at(m.writes)[token] * m.slot_stride + place
    for j in range(n):
        out[j] = skip * x[j]
    for i in range(m.state):
        before, after, given, asked = f32_at(read + i * n * 4), f32_at(write + i * n * 4), b[i] * dt, c[i]
        for j in range(n):
            new = decay * before[j] + given * x[j]
            after[j] = new
            out[j] += asked * new


@chunk
def gate_mamba(job: int, token: int) -> None:
    """Weighs one token's outputs by its gates, normalises them group by group, and packs them."""
    m = record(job, MAMBA)
    values = m.heads * m.value_dim
    gate, out, size = m.x + token * (values + m.channels + m.heads) * 4, m.out + token * values * 4, values // m.groups
    if m.bias:
        add_vector(gate, m.bias, values)
    g, to = f32_at(gate), f32_at(out)
    for k in range(values):
        to[k] *= g[k] / (_ONE + exp32(-g[k]))
    for group in range(m.groups):
        part = out + group * size * 4
        normalise(part, m.norm + group * size * 4, size, m.eps, 0, part)
    pack_vector(m.packs, m.pack_count, out, values, token)


STATE_STAGES = (convolve_token, mix_channels, advance_mamba, gate_mamba)


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
_ZERO = np.float32(0)


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
