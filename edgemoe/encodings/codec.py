"""Encodes float32 matrices and decodes them, in NumPy.

The scales of int4 are searched: several factors of a group's largest weight are tried. The one with the smallest square
error is taken, each with the best scale for its codes [GGML, make_qx_quants].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.affine import decode_affine, encode_affine, join_factors, split_factors
from edgemoe.encodings.bfloat import from_bf16, to_bf16
from edgemoe.encodings.rows import E2M1, join, split
from edgemoe.types.encoding import ENCODINGS, Encoding

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Encoded = tuple[Bytes, Bytes]  # codes [R, C], a byte each, and the bytes of the scales

FACTORS = np.linspace(0.8, 1.2, 17, dtype=np.float32)  # of the scale that maps a group's largest weight to -8
BLOCK_WEIGHTS = 1 << 19  # encoded at a time: less, and threads that encode wait for each other
TINY = np.float32(2.0**-126)


def pack(weights: Floats, encoding: Encoding) -> Bytes:
    """Returns rows, uint8 [R, row_bytes], of finite weights, float32 [R, C]."""
    columns = weights.shape[1]
    if encoding.name == "float32":
        return np.ascontiguousarray(weights).view(np.uint8)
    if encoding.name == "bfloat16":
        return to_bf16(np.ascontiguousarray(weights)).view(np.uint8)
    rows, step = np.empty((len(weights), encoding.row_bytes(columns)), np.uint8), max(1, BLOCK_WEIGHTS // columns)
    for first in range(0, len(weights), step):
        block = np.ascontiguousarray(weights[first : first + step], np.float32)
        if encoding.is_affine:
            affine_codes, factors = encode_affine(block, encoding)
            rows[first : first + step] = join(affine_codes, join_factors(factors, encoding), encoding)
            continue
        rows[first : first + step] = join(*_ENCODE[encoding.name](block), encoding)
    return rows


def unpack(rows: Bytes, encoding: Encoding, columns: int) -> Floats:
    """Returns the weights, float32 [R, columns], of rows, uint8 [R, row_bytes]."""
    rows = np.ascontiguousarray(rows[:, : encoding.row_bytes(columns)])
    if encoding.name == "float32":
        return rows.view(np.float32)
    if encoding.name == "bfloat16":
        return from_bf16(rows.view(np.uint16))
    codes, scales = split(rows, encoding, columns)
    if encoding.is_affine:
        return decode_affine(codes, split_factors(scales, encoding, columns), encoding)
    values, factors = _DECODE[encoding.name](codes, np.ascontiguousarray(scales))
    with np.errstate(over="ignore", invalid="ignore"):
        product: Floats = values * np.repeat(factors, encoding.group, axis=1)[:, :columns]
    return product


def place(codes: Bytes, scales: Floats, encoding: Encoding) -> Bytes:
    """Returns rows of codes [R, C], see `join`, and their scales [R, n], rounded where they must be."""
    return join(codes, scale_bytes(scales, encoding), encoding)


def scale_bytes(scales: Floats, encoding: Encoding) -> Bytes:
    """Returns scales, float32 [R, n], as they lie in rows, uint8 [R, bytes]: exact where `encoding` can hold them."""
    if encoding.name == "mxfp4":
        return (np.ascontiguousarray(scales).view(np.uint32) >> np.uint32(23)).astype(np.uint8)
    rows = np.ascontiguousarray(scales) if encoding.name == "fp8" else to_bf16(np.ascontiguousarray(scales))
    return rows.view(np.uint8)


def _grouped(weights: Floats) -> Floats:
    return weights.reshape(len(weights), -1, 32)


def _nearest(weights: Floats, scales: Floats, low: int, high: int) -> Floats:
    """Returns the whole numbers [R, n, 32] that times the scales [R, n] come nearest; 0 where a scale is 0."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    return np.clip(np.rint(weights * inverse[:, :, None]), low, high)


def _encode_int8(weights: Floats) -> Encoded:
    groups = _grouped(weights)
    wanted = np.abs(groups).max(2) / np.float32(127)
    bits = (wanted.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)  # rounded up, so that nothing is cut off
    codes = _nearest(groups, from_bf16(bits.astype(np.uint16)), -127, 127)
    return codes.astype(np.int8).view(np.uint8).reshape(weights.shape), bits.astype(np.uint16).view(np.uint8)


