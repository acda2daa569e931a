"""Encodings of weights: how the numbers of a matrix lie in bytes.

An affine encoding holds unsigned codes, and for each group a scale; a weight is (code - middle) * scale
or code * scale + minimum. The minimum may be a multiple of the scale: minus a zero point. With `part`, scale and
minimum are products: of a number for each group and a whole number for each part of it, as in K-quants [GGML].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LANE_COLUMNS = 32  # columns in one run of a row, one for each lane of a vector
MIDDLE, MINIMUM, ZERO = "middle", "minimum", "zero"


class FactorArray(NamedTuple):
    """An array of a row's factors: one of `bytes` bytes for each `columns` columns."""

    name: str
    columns: int
    bytes: int

    def count(self, columns: int) -> int:
        """Returns the factors of a row; the last one may serve fewer columns."""
        return -(-columns // self.columns)


@dataclass(frozen=True, slots=True)
class Encoding:
    """States how a row of weights lies in memory: its codes, then its factors; rows lie one after the other."""

    name: str
    bits: int  # of one code
    group: int = 0  # weights that share one scale; 0: there are no scales
    scale_bytes: int = 0
    is_affine: bool = False  # scales and minima are float16
    offset: str = MIDDLE  # MINIMUM: groups have minima; ZERO: minima that are multiples of the scale
    part: int = 0  # weights that share whole numbers; 0: there are none
    levels: bool = False  # codes are looked up in `encodings.rows.LEVELS`

    @property
    def middle(self) -> int:
        """Returns the code that stands for zero where every group has the same one."""
        return 1 << self.bits - 1

    @property
    def halves(self) -> int:
        """Returns the parts of a lane whose factors differ."""
        return LANE_COLUMNS // self.part if self.part else 1

    @property
    def factors(self) -> tuple[FactorArray, ...]:
        """Returns the arrays that follow a row's codes, in their order."""
        if not self.group:
            return ()
        arrays = [FactorArray("scale", self.group, self.scale_bytes)]
        if self.offset != MIDDLE:
            arrays.append(FactorArray("minimum", self.group, self.scale_bytes))
        if self.part:
            names = ("scale", "minimum") if self.offset == MINIMUM else ("scale",)
            arrays += [
                FactorArray(f"{name}_part{half}", LANE_COLUMNS, 1) for name in names for half in range(self.halves)
            ]
        return tuple(arrays)

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes of one row: whole words of an affine one, which GPUs read."""
        size = self.code_bytes(columns) + self.factor_bytes(columns)
        return -(-size // 4) * 4 if self.is_affine else size

    def code_bytes(self, columns: int) -> int:
        """Returns the bytes of one row's codes, which its factors follow."""
        return columns * self.bits // 8

    def factor_bytes(self, columns: int) -> int:
        """Returns the bytes of one row's factors."""
        return sum(array.count(columns) * array.bytes for array in self.factors)

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


def _affine(name: str, bits: int, group: int, offset: str = MIDDLE, part: int = 0, levels: bool = False) -> Encoding:
    return Encoding(name, bits, group, 2, True, offset, part, levels)


Q4_K = _affine("q4_k", 4, 256, MINIMUM, 32)
Q5_K = _affine("q5_k", 5, 256, MINIMUM, 32)
Q6_K = _affine("q6_k", 6, 256, MIDDLE, 16)
Q8_0 = _affine("q8_0", 8, 32)
Q5_0 = _affine("q5_0", 5, 32)
Q5_1 = _affine("q5_1", 5, 32, MINIMUM)
Q4_0 = _affine("q4_0", 4, 32)
Q4_1 = _affine("q4_1", 4, 32, MINIMUM)
IQ4_NL = _affine("iq4_nl", 4, 32, levels=True)
A4_64, A6_64, A8_64 = (_affine(f"a{bits}_64", bits, 64, MINIMUM) for bits in (4, 6, 8))
Z4_32, Z4_128 = _affine("z4_32", 4, 32, ZERO), _affine("z4_128", 4, 128, ZERO)
Z8_32, Z8_128 = _affine("z8_32", 8, 32, ZERO), _affine("z8_128", 8, 128, ZERO)
GGUF_AFFINE = (Q4_K, Q5_K, Q6_K, Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, IQ4_NL)
AFFINE = (*GGUF_AFFINE, A4_64, A6_64, A8_64, Z4_32, Z4_128, Z8_32, Z8_128)


def zero_encoding(bits: int, group: int) -> Encoding | None:
    """Returns the smallest encoding that holds codes with zero points in groups of `group` columns, if there is one."""
    fitting = (Z4_128, Z4_32) if bits <= 4 else (Z8_128, Z8_32)
    return next((each for each in fitting if group % each.group == 0), None)


def minimum_encoding(bits: int, group: int) -> Encoding | None:
    """Returns the smallest encoding that holds codes with minima in groups of `group` columns, if there is one."""
    fitting = [each for each in (A4_64, Q4_1, Q5_1, A6_64, A8_64) if bits <= each.bits and group % each.group == 0]
    return min(fitting, key=lambda each: each.row_bytes(1024), default=None)


PAIR = "+"  # between the names of the encodings of gate and up, and of down, where they differ
ENCODINGS = {each.name: each for each in (FLOAT32, BFLOAT16, INT8, INT4, MXFP4, FP8, *AFFINE)}


def pair_of(name: str) -> tuple[Encoding, Encoding]:
    """Returns the encodings of gate and up, and of down, of a layer's experts in "q4_k" or "q4_k+q6_k"."""
    gate_up, _, down = name.partition(PAIR)
    return ENCODINGS[gate_up], ENCODINGS[down or gate_up]


def pair_name(gate_up: str, down: str) -> str:
    """Returns the name of two encodings."""
    return gate_up if gate_up == down else gate_up + PAIR + down
