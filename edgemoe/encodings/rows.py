"""Lays codes and scales out as rows, in the order in which kernels read them, and takes them apart again.

docs/design/kernels.md describes the layout.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from edgemoe.types.encoding import FP8, LANE_COLUMNS, Encoding

LANES = 16
RUN = LANES * LANE_COLUMNS  # columns
# The values of mxfp4 codes.
E2M1: npt.NDArray[np.float32] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
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
    """Returns rows, uint8 [R, row_bytes], of `codes` [R, C], a byte each, and the bytes of the scales [R, bytes].

    Codes are int8's two's complement, int4's number + 8, mxfp4's E2M1 and fp8's E4M3.
    """
    columns = codes.shape[1]
    assert encoding.fits(columns)
    assert scales.shape[1] == encoding.scales(columns) * encoding.scale_bytes
    if encoding.bits == 4:
        eights = codes[:, order(columns, 8)].reshape(len(codes), -1, 2, 4)
        codes = (eights[:, :, 0] | (eights[:, :, 1] << np.uint8(4))).reshape(len(codes), -1).astype(np.uint8)
    else:
        codes = codes[:, order(columns, _together(encoding))]
    return np.ascontiguousarray(np.concatenate([codes, scales], axis=1))


def split(rows: Bytes, encoding: Encoding, columns: int) -> tuple[Bytes, Bytes]:
    """Splits rows made by `join` into codes [R, columns], a byte each, and the bytes of the scales."""
    laid = rows[:, : encoding.code_bytes(columns)]
    scales = rows[:, encoding.code_bytes(columns) : encoding.row_bytes(columns)]
    codes = np.empty((len(rows), columns), np.uint8)
    if encoding.bits == 4:
        fours = laid.reshape(len(rows), -1, 1, 4)
        halves = np.concatenate([fours & 15, fours >> 4], axis=2)
        codes[:, order(columns, 8)] = halves.reshape(len(rows), -1)
    else:
        codes[:, order(columns, _together(encoding))] = laid
    return codes, scales


def _together(encoding: Encoding) -> int:
    return 1 if encoding is FP8 else 4
