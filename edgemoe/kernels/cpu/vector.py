"""Computes on one token's vectors, in one thread: packing, norms, rotation, exp, log and softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from edgemoe.jit.intrinsics import (
    INT,
    LANES,
    bits_of,
    block_elements,
    call_pack,
    f32_at,
    f32_of,
    jit,
    load_bf16,
    load_f32,
    record,
    summing,
    types,
)
from edgemoe.jit.object_cache import Code, code
from edgemoe.types.arrays import fields

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693145751953125)
_LN2_LOW = np.float32(1.428606765330187e-06)
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_GELU, _CUBE = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_ONE, _TWO, _HALF, _ZERO = np.float32(1.0), np.float32(2.0), np.float32(0.5), np.float32(0.0)
PACK = fields("pack", "out")  # code that packs a vector of n elements, and where, [tokens, n]
_PACK_BYTES = PACK.itemsize
_LINEAR_FROM = np.float32(16)  # softplus(x) is x in float32
_THIRD, _FIFTH, _SEVENTH, _LN2 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7), np.float32(np.log(2))

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")


@jit
def exp32(value: float) -> Any:
    """Returns exp(value) in float32, with an error of 1e-7.

    Has no call and no branch, so that loops over it vectorise. The coefficients come from Cephes' expf.
    """
    x = min(max(np.float32(value), _LOWEST), _HIGHEST)
    whole = np.floor(x * _LOG2E + _HALF)
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = (((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE
    return f32_of(np.uint32(bits_of(np.float32(p)) + (np.uint32(np.int32(whole)) << np.uint32(23))))


@jit
def log32(value: float) -> Any:
    """Returns the natural logarithm of a normal float32 above 0, with an error of 2e-5; vectorises like `exp32`."""
    bits = bits_of(np.float32(value))
    whole = np.float32(np.int32(bits >> np.uint32(23)) - np.int32(127))
    m = f32_of(np.uint32(np.uint32(bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)))  # from 1 to 2
    t = (m - _ONE) / (m + _ONE)
    s = t * t
    return whole * _LN2 + _TWO * t * (_ONE + s * (_THIRD + s * (_FIFTH + s * _SEVENTH)))


@jit
def softplus(x: float) -> float:
    """Returns log(1 + exp(x)) with an error of 3e-7: `log32`, bettered by one step of Halley's method."""
    if x > _LINEAR_FROM:
        return x
    u = _ONE + exp32(x)
    y = log32(u)
    v = exp32(y)
    return y + _TWO * (u - v) / (u + v)  # type: ignore[no-any-return]


@jit
def swiglu(gate: int, up: int, count: int, scale: float) -> None:
    """Computes gate = scale * silu(gate) * up in place, for `count` float32."""
    g, u = f32_at(gate), f32_at(up)
    for k in range(count):
        g[k] = np.float32(scale) * u[k] * g[k] / (_ONE + exp32(-g[k]))


@jit
def gelu_tanh(gate: int, up: int, count: int, scale: float) -> None:
    """Computes gate = scale * gelu(gate) * up in place, gelu by its approximation with tanh."""
    g, u = f32_at(gate), f32_at(up)
    for k in range(count):
        twice = _GELU * g[k] * (_ONE + _CUBE * g[k] * g[k])
        g[k] = np.float32(scale) * u[k] * g[k] / (_ONE + exp32(-twice))


@jit
def clamped_swiglu(gate: int, up: int, count: int, scale: float, alpha: float, limit: float) -> None:
    """Computes gate = scale * gate * sigmoid(alpha * gate) * (up + 1) in place; both are cut off at `limit`."""
    g, u, most = f32_at(gate), f32_at(up), np.float32(limit)
    for k in range(count):
        cut, other = min(g[k], most), min(max(u[k], -most), most)
        g[k] = np.float32(scale) * (other + _ONE) * cut / (_ONE + exp32(-np.float32(alpha) * cut))


@jit
def relu2(up: int, count: int, scale: float) -> None:
    """Computes up = scale * relu(up)^2, for `count` float32."""
    u = f32_at(up)
    for k in range(count):
        open_part = max(u[k], _ZERO)
        u[k] = np.float32(scale) * open_part * open_part


@jit
def activate(kind: int, gate: int, up: int, count: int, scale: float, alpha: float, limit: float) -> None:
    """Computes gate = scale * activation(gate, up) in place; `kind` is the activation's place in ACTIVATIONS.

    An activation without a gate reads and writes the up vector at `gate`, and does not read `up`.
    """
    if kind == 0:
        swiglu(gate, up, count, scale)
    elif kind == 1:
        gelu_tanh(gate, up, count, scale)
    elif kind == 2:
        clamped_swiglu(gate, up, count, scale, alpha, limit)
    else:
        relu2(gate, count, scale)


@jit
def add_bias(values: int, bias: int, count: int, scale: float) -> None:
    """Computes values += scale * bias, for `count` float32."""
    v, b = f32_at(values), f32_at(bias)
    for k in range(count):
        v[k] += np.float32(scale) * b[k]


@jit
def shift(values: int, by: float, count: int) -> None:
    """Computes values += by, for `count` float32."""
    v = f32_at(values)
    for k in range(count):
        v[k] += np.float32(by)


@jit
def widen(source: int, is_bf16: int, n: int, out: int) -> None:
    """Copies n numbers, bf16 or float32, as float32."""
    to = f32_at(out)
    if is_bf16:
        for k in range(n):
            to[k] = load_bf16(source, k)
    else:
        for k in range(n):
            to[k] = load_f32(source, k)


