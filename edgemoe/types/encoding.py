"""Encodings of weights: how the numbers of a matrix lie in bytes."""

from __future__ import annotations

from dataclasses import dataclass

LANE_COLUMNS = 32  # columns in one run of a row, one for each lane of a vector


@dataclass(frozen=True, slots=True)
class Encoding:
    """States how a row of weights lies in memory: its codes, then its scales; rows lie one after the other."""

    name: str
    bits: int  # of one code
    group: int = 0  # weights that share one scale; 0: there are no scales
    scale_bytes: int = 0

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes of one row."""
        return self.code_bytes(columns) + self.scales(columns) * self.scale_bytes

    def code_bytes(self, columns: int) -> int:
        """Returns the bytes of one row's codes, which its scales follow."""
        return columns * self.bits // 8

    def scales(self, columns: int) -> int:
        """Returns the scales of one row; the last one may serve fewer weights than a group has."""
        return -(-columns // self.group) if self.group else 0

    def fits(self, columns: int) -> bool:
        """Returns whether rows of `columns` columns can be encoded."""
        return columns > 0 and (not self.group or columns % LANE_COLUMNS == 0)


FLOAT32 = Encoding("float32", 32)
BFLOAT16 = Encoding("bfloat16", 16)
INT8 = Encoding("int8", 8, 32, 2)  # whole numbers, times a bfloat16: -127 to 127, of other packers -128 too
INT4 = Encoding("int4", 4, 32, 2)  # whole numbers from -8 to 7, times a bfloat16
MXFP4 = Encoding("mxfp4", 4, 32, 1)  # E2M1, times a power of two (E8M0) [OCP-MX]
FP8 = Encoding("fp8", 8, 128, 4)  # E4M3, times a float32
ENCODINGS = {each.name: each for each in (FLOAT32, BFLOAT16, INT8, INT4, MXFP4, FP8)}
