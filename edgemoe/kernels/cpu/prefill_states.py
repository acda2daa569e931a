"""Takes a run of one sequence's tokens through a gated delta net or Mamba-2, from the input projection to the output's.

docs/design/kernels.md has the formulas. There are three passes: a token's convolution and factors; some columns of one
head's state through all tokens; a token's gates. So its result is the same bits for any cut of the prompt into runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import f32_at, jit, load_bf16, load_f32, record, store_bf16, store_f32
from edgemoe.jit.object_cache import Code, chunk
from edgemoe.kernels.cpu.decode_stages import sigmoid
from edgemoe.kernels.cpu.state_scan import COLUMNS, scan, scan_for_two
from edgemoe.kernels.cpu.state_step import NORM_EPS, dot, scale_by, silu
from edgemoe.kernels.cpu.vector import add_vector, exp32, norm_scale, normalise, softplus
from edgemoe.types.arrays import fields

# The record of one run of tokens in one layer; arrays are addresses, of float32 unless stated.
# * `tokens` of the run; `x` [tokens, line] in the model's type: the input projection, whose channels begin at `first`
# * `convolution` [taps, channels], `conv_bias` [channels] or 0; `tail` [taps - 1, channels], the inputs before the run
# * `mixed` [tokens, channels]: scratch, the convolution's output
# * `heads` of values in `groups`; heads of a group share the vectors [rows] that enter a state and that read it
# * `own` [tokens, 2 * heads]: beta and decay of each head of a delta net; `own_line` elements from token to token
# * `read` and `write` [heads, rows, value_dim], the state before and after
# * `given`, `asked` and `values` the elements of `mixed` where entering vectors, reading vectors and values begin
# * `corrects` 1 if the state is told the difference to the value that it has already
# * `rates` and `dt_bias` [heads], `skip` [heads] or 0; `norm` [value_dim], or [values] of Mamba-2
# * `state` scratch, see `scratch_floats`; `sums` [tokens, values] scratch
# * `gates` the element of `x` where output gates begin; `out` [tokens, values] in the model's type
STATE_SPAN = np.dtype(
    [
        *fields(
            *("tokens", "x", "line", "first", "channels", "taps", "convolution", "conv_bias", "tail", "mixed"),
            *("heads", "groups", "rows", "value_dim", "own", "own_line", "read", "write", "given", "asked", "values"),
            *("corrects", "rates", "dt_bias", "skip", "norm", "state", "sums", "gates", "out"),
        ).descr,
        ("eps", np.float64),
    ]
)
_ONE, _ZERO = np.float32(1), np.float32(0)


def parts(value_dim: int) -> int:
    """Returns the number of pieces of work of one head's state."""
    return -(-value_dim // COLUMNS)


def scratch_floats(heads: int, rows: int, value_dim: int) -> int:
    """Returns the scratch float32 of all pieces: some columns of a state, their change and two sums."""
    return heads * parts(value_dim) * (rows + 3) * COLUMNS


def _make_mix(bf16: bool) -> Callable[[int, int], int]:
    """Makes the function that computes one token's convolution and its activation."""
    load, size = (load_bf16, 2) if bf16 else (load_f32, 4)

    @jit
    def mix(job: int, token: int) -> int:
        """Returns the address of the token's line of `mixed`."""
        a = record(job, STATE_SPAN)
        out, before = a.mixed + token * a.channels * 4, a.taps - 1
        to, weight = f32_at(out), f32_at(a.convolution + before * a.channels * 4)
        source = a.x + (token * a.line + a.first) * size
        for k in range(a.channels):
            to[k] = load(source, k) * weight[k]
        for tap in range(before):
            weight, at = f32_at(a.convolution + tap * a.channels * 4), token + tap - before
            if at < 0:
                past = f32_at(a.tail + (token + tap) * a.channels * 4)
                for k in range(a.channels):
                    to[k] += past[k] * weight[k]
            else:
                source = a.x + (at * a.line + a.first) * size
                for k in range(a.channels):
                    to[k] += load(source, k) * weight[k]
        if a.conv_bias:
            add_vector(out, a.conv_bias, a.channels)
        silu(out, a.channels)
        return out  # type: ignore[no-any-return]

    return mix  # type: ignore[no-any-return]


@cache
def make_delta_span(bf16: bool) -> tuple[Code, Code]:
    """Makes the first and the last pass of a gated delta net: mix(job, token) and gate(job, token)."""
    mix, (load, store, size) = _make_mix(bf16), (load_bf16, store_bf16, 2) if bf16 else (load_f32, store_f32, 4)

    @chunk
    def mix_delta(job: int, token: int) -> None:
        """Mixes the channels, normalises queries and keys, and writes `own`: beta and the factor of decay."""
        a = record(job, STATE_SPAN)
        line = mix(job, token)
        for head in range(a.groups):
            q, k = line + (a.asked + head * a.rows) * 4, line + (a.given + head * a.rows) * 4
            scale_by(q, a.rows, _ONE / np.sqrt((dot(q, q, a.rows) + NORM_EPS) * np.float32(a.rows)))
            scale_by(k, a.rows, _ONE / np.sqrt(dot(k, k, a.rows) + NORM_EPS))
        own, rates, bias = f32_at(a.own + token * a.own_line * 4), f32_at(a.rates), f32_at(a.dt_bias)
        for head in range(a.heads):
            own[head] = sigmoid(own[head])
            own[a.heads + head] = exp32(-rates[head] * softplus(own[a.heads + head] + bias[head]))

    @chunk
    def gate_delta(job: int, token: int) -> None:
        """Normalises one token's outputs head by head, and weighs them by the gates."""
        a = record(job, STATE_SPAN)
        n, norm = a.value_dim, f32_at(a.norm)
        for head in range(a.heads):
            at = (token * a.heads + head) * n
            values, gates, out = f32_at(a.sums + at * 4), a.x + (token * a.line + a.gates + head * n) * size, a.out
            out += at * size
            factor = norm_scale(a.sums + at * 4, n, a.eps)
            for j in range(n):
                gate = load(gates, j)
                store(out, j, values[j] * factor * norm[j] * (gate / (_ONE + exp32(-gate))))

    return mix_delta, gate_delta


@cache
def make_mamba_span(bf16: bool) -> tuple[Code, Code]:
    """Makes the first and the last pass of Mamba-2: mix(job, token) and gate(job, token)."""
    mix, (load, store, size) = _make_mix(bf16), (load_bf16, store_bf16, 2) if bf16 else (load_f32, store_f32, 4)

    @chunk
    def mix_mamba(job: int, token: int) -> None:
        """Mixes the channels, and writes `own`: the step of time and the factor of decay."""
        a = record(job, STATE_SPAN)
        mix(job, token)
        own, rates, bias = f32_at(a.own + token * a.own_line * 4), f32_at(a.rates), f32_at(a.dt_bias)
        steps = a.x + (token * a.line + a.first + a.channels) * size
        for head in range(a.heads):
            step = softplus(load(steps, head) + bias[head])
            own[head], own[a.heads + head] = step, exp32(-rates[head] * step)

    @chunk
    def gate_mamba_span(job: int, token: int) -> None:
        """Weighs one token's outputs by the gates, and normalises them group by group."""
        a = record(job, STATE_SPAN)
        total = a.heads * a.value_dim
        sums, gates, out = a.sums + token * total * 4, a.x + (token * a.line + a.gates) * size, a.out
        values, share = f32_at(sums), total // a.groups
        for j in range(total):
            gate = load(gates, j)
            values[j] *= gate / (_ONE + exp32(-gate))
        for group in range(a.groups):
            part = sums + group * share * 4
            normalise(part, a.norm + group * share * 4, share, a.eps, 0, part)
        for j in range(total):
            store(out + token * total * size, j, values[j])

    return mix_mamba, gate_mamba_span


@jit
def _copy(source: int, line: int, rows: int, count: int, to: int, to_line: int) -> None:
    """Copies `count` elements of each row; lines are counted in elements."""
    for i in range(rows):
        one, other = f32_at(source + i * line * 4), f32_at(to + i * to_line * 4)
        for j in range(count):
            other[j] = one[j]


@chunk
def carry_state(job: int, number: int) -> None:
    """Takes some columns of one head's state through all tokens."""
    a = record(job, STATE_SPAN)
    n, d, pieces = a.value_dim, a.rows, (a.value_dim + COLUMNS - 1) // COLUMNS
    head, first = number // pieces, number % pieces * COLUMNS
    count, group = min(COLUMNS, n - first), head // (a.heads // a.groups) * d * 4
    state = a.state + number * (d + 3) * COLUMNS * 4
    change_at = state + d * COLUMNS * 4
    known_at, out_at = change_at + COLUMNS * 4, change_at + 2 * COLUMNS * 4
    change, known, out = f32_at(change_at), f32_at(known_at), f32_at(out_at)
    here, room = (head * d * n + first) * 4, f32_at(state)
    for j in range((d + 3) * COLUMNS):
        room[j] = _ZERO
    _copy(a.read + here, n, d, count, state, COLUMNS)
    if a.corrects:
        scan(state, d, _ONE, a.mixed, change_at, a.mixed + a.given * 4 + group, known_at)
    for token in range(a.tokens):
        line, own = a.mixed + token * a.channels * 4, f32_at(a.own + token * a.own_line * 4)
        given, asked, values = line + a.given * 4 + group, line + a.asked * 4 + group, f32_at(line + a.values * 4)
        factor, decay, sums = own[head], own[a.heads + head], f32_at(a.sums + (token * a.heads + head) * n * 4)
        at = head * n + first
        if a.corrects:
            for j in range(count):
                change[j] = factor * (values[at + j] - decay * known[j])
            following = given + a.channels * 4 if token + 1 < a.tokens else given
            scan_for_two(state, d, decay, given, change_at, asked, out_at, following, known_at)
        else:
            for j in range(count):
                change[j] = factor * values[at + j]
            scan(state, d, decay, given, change_at, asked, out_at)
        for j in range(count):
            sums[first + j] = out[j]
        if a.skip:
            for j in range(count):
                sums[first + j] += f32_at(a.skip)[head] * values[at + j]
    _copy(state, COLUMNS, d, count, a.write + here, n)
