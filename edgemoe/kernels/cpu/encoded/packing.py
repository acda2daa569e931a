"""Packs activations in the order in which rows of encoded weights are read.

Whole numbers have 16 bits, in two parts of 8 for instructions that multiply bytes: BASE times the upper part, plus the
lower one. Neither part is -128, which has no opposite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from edgemoe.encodings.rows import LANES, RUN
from edgemoe.jit.intrinsics import INT, bits_of, code, f32_at, i32_at, jit, u32_at
from edgemoe.jit.object_cache import Code
from edgemoe.types.encoding import LANE_COLUMNS

BASE = 255
MOST = np.float32(127 * BASE + 127)
_NONE, _LEAST = np.float32(0), np.float32(1e-30)
_ROUND = np.float32(1.5 * 2**23)  # added to a number of less than 22 bits it leaves a whole one in the lowest bits
_ROUND_BITS = np.int32(0x4B400000)


@jit
def lanes_of(run: int, n: int) -> int:
    """Returns the lanes of a run of a row of n columns."""
    return min(LANES, n // LANE_COLUMNS - run * LANES)


@code(*[INT] * 5)
def pack_floats(values: int, first: int, count: int, n: int, out: int) -> None:
    """Packs elements first:first + count of a vector of n float32, which are at `values`; both are multiples of 32."""
    v, to = f32_at(values), f32_at(out)
    for at in range(0, count, LANE_COLUMNS):
        lane = (first + at) // LANE_COLUMNS
        run = lane // LANES
        lanes, start = lanes_of(run, n), run * RUN + lane % LANES
        for k in range(LANE_COLUMNS):
            to[start + k * lanes] = v[at + k]


@jit
def _whole(value: float) -> Any:
    """Returns the whole number that is nearest, the even one of two, as int32."""
    return np.int32(bits_of(np.float32(value + _ROUND))) - _ROUND_BITS


@jit
def quantise(values: int, upper: int, lower: int, step: int) -> Any:
    """Writes 32 float32 as whole numbers: of each part four side by side, and then `step` bytes on.

    Returns their scale and the sum of the numbers.
    """
    v = f32_at(values)
    largest = _NONE
    for k in range(LANE_COLUMNS):
        largest = max(largest, abs(v[k]))
    inverse = MOST / largest if largest > _LEAST else _NONE
    total = np.int32(0)
    for four in range(LANE_COLUMNS // 4):
        high, low = np.uint32(0), np.uint32(0)
        for k in range(4):
            number = _whole(v[4 * four + k] * inverse)
            part = _whole(np.float32(number) * np.float32(1 / BASE))
            total += number
            high |= np.uint32(part & np.int32(255)) << np.uint32(8 * k)
            low |= np.uint32((number - part * np.int32(BASE)) & np.int32(255)) << np.uint32(8 * k)
        u32_at(upper + four * step)[0], u32_at(lower + four * step)[0] = high, low
    return largest / MOST, total


@cache
def make_pack_whole(excess: int) -> Code:
    """Makes what does what `pack_floats` does, with whole numbers.

    It writes their upper parts [n], their lower parts [n], the lanes' scales, float32, and their sums times -`excess`,
    int32.
    """

    @code(*[INT] * 5)
    def pack_whole(values: int, first: int, count: int, n: int, out: int) -> None:
        scales, sums = f32_at(out + 2 * n), i32_at(out + 2 * n + n // LANE_COLUMNS * 4)
        for at in range(0, count, LANE_COLUMNS):
            lane = (first + at) // LANE_COLUMNS
            run = lane // LANES
            upper = out + run * RUN + lane % LANES * 4
            scales[lane], total = quantise(values + 4 * at, upper, upper + n, lanes_of(run, n) * 4)
            sums[lane] = np.int32(-excess) * total

    return pack_whole
