"""The reader of a table of which a step needs single rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import IntArray


class RowSource(Protocol):
    """A table of rows; used by one thread, the one that computes."""

    row_bytes: int

    def begin_reads(self, numbers: IntArray) -> None:
        """Begins to read rows that will be taken soon."""

    def take_rows(self, numbers: IntArray) -> npt.NDArray[np.uint8]:
        """Returns these rows, [n, row_bytes]; waits for the ones that are not in memory. Raises StoreError."""
