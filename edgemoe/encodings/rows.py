"""Lays codes and scales out as rows, in the order in which kernels read them, and takes them apart again.

A row is cut into runs of LANES * LANE_COLUMNS columns; the last one may have fewer lanes. Lane j of a run holds
LANE_COLUMNS columns one after the other, which share a scale. A run's codes begin with the first code of every lane, so
that a vector of codes meets a vector of scales and no lane has to be spread or turned:

* int8: for each four columns of a lane, 4 bytes of every lane, as dot products of bytes want them;
* int4, mxfp4: for each eight columns of a lane, 4 bytes of every lane: the first four columns in their low halves, the
  other four in their high halves;
* fp8: for each column of a lane, 1 byte of every lane.

The scales follow in the order of the columns.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from edgemoe.types.encoding import FP8, LANE_COLUMNS, Encoding

LANES = 16
RUN = LANES * LANE_COLUMNS  # columns
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
    """Returns the codes [R, columns], a byte each, and the bytes of the scales of what `join` returned."""
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
