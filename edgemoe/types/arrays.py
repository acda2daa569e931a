"""Array and record types."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


def fields(*names: str) -> np.dtype[np.void]:
    """Returns a record type with these fields, each an int64."""
    return np.dtype([(name, np.int64) for name in names])


def place_of(dtype: np.dtype[np.void], field: str) -> int:
    """Returns the field's index in an int64 view of the record."""
    assert dtype.fields is not None
    return int(dtype.fields[field][1]) // 8
