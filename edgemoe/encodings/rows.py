"""Lays codes and scales out as rows, in the order in which kernels read them, and takes them apart again.

docs/design/kernels.md describes the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from edgemoe.types.encoding import FP8, LANE_COLUMNS, Encoding

LANES = 16
RUN = LANES * LANE_COLUMNS  # columns
# The values of mxfp4 codes.
E2M1: npt.NDArray[np.float32] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# The values of codes with uneven levels, IQ4_NL's.
LEVELS: npt.NDArray[np.float32] = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
Bytes = npt.NDArray[np.uint8]


@cache
def order(columns: int, together: int) -> npt.NDArray[np.int64]:
    """Returns the column [columns] of each code of a row; of each lane `together` codes lie side by side."""
    runs = []
    for first in range(0, columns, RUN):
        lanes = min(LANES, (columns - first) // LANE_COLUMNS)
        grid = first + np.arange(lanes * LANE_COLUMNS).reshape(lanes, LANE_COLUMNS // together, together)
        runs.append(grid.transpose(1, 0, 2).ravel())
    return np.concatenate(runs)


def join(codes: Bytes, scales: Bytes, encoding: Encoding) -> Bytes:
    """Returns rows, uint8 [R, row_bytes], of `codes` [R, C], a byte each, and the bytes of the factors [R, bytes].

    Codes are int8's two's complement, int4's number + 8, mxfp4's E2M1 and fp8's E4M3; others are unsigned.
    """
    columns = codes.shape[1]
    assert encoding.fits(columns)
    assert scales.shape[1] == encoding.factor_bytes(columns)
    if encoding.bits == 4:
        eights = codes[:, order(columns, 8)].reshape(len(codes), -1, 2, 4)
        codes = (eights[:, :, 0] | (eights[:, :, 1] << np.uint8(4))).reshape(len(codes), -1).astype(np.uint8)
    elif encoding.bits == 8:
        signed = codes ^ np.uint8(128) if encoding.is_affine else codes
        codes = signed[:, order(columns, _together(encoding))]
    else:
        codes = np.concatenate([_join_planes(each, encoding.bits) for each in _runs(codes)], axis=1)
    padding = np.zeros((len(codes), encoding.row_bytes(columns) - codes.shape[1] - scales.shape[1]), np.uint8)
    return np.ascontiguousarray(np.concatenate([codes, scales, padding], axis=1))


def split(rows: Bytes, encoding: Encoding, columns: int) -> tuple[Bytes, Bytes]:
    """Splits rows made by `join` into codes [R, columns], a byte each, and the bytes of the factors."""
    laid = rows[:, : encoding.code_bytes(columns)]
    scales = rows[:, encoding.code_bytes(columns) :][:, : encoding.factor_bytes(columns)]
    codes = np.empty((len(rows), columns), np.uint8)
    if encoding.bits == 4:
        fours = laid.reshape(len(rows), -1, 1, 4)
        halves = np.concatenate([fours & 15, fours >> 4], axis=2)
        codes[:, order(columns, 8)] = halves.reshape(len(rows), -1)
    elif encoding.bits == 8:
        codes[:, order(columns, _together(encoding))] = laid ^ np.uint8(128) if encoding.is_affine else laid
    else:
        full = columns // RUN * RUN
        cut = full * encoding.bits // 8
        for first, after, some in ((0, full, laid[:, :cut]), (full, columns, laid[:, cut:])):
            if after > first:
                lanes = min(LANES, (after - first) // LANE_COLUMNS)
                codes[:, first:after] = _split_planes(some, encoding.bits, lanes)
    return codes, scales


def _runs(codes: Bytes) -> Iterator[Bytes]:
    """Yields the codes of the full runs, [R, F, lanes, 8, 4], and of the last one, if it has fewer lanes."""
    full = codes.shape[1] // RUN * RUN
    for some, lanes in ((codes[:, :full], LANES), (codes[:, full:], (codes.shape[1] - full) // LANE_COLUMNS)):
        if some.shape[1]:
            yield some.reshape(len(codes), -1, lanes, 8, 4)


def _join_planes(quads: Bytes, bits: int) -> Bytes:
    """Returns the bytes of runs of codes with 5 or 6 bits: words of halves of bytes, then of the bits above."""
    low, high = quads & 15, quads >> np.uint8(4)
    words = [low[:, :, :, 0::2] | (low[:, :, :, 1::2] << np.uint8(4))]
    each = 8 // (bits - 4)  # quads in a word of the bits above
    for first in range(0, 8, each):
        moved = np.arange(0, 8, bits - 4, dtype=np.uint8)[:, None]
        words.append(np.bitwise_or.reduce(high[:, :, :, first : first + each] << moved, axis=3, keepdims=True))
    together = np.concatenate(words, axis=3).swapaxes(2, 3)  # [R, F, words, lanes, 4]
    return together.reshape(len(quads), -1)


def _split_planes(laid: Bytes, bits: int, lanes: int) -> Bytes:
    words = laid.reshape(len(laid), -1, bits, lanes, 4).swapaxes(2, 3)
    codes = np.empty((*words.shape[:3], 8, 4), np.uint8)
    codes[:, :, :, 0::2], codes[:, :, :, 1::2] = words[:, :, :, :4] & 15, words[:, :, :, :4] >> 4
    each, most = 8 // (bits - 4), np.uint8((1 << bits - 4) - 1)
    for quad in range(8):
        above = words[:, :, :, 4 + quad // each] >> np.uint8((bits - 4) * (quad % each))
        codes[:, :, :, quad] |= (above & most) << np.uint8(4)
    return codes.reshape(len(laid), -1)


def _together(encoding: Encoding) -> int:
    return 1 if encoding is FP8 else 4
