"""Short convolutions [LFM2] and Mamba-2 [Mamba-2] for single new tokens, from the input projection to the output's.

`edgemoe/model/convolution.py` and `mamba.py` have the formulas. A state is read in one slot and written to another.
"""

from __future__ import annotations

import numpy as np

from edgemoe.jit.intrinsics import f32_at, i64_at, jit, record
from edgemoe.jit.object_cache import chunk
from edgemoe.kernels.cpu.vector import add_vector, exp32, normalise, pack_vector, softplus
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
