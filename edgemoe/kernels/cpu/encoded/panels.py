"""Fills panels for tiles of encoded rows: elements come in the order in which `unpacking` decodes rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from edgemoe.encodings.rows import LANES, RUN
from edgemoe.jit.intrinsics import atomic_replace, atomic_store, f32_at, jit, rounded, u16_at
from edgemoe.kernels.cpu.encoded.packing import lanes_of
from edgemoe.kernels.cpu.gemm_tile import PAIRS
from edgemoe.types.encoding import LANE_COLUMNS


@jit
def place(k: int, n: int) -> int:
    """Returns where element k of n lies, as `packing` packs floats and `unpacking` writes weights."""
    lane = k // LANE_COLUMNS
    run = lane // LANES
    return run * RUN + k % LANE_COLUMNS * lanes_of(run, n) + lane % LANES  # type: ignore[no-any-return]


@cache
def make_scatter(bf16: bool, pairs: bool = PAIRS) -> tuple[Callable[..., None], Callable[..., None]]:
    """Makes the functions that put encoded vectors into a panel whose lines are `stride` bytes apart. Returns both.

    column(panel, stride, number, values, n) writes n float32 as column `number`; line(panel, stride, k, n, values,
    count) writes element k of n of `count` columns.
    """
    paired = bf16 and pairs

    @jit
    def line(panel: int, stride: int, k: int, n: int, values: int, count: int) -> None:
        v, at = f32_at(values), place(k, n)
        if paired:
            narrow = u16_at(panel + (at >> 1) * stride + 2 * (at & 1))
            for i in range(count):
                narrow[2 * i] = np.uint16(rounded(v[i]) >> np.uint32(16))
        else:
            wide = f32_at(panel + at * stride)
            for i in range(count):
                wide[i] = v[i]

    @jit
    def column(panel: int, stride: int, number: int, values: int, n: int) -> None:
        for k in range(n):
            line(panel + 4 * number, stride, k, n, values + 4 * k, 1)

    return column, line


@jit
def borrow(flags: int, count: int) -> int:
    """Takes one of `count` things, of which fewer are in use, and returns its number; `flags` [count] are int64."""
    while True:
        for number in range(count):
            if atomic_replace(flags + 8 * number, 0, 1):
                return number


@jit
def give_back(flags: int, number: int) -> None:
    """Gives back what `borrow` returned."""
    atomic_store(flags + 8 * number, 0)
