"""Reads weights in each encoding on a GPU, for multiplication in Triton kernels (see `encodings.rows`).

A block of a row's codes is decoded in registers, with the scales of its lanes, and multiplied with the activations of
its columns. Unencoded weights are read without change. Parameters of Triton functions have no annotations, because
Triton would evaluate them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from edgemoe.kernels.gpu.affine_weights import affine_kind, affine_value, code_words, lane_factors, words_above
from edgemoe.types.encoding import ENCODINGS

jit: Callable[[Any], Any] = triton.jit

KINDS = {"int8": 0, "int4": 1, "mxfp4": 2, "fp8": 3, "float32": 4, "bfloat16": 5}
KINDS |= {name: affine_kind(encoding) for name, encoding in ENCODINGS.items() if encoding.is_affine}


@jit
def lane_of(at, lanes: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lane, and the column in it, of the codes that begin at bytes `at` of a run of `lanes` lanes."""
    if KIND == 3:
        return at % lanes, at // lanes
    if KIND == 0 or (KIND < 0 and (-1 - KIND) % 4 == 3):
        return at % (4 * lanes) // 4, at // (4 * lanes) * 4 + at % 4
    return at % (4 * lanes) // 4, at // (4 * lanes) * 8 + at % 4


@jit
def places(at, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lane among all of a row, and the column, of the codes that begin at bytes `at` of a row.

    Of weights that are not encoded, `at` counts numbers.
    """
    if KIND >= 4:
        return at, at
    size: tl.constexpr = 512 if KIND == 0 or KIND == 3 or (KIND < 0 and (-1 - KIND) % 4 == 3) else 256
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 32
    run = at // size
    lane, column = lane_of(at % size, 16, KIND)
    if rest > 0:
        last_lane, last_column = lane_of(at % size, rest, KIND)
        lane, column = tl.where(run < full, lane, last_lane), tl.where(run < full, column, last_column)
    return run * 16 + lane, run * 512 + lane * 32 + column


@jit
def scales_at(rows, lane, wanted, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales of lanes [i, 1] of rows [1, c], float32."""
    codes: tl.constexpr = n if KIND == 0 or KIND == 3 else n // 2
    if KIND == 3:
        return tl.load((rows + codes + lane // 4 * 4).to(tl.pointer_type(tl.float32)), mask=wanted, other=0.0)
    if KIND == 2:
        bits = tl.load(rows + codes + lane, mask=wanted, other=0).to(tl.int32) << 23
        return tl.maximum(bits, 1 << 22).to(tl.float32, bitcast=True)
    bits = tl.load((rows + codes + lane * 2).to(tl.pointer_type(tl.uint16)), mask=wanted, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)


@jit
def decoded(code, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the values of codes, float32, without their scale."""
    if KIND == 0:
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    if KIND == 1:
        return code.to(tl.float32) - 8.0
    if KIND == 2:
        size = (code & 7).to(tl.int32)
        whole = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16)).to(tl.float32)
        return tl.where(code >= 8, -0.5 * whole, 0.5 * whole)
    wide = code.to(tl.int16)
    bits = ((wide & 128) << 8) | ((wide & 127) << 7)  # an exponent of 4 bits is 8 less than that of a half
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def affine_dots(rows, at, wanted, low, high, total, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the same as `dots`, for affine rows, whose bytes `at` of low bits are counted without the others."""
    bits: tl.constexpr = 4 + (-1 - KIND) % 4
    split: tl.constexpr = (-1 - KIND) // 64 % 4 == 2
    lane, column = places(at, n, KIND)
    half = column % 32 // 16 if split else column * 0
    scale, minimum = lane_factors(rows[None, :], lane[:, None], half[:, None], wanted, n, KIND)
    code = tl.load(rows[None, :] + (code_words(at // 4, KIND) * 4 + at % 4)[:, None], mask=wanted, other=0).to(tl.int32)
    if bits == 7:
        weights = ((code ^ 0x80).to(tl.float32) * scale + minimum).to(low.dtype)
        return tl.dot(low, weights, total, input_precision="ieee")
    first = code & 15
    second = code >> 4
    if bits > 4:
        above_at = words_above(at // 4, n, KIND) * 4 + at % 4
        above = tl.load(rows[None, :] + above_at[:, None], mask=wanted, other=0).to(tl.int32)
        quad = column % 32 // 4
        shift = (quad if bits == 5 else quad % 4 * 2)[:, None]
        first |= ((above >> shift) & (2 * bits - 9)) << 4
        second |= ((above >> (shift + (bits - 4))) & (2 * bits - 9)) << 4
    total = tl.dot(low, (affine_value(first, KIND) * scale + minimum).to(low.dtype), total, input_precision="ieee")
    return tl.dot(high, (affine_value(second, KIND) * scale + minimum).to(low.dtype), total, input_precision="ieee")


@jit
def dots(rows, at, wanted, low, high, total, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns total [r, c] + the products of activations with the weights in bytes `at` [i] of `rows` [c].

    `low` and `high` are the activations [r, i] of the bytes' low and high halves, or of whole bytes.
    Of weights that are not encoded, `at` counts numbers.
    """
    if KIND >= 4:
        item: tl.constexpr = tl.float32 if KIND == 4 else tl.bfloat16
        numbers = rows.to(tl.pointer_type(item))[None, :] + at[:, None]
        weights = tl.load(numbers, mask=wanted, other=0.0).to(low.dtype)
        return tl.dot(low, weights, total, input_precision="ieee")
    if KIND < 0:
        return affine_dots(rows, at, wanted, low, high, total, n, KIND)
    lane, _ = places(at, n, KIND)
    scale = scales_at(rows[None, :], lane[:, None], wanted, n, KIND)
    code = tl.load(rows[None, :] + at[:, None], mask=wanted, other=0)
    if KIND == 0 or KIND == 3:
        return tl.dot(low, (decoded(code, KIND) * scale).to(low.dtype), total, input_precision="ieee")
    first = (decoded(code & 15, KIND) * scale).to(low.dtype)
    second = (decoded(code >> 4, KIND) * scale).to(low.dtype)
    total = tl.dot(low, first, total, input_precision="ieee")
    return tl.dot(high, second, total, input_precision="ieee")
