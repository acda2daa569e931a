"""Writes the LLVM code that reads the factors and codes of affine rows, for each set of instructions.

A lane's factors are a scale and, beside it, nothing (the middle of the codes is known) or a minimum.
Lanes of two parts have two of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from edgemoe.encodings.rows import LANES, LEVELS
from edgemoe.kernels.cpu.encoded.instructions import (
    I8,
    I16,
    I32,
    I64,
    CodeVectors,
    has_signed_bytes,
)
from edgemoe.types.encoding import LANE_COLUMNS, MIDDLE, ZERO, Encoding, FactorArray

ABOVE = 128  # added to signed bytes where an instruction wants them unsigned


class LaneFactors(NamedTuple):
    """The factors of a vector of lanes, float32."""

    scale: Any
    minimum: Any = None


class AffineVectors:
    """Reads affine rows of n columns by the vectors of `CodeVectors`."""

    def __init__(self, vectors: CodeVectors, encoding: Encoding, n: Any) -> None:
        self.v, self.b, self.encoding = vectors, vectors.b, encoding
        self.is_signed = has_signed_bytes(encoding, vectors.instructions)
        place = self.b.udiv(self.b.mul(n, self._number(encoding.bits)), self._number(8))
        self._arrays: dict[str, tuple[FactorArray, Any]] = {}
        for array in encoding.factors:
            self._arrays[array.name] = array, place
            count = self.b.udiv(self.b.add(n, self._number(array.columns - 1)), self._number(array.columns))
            place = self.b.add(place, self.b.mul(count, self._number(array.bytes)))

    def _number(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def factors(self, row: Any, run: Any, first: int, left: Any) -> list[LaneFactors]:
        """Returns the factors of each part of the lanes from `first` of a run on; `left` lanes are there."""
        encoding = self.encoding
        scales = self._scaled("scale", row, run, first, left)
        if encoding.offset == MIDDLE:
            return list(map(LaneFactors, scales))
        minima = self._scaled("minimum", row, run, first, left)
        if encoding.offset == ZERO:
            minima = list(map(self.b.fmul, minima, scales))  # exact
        return list(map(LaneFactors, scales, minima))

    def _scaled(self, name: str, row: Any, run: Any, first: int, left: Any) -> list[Any]:
        """Returns scales or minima, which a whole number of each part multiplies."""
        number = self._floats(self._load(name, row, run, first, left))
        if not self.encoding.part:
            return [number]
        made = []
        for half in range(self.encoding.halves):
            part = self.b.sext(self._load(f"{name}_part{half}", row, run, first, left), self.v.words)
            made.append(self.b.fmul(number, self.b.sitofp(part, self.v.floats)))
        return made

    def _load(self, name: str, row: Any, run: Any, first: int, left: Any) -> Any:
        """Returns a factor for each lane, as it lies in memory."""
        array, place = self._arrays[name]
        each, kind = array.columns // LANE_COLUMNS, I16 if array.bytes == 2 else I8
        v, b = self.v, self.b
        few = max(1, v.lanes // each)
        index = b.add(b.mul(run, self._number(LANES // each)), self._number(first // each))
        address = b.add(b.add(row, place), b.mul(index, self._number(array.bytes)))
        if few == 1:
            one = b.load(b.inttoptr(address, kind.as_pointer()), align=1)
            lanes = ir.VectorType(kind, v.lanes)
            alone = b.insert_element(ir.Constant(lanes, ir.Undefined), one, ir.Constant(I32, 0))
            return b.shuffle_vector(alone, ir.Constant(lanes, ir.Undefined), ir.Constant(v.words, [0] * v.lanes))
        some = ir.VectorType(kind, few)
        if left is not None:
            left = b.udiv(b.add(left, self._number(each - 1)), self._number(each))
        found = v.load(address, some, None if left is None else v.first(left, few))
        if few == v.lanes:
            return found
        spread = ir.Constant(v.words, [lane // each for lane in range(v.lanes)])
        return b.shuffle_vector(found, ir.Constant(some, ir.Undefined), spread)

    def _floats(self, bits: Any) -> Any:
        """Returns 16-bit numbers as float32."""
        v, b = self.v, self.b
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), v.lanes)), v.floats)

    def quads(self, codes: Any, lanes: Any, mask: Any) -> Iterator[Any]:
        """Yields words of 4 bytes, which are 4 columns of each lane: codes, or signed bytes as `is_signed` says.

        The signed bytes are codes less 128, or levels. Where levels have to be unsigned, 128 is added to them.
        """
        v, b, bits = self.v, self.b, self.encoding.bits
        if bits == 8:
            for word in range(8):
                found = v.word(codes, lanes, word, mask)
                yield found if self.is_signed else b.xor(found, v.splat(v.words, 0x80808080))
            return
        above = [v.word(codes, lanes, 4 + number, mask) for number in range(bits - 4)]
        for quad in range(8):
            if quad % 2 == 0:
                halves = v.word(codes, lanes, quad // 2, mask)
            half = b.lshr(halves, v.splat(v.words, 4)) if quad % 2 else halves
            code = b.and_(half, v.splat(v.words, 0x0F0F0F0F))
            if above:
                each = 8 // (bits - 4)
                code = b.or_(code, self._above(above[quad // each], (bits - 4) * (quad % each)))
            yield self._levels(code) if self.encoding.levels else code

    def _above(self, word: Any, at: int) -> Any:
        """Returns the bits above the lowest four of 4 codes, which lie from bit `at` of each byte on."""
        v, b = self.v, self.b
        if at < 4:
            word = b.shl(word, v.splat(v.words, 4 - at))
        if at > 4:
            word = b.lshr(word, v.splat(v.words, at - 4))
        return b.and_(word, v.splat(v.words, 0x10101010 if self.encoding.bits == 5 else 0x30303030))

    def _levels(self, codes: Any) -> Any:
        v = self.v
        values = [int(level) + (0 if self.is_signed else ABOVE) for level in LEVELS]
        return v.looked_up(values, codes)

    def weights(self, codes: Any, lanes: Any, mask: Any, factors: list[LaneFactors]) -> Iterator[Any]:
        """Yields the weights, float32, of each column of the lanes from `codes` on."""
        v, b = self.v, self.b
        beside = [self._minimum(each) for each in factors]
        for quad, word in enumerate(self.quads(codes, lanes, mask)):
            for byte in range(4):
                if self.is_signed:
                    number = v.signed(word, 8 * byte, 8)
                else:
                    moved = b.lshr(word, v.splat(v.words, 8 * byte)) if byte else word
                    number = b.and_(moved, v.splat(v.words, 255))
                if (excess := self._excess) != 0:
                    number = b.sub(number, v.splat(v.words, excess))
                value, half = b.sitofp(number, v.floats), quad * self.encoding.halves // 8
                product = b.fmul(value, factors[half].scale)  # exact
                yield product if beside[half] is None else b.fadd(product, beside[half])

    @property
    def _excess(self) -> int:
        """Returns by how much the bytes of `quads` are larger than codes, or than levels."""
        if self.encoding.levels:
            return 0 if self.is_signed else ABOVE
        return -ABOVE if self.is_signed else 0

    def _minimum(self, factors: LaneFactors) -> Any:
        v, b = self.v, self.b
        if self.encoding.offset != MIDDLE:
            return factors.minimum
        if self.encoding.levels:
            return None
        return b.fmul(factors.scale, v.splat(v.floats, float(-self.encoding.middle)))