@summing
def total(values: int, count: int) -> Any:
    """Returns the sum of `count` float32."""
    v = f32_at(values)
    result = _ZERO
    for k in range(count):
        result += v[k]
    return result


@jit
def softmax(values: int, count: int) -> Any:
    """Replaces `count` float32 by exp(value - largest). Returns the largest, and the sum of the results."""
    v = f32_at(values)
    largest = v[0]
    for k in range(1, count):
        largest = max(largest, v[k])
    for k in range(count):
        v[k] = exp32(v[k] - largest)
    return largest, total(values, count)


@cache
def make_place(bf16: bool) -> Callable[[int, int], int]:
    """Makes place(k, n): the index of element k of a vector of n elements once it is packed."""
    block = block_elements(bf16)

    @jit
    def place(k: int, n: int) -> int:
        if not bf16 or k - k % block + block > n:
            return k
        return k - k % block + k % block // 2 + LANES * (k & 1)

    return place  # type: ignore[no-any-return]


@cache
def make_pack(bf16: bool) -> Callable[[int, int, int, int], None]:
    """Makes pack(source, from_bf16, n, out), which packs a vector of n elements as `gemv` reads it."""
    place = make_place(bf16)

    @jit
    def pack(source: int, from_bf16: int, n: int, out: int) -> None:
        to = f32_at(out)
        if from_bf16:
            for k in range(n):
                to[place(k, n)] = load_bf16(source, k)
        else:
            for k in range(n):
                to[place(k, n)] = load_f32(source, k)

    return pack  # type: ignore[no-any-return]


@cache
def make_pack_all(bf16: bool) -> Code:
    """Makes pack_all(source, from_bf16, count, n, out, scale), which packs `count` vectors, times `scale`."""
    pack = make_pack(bf16)

    @code(INT, INT, INT, INT, INT, types.float32)
    def pack_all(source: int, from_bf16: int, count: int, n: int, out: int, scale: float) -> None:
        for i in range(count):
            pack(source + i * n * (2 if from_bf16 else 4), from_bf16, n, out + i * n * 4)
        to = f32_at(out)
        for k in range(count * n):
            to[k] *= scale

    return pack_all


@code(*[INT] * 7)
def pack_for(source: int, from_bf16: int, count: int, n: int, out: int, plain: int, pack: int) -> None:
    """Packs `count` vectors by the code at address `pack`, by way of `plain` [n]."""
    for i in range(count):
        widen(source + i * n * (2 if from_bf16 else 4), from_bf16, n, plain)
        call_pack(pack, plain, 0, n, n, out + i * n * 4)


@summing
def norm_scale(x: int, n: int, eps: float) -> Any:
    """Returns 1 / sqrt(mean square + eps) of a float32 vector of n elements."""
    values = f32_at(x)
    total = _ZERO
    for k in range(n):
        total += values[k] * values[k]
    return _ONE / np.sqrt(np.float32(total / np.float32(n) + np.float32(eps)))


@cache
def make_pack_some(bf16: bool) -> Code:
    """Makes pack(values, first, count, n, out), which packs elements first:first + count of a vector of n elements.

    `values` are these elements, float32; `first` and `count` are multiples of 32, unless they are all that is left.
    """
    place = make_place(bf16)

    @code(*[INT] * 5)
    def pack_some(values: int, first: int, count: int, n: int, out: int) -> None:
        v, to = f32_at(values), f32_at(out)
        for k in range(count):
            to[place(first + k, n)] = v[k]

    return pack_some


@jit
def pack_vector(packs: int, count: int, values: int, n: int, token: int) -> None:
    """Packs `values` [n] of one token in each of `count` ways."""
    for k in range(count):
        each = record(packs + k * _PACK_BYTES, PACK)
        call_pack(each.pack, values, 0, n, n, each.out + token * n * 4)


@jit
def add_vector(values: int, other: int, n: int) -> None:
    """Computes values [n] += other [n]."""
    v, o = f32_at(values), f32_at(other)
    for k in range(n):
        v[k] += o[k]


@jit
def normalise(x: int, weight: int, n: int, eps: float, centred: int, out: int) -> None:
    """Computes out = RMSNorm(x), or LayerNorm where `centred`; `weight` [n] or 0."""
    v, w, to = f32_at(x), f32_at(weight), f32_at(out)
    mean = np.float32(0)
    if centred:
        mean = np.float32(total(x, n) / np.float32(n))
        for k in range(n):
            to[k] = v[k] - mean
        scale = norm_scale(out, n, eps)
        for k in range(n):
            to[k] = to[k] * scale * w[k]
        return
    scale = norm_scale(x, n, eps)
    if weight:
        for k in range(n):
            to[k] = v[k] * scale * w[k]
    else:
        for k in range(n):
            to[k] = v[k] * scale


@jit
def turn(vector: int, cos: int, sin: int, dims: int) -> None:
    """Rotates the first `dims` of `vector` in place by the angles whose `cos` and `sin` [dims / 2] are given."""
    v, c, s, half = f32_at(vector), f32_at(cos), f32_at(sin), dims // 2
    for k in range(half):
        low, high = v[k], v[k + half]
        v[k], v[k + half] = low * c[k] - high * s[k], high * c[k] + low * s[k]
