"""Writes the LLVM code that turns codes of weights into vectors, for each set of instructions.

A vector has `lanes` lanes, each of which belongs to one lane of a row's run (see `encodings.rows`). The shorter rest of
a row is read under a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir

from edgemoe.encodings.rows import E2M1, LANES, LEVELS
from edgemoe.jit.compile_target import TARGET
from edgemoe.jit.intrinsics import instruction
from edgemoe.types.encoding import LANE_COLUMNS, MIDDLE, ZERO, Encoding, FactorArray

F32, I64 = ir.FloatType(), ir.IntType(64)
I8, I16, I32 = (ir.IntType(bits) for bits in (8, 16, 32))
EXCESS = {"int8": 128, "int4": 8, "mxfp4": 12}  # added to whole numbers where an instruction wants them unsigned
DOUBLED = [int(2 * value) for value in E2M1]  # as whole numbers


@dataclass(frozen=True, slots=True)
class Instructions:
    """A set of instructions. All of them compute the same whole numbers from whole activations."""

    name: str
    lanes: int  # of a vector
    needs: tuple[str, ...] = ()  # LLVM's names of the processor's features

    @property
    def is_available(self) -> bool:
        """Returns whether the processor that code is compiled for has them."""
        return TARGET.has(*self.needs)


AVX512 = Instructions("avx512", 16, ("avx512f", "avx512bw", "avx512vl", "avx512vnni"))
AVX2 = Instructions("avx2", 8, ("avx2", "fma", "f16c"))
DOTPROD = Instructions("dotprod", 4, ("dotprod",))
NEON = Instructions("neon", 4, ("neon",))
EVERY = (AVX512, AVX2, DOTPROD, NEON)


class CodeVectors:
    """Writes the LLVM code of vectors of one encoding's weights."""

    def __init__(self, builder: Any, encoding: Encoding, instructions: Instructions) -> None:
        self.b, self.encoding, self.instructions = builder, encoding, instructions
        self.lanes = instructions.lanes
        self.floats, self.words = (ir.VectorType(kind, self.lanes) for kind in (F32, I32))
        self.bytes, self.pairs = ir.VectorType(I8, 4 * self.lanes), ir.VectorType(I16, 2 * self.lanes)

    def splat(self, kind: Any, value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        return instruction(self.b, name, result, arguments)

    def load(self, address: Any, kind: Any, mask: Any = None) -> Any:
        """Reads a vector; lanes that `mask` leaves out are 0 and are not read."""
        pointer = self.b.inttoptr(address, kind.as_pointer())
        if mask is None:
            return self.b.load(pointer, align=1)
        align, nothing = ir.Constant(I32, 1), self.splat(kind, 0)
        return self.call(f"llvm.masked.load.{_suffix(kind)}.p0", kind, pointer, align, mask, nothing)

    def store(self, address: Any, value: Any, mask: Any = None) -> None:
        """Writes a vector, less the lanes that `mask` leaves out."""
        pointer = self.b.inttoptr(address, value.type.as_pointer())
        if mask is None:
            self.b.store(value, pointer, align=1)
            return
        name, align = f"llvm.masked.store.{_suffix(value.type)}.p0", ir.Constant(I32, 1)
        self.call(name, ir.VoidType(), value, pointer, align, mask)

    def first(self, count: Any, lanes: int) -> Any:
        """Returns the mask of the first `count` of `lanes` lanes."""
        kind = ir.VectorType(I32, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), self.b.trunc(count, I32), ir.Constant(I32, 0))
        every = self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), self.splat(kind, 0))
        return self.b.icmp_signed("<", ir.Constant(kind, list(range(lanes))), every)

    def lanes_left(self, left: Any) -> Iterator[Any]:
        """Writes a branch for a run that has fewer lanes: yields None where a whole vector is left, else `left`."""
        b, whole, masked = self.b, ir.Constant(I64, self.lanes), ir.Constant(I64, 0)
        if self.instructions in (AVX512, AVX2):  # which read under a mask as fast
            with b.if_then(b.icmp_signed(">", left, masked)):
                yield left
            return
        with b.if_else(b.icmp_signed(">=", left, whole)) as (full, rest):
            with full:
                yield None
            with rest, b.if_then(b.icmp_signed(">", left, masked)):
                yield left

    def columns(self, codes: Any, lanes: Any, mask: Any) -> Iterator[Any]:
        """Yields the weights of each column of the lanes from `codes` on, without their scale."""
        for word in range(LANE_COLUMNS * self.encoding.bits // 32):
            if self.encoding.name != "fp8":
                yield from self.weights(self.word(codes, lanes, word, mask))
                continue
            for column in range(4 * word, 4 * word + 4):
                yield self.eighths(self.b.add(codes, self.b.mul(lanes, ir.Constant(I64, column))), mask)

    def word(self, address: Any, lanes: Any, number: int, mask: Any) -> Any:
        """Returns word `number` of every lane of a run of `lanes`, of which the vector's first lies at `address`."""
        return self.load(self.b.add(address, self.b.mul(lanes, ir.Constant(I64, 4 * number))), self.words, mask)

    def weights(self, word: Any) -> list[Any]:
        """Returns the weights without their scale, float32, of a word of codes: 4, or 8, columns of each lane."""
        if self.encoding.name == "int8":
            return [self.b.sitofp(self.signed(word, 8 * i, 8), self.floats) for i in range(4)]
        nibbles = (0, 2, 4, 6, 1, 3, 5, 7)  # the low halves are the first four columns
        return [self.nibble(word, 4 * i) for i in nibbles]

    def signed(self, word: Any, at: int, bits: int) -> Any:
        """Returns the signed number of `bits` bits from bit `at` on."""
        if at + bits < 32:
            word = self.b.shl(word, self.splat(self.words, 32 - bits - at))
        return self.b.ashr(word, self.splat(self.words, 32 - bits))

    def nibble(self, word: Any, at: int) -> Any:
        """Returns the float32 that the code from bit `at` on stands for."""
        moved = self.b.lshr(word, self.splat(self.words, at)) if at else word
        if self.instructions is AVX512:
            values = [code - 8 for code in range(16)] if self.encoding.name == "int4" else [float(v) for v in E2M1]
            return self.call("llvm.x86.avx512.permvar.sf.512", self.floats, ir.Constant(self.floats, values), moved)
        if self.instructions is AVX2 and self.encoding.name == "mxfp4":
            values = [float(value) for value in E2M1[:8]]
            size = self.call("llvm.x86.avx2.permps", self.floats, ir.Constant(self.floats, values), moved)
            sign = self.b.shl(word, self.splat(self.words, 28 - at)) if at < 28 else word
            sign = self.b.and_(sign, self.splat(self.words, 1 << 31))
            return self.b.bitcast(self.b.or_(self.b.bitcast(size, self.words), sign), self.floats)
        code = self.b.and_(moved, self.splat(self.words, 15))
        if self.encoding.name == "int4":
            return self.b.sitofp(self.b.sub(code, self.splat(self.words, 8)), self.floats)
        whole = self.b.sitofp(self.signed(self.looked_up(DOUBLED, code), 0, 8), self.floats)
        return self.b.fmul(whole, self.splat(self.floats, 0.5))

    def looked_up(self, values: list[int], codes: Any) -> Any:
        """Returns words in whose place of each byte, 0 to 15, stands one of 16 values."""
        names = {AVX512: "llvm.x86.avx512.pshuf.b.512", AVX2: "llvm.x86.avx2.pshuf.b"}
        name = names.get(self.instructions, "llvm.aarch64.neon.tbl1.v16i8")
        table = ir.Constant(self.bytes, values * (self.lanes // 4))
        return self.b.bitcast(self.call(name, self.bytes, table, self.b.bitcast(codes, self.bytes)), self.words)

    def eighths(self, address: Any, mask: Any) -> Any:
        """Returns the weights of fp8, less a factor of 256, whose codes lie at `address`, a byte for each lane."""
        halves = ir.VectorType(I16, self.lanes)
        codes = self.load(address, ir.VectorType(I8, self.lanes), mask)
        bits = self.b.shl(self.b.sext(codes, halves), self.splat(halves, 7))
        bits = self.b.and_(bits, self.splat(halves, 0xBFFF))  # sign, an exponent of 4 bits, mantissa
        return self.b.fpext(self.b.bitcast(bits, ir.VectorType(ir.HalfType(), self.lanes)), self.floats)

    def scales(self, address: Any, left: Any) -> Any:
        """Returns the lanes' scales, float32, which begin at `address`; `left` lanes have one, where it is no None."""
        name = self.encoding.name
        if name == "fp8":
            few = self.lanes * LANE_COLUMNS // self.encoding.group
            kind = ir.VectorType(F32, few)
            if left is not None:
                three, two = ir.Constant(I64, 3), ir.Constant(I64, 2)
                left = self.b.lshr(self.b.add(left, three), two)
            some = self.load(address, kind, None if left is None else self.first(left, few))
            some = self.b.fmul(some, self.splat(kind, 256.0))
            spread = ir.Constant(self.words, [lane * few // self.lanes for lane in range(self.lanes)])
            return self.b.shuffle_vector(some, ir.Constant(kind, ir.Undefined), spread)
        mask = None if left is None else self.first(left, self.lanes)
        if name == "mxfp4":
            powers = self.b.zext(self.load(address, ir.VectorType(I8, self.lanes), mask), self.words)
            bits = self.b.shl(powers, self.splat(self.words, 23))
            lowest = self.splat(self.words, 1 << 22)
            return self.b.bitcast(self.b.select(self.b.icmp_unsigned("<", bits, lowest), lowest, bits), self.floats)
        bits = self.b.zext(self.load(address, ir.VectorType(I16, self.lanes), mask), self.words)
        return self.b.bitcast(self.b.shl(bits, self.splat(self.words, 16)), self.floats)


def _suffix(kind: Any) -> str:
    return f"v{kind.count}{'f32' if kind.element == F32 else f'i{kind.element.width}'}"


def has_signed_bytes(encoding: Encoding, instructions: Instructions) -> bool:
    """Returns whether bytes of affine weights are signed in products: AVX-512 wants none so, others all of 8 bits."""
    return (encoding.bits == 8 or encoding.levels) and instructions is not AVX512


def excess_of(encoding: Encoding, instructions: Instructions) -> int:
    """Returns by how much weights are too large in products, times the sums of activations to be taken off again.

    It is -1 where the sums themselves are needed.
    """
    if encoding.is_affine:
        if encoding.offset != MIDDLE:
            return -1
        if encoding.levels or encoding.bits == 8:
            return 0 if has_signed_bytes(encoding, instructions) else 128
        return encoding.middle
    return 0 if encoding.name == "int8" and instructions is not AVX512 else EXCESS[encoding.name]


class CodeProducts(CodeVectors):
    """Writes the LLVM code of products with activations of 8 bits, in whole numbers."""

    @property
    def excess(self) -> int:
        return excess_of(self.encoding, self.instructions)

    @property
    def is_signed(self) -> bool:
        """Returns whether the bytes of `quads` are signed."""
        if self.encoding.is_affine:
            return has_signed_bytes(self.encoding, self.instructions)
        return not self.excess

    def quads(self, word: Any) -> list[Any]:
        """Returns words of 4 whole numbers: 4 columns of each lane, once for int8 and twice for 4 bits."""
        if self.encoding.name == "int8":
            return [self.b.xor(word, self.splat(self.words, 0x80808080)) if self.excess else word]
        low = self.splat(self.words, 0x0F0F0F0F)
        halves = [self.b.and_(word, low), self.b.and_(self.b.lshr(word, self.splat(self.words, 4)), low)]
        if self.encoding.name == "int4":
            return halves
        values = [value + self.excess for value in DOUBLED]
        return [self.looked_up(values, half) for half in halves]

    def add(self, total: Any, quads: Any, x: Any) -> Any:
        """Returns total + the dot product of each lane's 4 numbers with 4 activations; `total` is None at first."""
        start = self.splat(self.words, 0) if total is None else total
        if self.instructions is AVX512:
            return self.call("llvm.x86.avx512.vpdpbusd.512", self.words, start, quads, x)
        if self.instructions is DOTPROD:
            both = (self.b.bitcast(each, self.bytes) for each in (quads, x))
            return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", self.words, start, *both)
        product = self._by_pairs(quads, x) if self.instructions is AVX2 else self._by_halves(quads, x)
        return product if total is None else self.b.add(total, product)

    def _by_pairs(self, quads: Any, x: Any) -> Any:
        weights, numbers = self.b.bitcast(quads, self.bytes), self.b.bitcast(x, self.bytes)
        if self.is_signed:  # 127 * 127 * 2 fits 16 bits, 255 * 127 * 2 would not
            numbers = self.call("llvm.x86.avx2.psign.b", self.bytes, numbers, weights)
            negative = self.b.icmp_signed("<", weights, self.splat(self.bytes, 0))
            weights = self.b.select(negative, self.b.neg(weights), weights)
        twos = self.call("llvm.x86.avx2.pmadd.ub.sw", self.pairs, weights, numbers)
        return self.call("llvm.x86.avx2.pmadd.wd", self.words, twos, self.splat(self.pairs, 1))

    def _by_halves(self, quads: Any, x: Any) -> Any:
        weights, numbers = self.b.bitcast(quads, self.bytes), self.b.bitcast(x, self.bytes)
        sides, products = [ir.Constant(ir.VectorType(I32, 8), list(range(at, at + 8))) for at in (0, 8)], []
        for side in sides:
            two = [self.b.shuffle_vector(each, each, side) for each in (weights, numbers)]
            products.append(self.call("llvm.aarch64.neon.smull.v8i16", self.pairs, *two))
        twos = self.call("llvm.aarch64.neon.addp.v8i16", self.pairs, *products)  # 128 * 127 * 2 fits 16 bits
        return self.call("llvm.aarch64.neon.saddlp.v4i32.v8i16", self.words, twos)


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
