"""Reads and writes keys and values in int8: lines of codes, each with a float32 scale.

The lines [16, head_dim] of a head in a block lie together, as lines of other types do. Their scales [16] lie behind
them. The scale of a line is a 127th of its largest number. Codes are multiplied without it, and scores with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from edgemoe.jit.intrinsics import bits_of, f32_at, i8_at, jit, rounded, u8_at, u32_at
from edgemoe.jit.object_cache import Code
from edgemoe.kernels.cpu.gemm_tile import PAIRS
from edgemoe.kernels.cpu.gemv import LANES, WIDEST, Emitter, make_dots, rows_code

MOST = np.float32(127)
_ROUNDER = np.float32(1.5 * 2**23)  # in a sum with it, the last bits of a small number are its nearest whole number


class _CodeEmitter(Emitter):
    """Writes the loop over one line of codes, in the order in which vectors for the model's type are packed."""

    @property
    def turn_bytes(self) -> int:
        return 2 * LANES if self.bf16 else LANES

    def weights(self, w: Any, offset: Any) -> list[Any]:
        kind = ir.VectorType(ir.IntType(16 if self.bf16 else 8), LANES)
        codes = self.b.sext(self.load(w, offset, kind, align=1), self.integers)
        if not self.bf16:
            return [self.b.sitofp(codes, self.vector)]
        up, down = (ir.Constant(self.integers, [bits] * LANES) for bits in (24, 8))
        even = self.b.ashr(self.b.shl(codes, up), up)
        return [self.b.sitofp(half, self.vector) for half in (even, self.b.ashr(codes, down))]


@cache
def make_code_rows(bf16: bool) -> Code:
    """Makes the same as `gemv.make_rows`, for lines of codes without their scales."""
    return rows_code("code_rows", lambda _, tokens: make_dots(_CodeEmitter, tokens, bf16, load_code), WIDEST)


@jit
def load_code(address: int, index: int) -> float:
    """Returns code `index` of the line at `address`, as float32."""
    return np.float32(i8_at(address)[index])  # type: ignore[return-value]


@jit
def store_codes(values: int, n: int, codes: int, scale: int) -> None:
    """Writes a line of n float32 as codes, rounded to nearest, and its scale."""
    v, to, largest = f32_at(values), u8_at(codes), np.float32(0)
    for k in range(n):
        largest = max(largest, abs(v[k]))
    f32_at(scale)[0] = largest / MOST
    factor = MOST / largest if largest > 0 else np.float32(0)
    for k in range(n):
        to[k] = np.uint8(bits_of(np.float32(v[k] * factor + _ROUNDER)) & np.uint32(255))


@jit
def multiply_each(values: int, factors: int, count: int) -> None:
    """Computes values *= factors, for `count` float32."""
    v, f = f32_at(values), f32_at(factors)
    for k in range(count):
        v[k] *= f[k]


@cache
def make_decode_lines(bf16: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """Makes the functions that decode a line into a panel, in the model's type, as `prefill_attention` reads it.

    * column(panel, stride, number, codes, scale, n) writes a line as column `number`
    * line(panel, stride, number, codes, scale, n) writes a line as line `number`, which must be zero

    They match the functions for plain lines.
    """
    paired = bf16 and PAIRS

    @jit
    def column(panel: int, stride: int, number: int, codes: int, scale: int, n: int) -> None:
        c, by, to = i8_at(codes), f32_at(scale)[0], panel + 4 * number
        if paired:
            for word in range(n // 2):
                low, high = rounded(np.float32(c[2 * word]) * by), rounded(np.float32(c[2 * word + 1]) * by)
                u32_at(to + word * stride)[0] = (low >> np.uint32(16)) | high
        else:
            for k in range(n):
                f32_at(to + k * stride)[0] = np.float32(c[k]) * by

    @jit
    def line(panel: int, stride: int, number: int, codes: int, scale: int, n: int) -> None:
        c, by = i8_at(codes), f32_at(scale)[0]
        if paired:  # the even lines in the lower halves, the odd ones in the upper
            to, shift = u32_at(panel + number // 2 * stride), np.uint32(16 * (1 - number % 2))
            for k in range(n):
                to[k] |= rounded(np.float32(c[k]) * by) >> shift
        else:
            values = f32_at(panel + number * stride)
            for k in range(n):
                values[k] = np.float32(c[k]) * by

    return column, line