def _encode_int4(weights: Floats) -> Encoded:
    groups = _grouped(weights)
    place = np.abs(groups).argmax(2)[:, :, None]
    largest = np.take_along_axis(groups, place, 2)[:, :, 0] / np.float32(-8)
    best, scales = np.full(largest.shape, -1, np.float32), np.zeros_like(largest)
    for factor in FACTORS:
        codes = _nearest(groups, largest * factor, -8, 7)
        both, square = np.einsum("rgk,rgk->rg", codes, groups), np.einsum("rgk,rgk->rg", codes, codes)
        scale = np.divide(both, square, out=np.zeros_like(both), where=square > 0)
        better = both * scale > best
        best, scales = np.where(better, both * scale, best), np.where(better, scale, scales)
    bits = to_bf16(scales)
    codes = _nearest(groups, from_bf16(bits), -8, 7)
    return (codes + np.float32(8)).astype(np.uint8).reshape(weights.shape), bits.view(np.uint8)


def _encode_mxfp4(weights: Floats) -> Encoded:
    groups = _grouped(weights)
    largest = np.maximum(np.abs(groups).max(2), TINY)
    exponents = np.clip(np.frexp(largest)[1] - 3, -126, 127)  # a group's largest weight is from 4 on and under 8
    scaled = np.ldexp(groups, -exponents[:, :, None]).reshape(weights.shape)
    return _nearest_code(scaled.astype(np.float32), E2M1[:8], 8), (exponents + 127).astype(np.uint8)


def _encode_fp8(weights: Floats) -> Encoded:
    starts = np.arange(0, weights.shape[1], 128)
    largest: Floats = np.maximum.reduceat(np.abs(weights), starts, axis=1)
    scales = largest / np.float32(448)
    scales[scales < TINY] = 1
    factors = np.repeat(scales, 128, axis=1)[:, : weights.shape[1]]
    scaled: Floats = np.divide(weights, factors, dtype=np.float32)
    return _nearest_code(scaled, E4M3[:127], 128), scales.view(np.uint8)


def _nearest_code(values: Floats, table: Floats, sign: int) -> Bytes:
    """Returns the code with the nearest value, the even one of two. `table` has the positive codes' values, rising."""
    middles = (table[1:] + table[:-1]) / 2
    size = np.abs(values)
    code = np.searchsorted(middles, size, side="left")
    tied = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == size) & (code % 2 == 1)
    codes: Bytes = ((code + tied) | np.where(np.signbit(values), sign, 0)).astype(np.uint8)
    return codes


def _e4m3() -> Floats:
    """Returns the values of the 256 codes of E4M3; two of them are no numbers."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


E4M3 = _e4m3()


def _decode_int8(codes: Bytes, scales: Bytes) -> tuple[Floats, Floats]:
    return codes.view(np.int8).astype(np.float32), from_bf16(scales.view(np.uint16))


def _decode_int4(codes: Bytes, scales: Bytes) -> tuple[Floats, Floats]:
    return codes.astype(np.float32) - np.float32(8), from_bf16(scales.view(np.uint16))


def _decode_mxfp4(codes: Bytes, scales: Bytes) -> tuple[Floats, Floats]:
    bits = np.maximum(scales.astype(np.uint32) << np.uint32(23), np.uint32(1 << 22))  # the lowest is subnormal
    return E2M1[codes], bits.view(np.float32)


def _decode_fp8(codes: Bytes, scales: Bytes) -> tuple[Floats, Floats]:
    return E4M3[codes], scales.view(np.float32)


_ENCODE: dict[str, Callable[[Floats], Encoded]] = {
    "int8": _encode_int8,
    "int4": _encode_int4,
    "mxfp4": _encode_mxfp4,
    "fp8": _encode_fp8,
}
_DECODE: dict[str, Callable[[Bytes, Bytes], tuple[Floats, Floats]]] = {
    "int8": _decode_int8,
    "int4": _decode_int4,
    "mxfp4": _decode_mxfp4,
    "fp8": _decode_fp8,
}
assert {*_ENCODE, "float32", "bfloat16"} == {each.name for each in ENCODINGS.values() if not each.is_affine}
