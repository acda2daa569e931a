"""Packs activations in the order in which rows of encoded weights are read."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgemoe.encodings.rows import LANES, RUN
from edgemoe.kernels.cpu.intrinsics import INT, code, f32_at, i8_at, i32_at, jit
from edgemoe.types.encoding import LANE_COLUMNS

_MOST = np.float32(127)


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
def quantise(values: int, codes: int, step: int) -> Any:
    """Writes 32 float32 as int8, four side by side and then `step` bytes on. Returns their scale and their sum."""
    v, to = f32_at(values), i8_at(codes)
    largest = np.float32(0)
    for k in range(LANE_COLUMNS):
        largest = max(largest, abs(v[k]))
    inverse = _MOST / largest if largest > np.float32(1e-30) else np.float32(0)
    total = 0
    for four in range(LANE_COLUMNS // 4):
        for k in range(4):
            number = np.int32(np.rint(v[4 * four + k] * inverse))
            to[four * step + k] = np.int8(number)
            total += int(number)
    return largest / _MOST, total


@code(*[INT] * 5)
def pack_whole(values: int, first: int, count: int, n: int, out: int) -> None:
    """Does what `pack_floats` does, with int8: codes [n], then the lanes' scales, float32, and sums, int32."""
    scales, sums = f32_at(out + n), i32_at(out + n + n // LANE_COLUMNS * 4)
    for at in range(0, count, LANE_COLUMNS):
        lane = (first + at) // LANE_COLUMNS
        run = lane // LANES
        codes = out + run * RUN + lane % LANES * 4
        scales[lane], sums[lane] = quantise(values + 4 * at, codes, lanes_of(run, n) * 4)
