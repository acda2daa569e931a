"""Reads and writes keys and values in int8: lines of codes, each with a float32 scale.

The lines [16, head_dim] of a head in a block lie together, as lines of other types do. Their scales [16] lie behind
them. The scale of a line is a 127th of its largest number. Codes are multiplied without it, and scores with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import PAIRS, bits_of, f32_at, i8_at, jit, rounded, u8_at, u32_at

MOST = np.float32(127)
_ROUNDER = np.float32(1.5 * 2**23)  # in a sum with it, the last bits of a small number are its nearest whole number


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
