"""Makes the code that multiplies and decodes rows of one encoding, and chooses the fastest for this processor.

In bfloat16 models activations are whole numbers: of 16 bits, and of 8 where many tokens are multiplied. They give the
same bits with all instructions, which are chosen by measurement. In float32 models, and for fp8, activations are
float32, and the widest vectors are taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

from edgemoe.encodings.rows import LANES, RUN
from edgemoe.jit.intrinsics import F32, I64, INT, cgutils, intrinsic, multiply_add, prefetch, types
from edgemoe.jit.object_cache import Code, CompiledPart, code, link
from edgemoe.kernels.cpu import amx
from edgemoe.kernels.cpu.encoded.instructions import (
    AVX2,
    AVX512,
    EVERY,
    AffineVectors,
    CodeProducts,
    CodeVectors,
    Instructions,
    LaneFactors,
    excess_of,
)
from edgemoe.kernels.cpu.encoded.packing import BASE, make_pack_whole, make_unpack, pack_floats
from edgemoe.kernels.cpu.gemv import make_rows, rows_code
from edgemoe.kernels.cpu.vector import make_pack_some
from edgemoe.types.encoding import LANE_COLUMNS, MIDDLE, Encoding

LINE_BYTES = 64
TOGETHER = 2  # rows of 4 bits side by side: one is short compared with its fixed cost
FLOATS, BYTES, WORDS = 0, 1, 2  # kinds of activations: float32, or whole numbers in one or two parts of 8 bits
TILE_ROWS, TILE_TOKENS = 4, 4  # multiplied side by side where activations are bytes


class _Emitter:
    """Writes the LLVM code of the loop over `rows` rows of weights, side by side, and `tokens` vectors."""

    def __init__(
        self, builder: Any, encoding: Encoding, instructions: Instructions, rows: int, tokens: int, parts: int
    ) -> None:
        self.b, self.encoding, self.parts = builder, encoding, parts
        self.v = (CodeProducts if parts else CodeVectors)(builder, encoding, instructions)
        self.lanes, self.rows, self.tokens = instructions.lanes, rows, tokens
        self.coming: list[Any] = []  # addresses to prefetch
        vectors = range(LANES // self.lanes)
        self.sums = [[cgutils.alloca_once(builder, self.v.floats) for _ in vectors] for _ in range(rows * tokens)]

    def number(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def times(self, value: Any, factor: int) -> Any:
        return self.b.mul(value, self.number(factor))

    def dots(
        self, w: Any, stride: Any, soon: Any, x: Any, x_stride: Any, index: Any, n: Any, out: Any, out_stride: Any
    ) -> None:
        """Writes the sums of the products of rows of n weights to out[token][row], strides in bytes."""
        b = self.b
        chosen = [self.v.load(b.add(index, self.number(8 * token)), I64) for token in range(self.tokens)]
        vectors = [b.add(x, b.mul(x_stride, row)) for row in chosen]
        lines = [b.add(w, self.times(stride, row)) for row in range(self.rows)]
        for place in (place for places in self.sums for place in places):
            b.store(self.v.splat(self.v.floats, 0.0), place)
        self.n, self.scale_bytes = n, sum(array.bytes * RUN // array.columns for array in self.encoding.factors)
        self.affine = AffineVectors(self.v, self.encoding, n) if self.encoding.is_affine else None
        self.to_scales = b.udiv(self.times(n, self.encoding.bits), self.number(8))
        runs, lanes = b.udiv(n, self.number(RUN)), b.udiv(b.urem(n, self.number(RUN)), self.number(LANE_COLUMNS))
        with cgutils.for_range(b, runs, intp=I64) as loop:
            size = self.rows * (RUN * self.encoding.bits // 8 + self.scale_bytes)
            start = b.add(soon, self.times(loop.index, size))
            self.coming = [b.add(start, self.number(line)) for line in range(0, size, LINE_BYTES)]
            for part in range(LANES // self.lanes):
                self.part(lines, vectors, loop.index, self.number(LANES), part, None)
        self.rest(lines, vectors, soon, runs, lanes)
        sums = [[b.load(place) for place in places] for places in self.sums]
        if self.rows * self.tokens == LANES:
            self.store_tile(sums, out, out_stride)
            return
        for number, vectors in enumerate(sums):
            row, token = divmod(number, self.tokens)
            to = b.add(out, b.add(b.mul(out_stride, self.number(token)), self.number(4 * row)))
            b.store(self.total(vectors), b.inttoptr(to, F32.as_pointer()), align=4)

    def store_tile(self, sums: list[list[Any]], out: Any, out_stride: Any) -> None:
        """Writes LANES sums [rows, tokens], which are added up side by side, in the order of `total`."""
        b, rows = self.b, self.rows
        halves = [self.halves(sums[row * self.tokens + token]) for token in range(self.tokens) for row in range(rows)]
        vectors = [b.fadd(*both) for both in halves]  # of 8 lanes
        for lanes in (4, 2, 1):  # of each sum, after the addition
            vectors = [self.folded(vectors[i], vectors[i + 1], lanes) for i in range(0, len(vectors), 2)]
        ordered = b.shuffle_vector(*vectors, ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(LANES))))
        for token in range(self.tokens):
            to = b.add(out, b.mul(out_stride, self.number(token)))
            some = self.some(ordered, token * rows, rows)
            b.store(some, b.inttoptr(to, some.type.as_pointer()), align=4)

    def folded(self, left: Any, right: Any, lanes: int) -> Any:
        """Adds the first and the last `lanes` of each 2 * `lanes` lanes of two vectors of 8. Returns one vector."""
        numbers = [first + i for first in range(0, 16, 2 * lanes) for i in range(lanes)]
        halves = [
            self.b.shuffle_vector(
                left, right, ir.Constant(ir.VectorType(ir.IntType(32), 8), [n + after for n in numbers])
            )
            for after in (0, lanes)
        ]
        return self.b.fadd(*halves)

    def rest(self, rows: list[Any], vectors: list[Any], soon: Any, runs: Any, lanes: Any) -> None:
        """Adds the run with fewer lanes, where there is one."""
        size = self.rows * (RUN * self.encoding.bits // 8 + self.scale_bytes)
        lines = self.b.udiv(self.times(lanes, size), self.number(LANES * LINE_BYTES))
        with cgutils.for_range(self.b, lines, intp=I64) as loop:
            place = self.b.add(self.times(runs, size), self.times(loop.index, LINE_BYTES))
            prefetch(self.b, self.b.add(soon, place))
        for part in range(LANES // self.lanes):
            left = self.b.sub(lanes, self.number(part * self.lanes))
            for some in self.v.lanes_left(left):
                self.part(rows, vectors, runs, lanes, part, some)

    def part(self, rows: list[Any], vectors: list[Any], run: Any, lanes: Any, part: int, left: Any) -> None:
        """Adds as many lanes of a run as a vector has, from lane part * self.lanes on; `left` of them are there."""
        b, first = self.b, part * self.lanes
        width = 1 if self.encoding.name == "fp8" else 4  # bytes of a lane that lie side by side
        to_codes = b.add(self.times(run, RUN * self.encoding.bits // 8), self.number(first * width))
        mask = None if left is None else self.v.first(left, self.lanes)
        codes = [b.add(row, to_codes) for row in rows]
        if self.affine:
            factors = [self.affine.factors(row, run, first, left) for row in rows]
        else:
            to_scales = b.add(self.times(run, self.scale_bytes), self.number(first * self.scale_bytes // LANES))
            to_scales = b.add(self.to_scales, to_scales)
            factors = [[LaneFactors(self.v.scales(b.add(row, to_scales), left))] for row in rows]
        if self.parts:
            lane, place = b.add(self.times(run, LANES), self.number(first)), self.times(run, RUN)
            place = b.add(place, self.number(4 * first))
            self.whole_sums(codes, factors, vectors, place, lane, lanes, mask, part)
            return
        place = b.add(self.times(run, 4 * RUN), self.number(4 * first))
        for row, row_codes in enumerate(codes):
            totals = self.float_sums(row_codes, factors[row], vectors, place, lanes, mask)
            for places, total in zip(self.sums[row * self.tokens :], totals, strict=False):
                sum_ = b.load(places[part])
                if self.affine:
                    b.store(b.fadd(sum_, total), places[part])
                else:
                    b.store(multiply_add(b, total, factors[row][0].scale, sum_), places[part])

    def fetch(self, steps: int) -> None:
        """Prefetches one of `steps` parts of the coming rows: all at once would delay the present reads."""
        some = -(-len(self.coming) // steps)
        for address in self.coming[:some]:
            prefetch(self.b, address)
        del self.coming[:some]

    def float_sums(
        self, codes: Any, factors: list[LaneFactors], vectors: list[Any], place: Any, lanes: Any, mask: Any
    ) -> list[Any]:
        """Returns each token's sums of the lanes of a row, without the scales if these are of whole lanes."""
        b, v = self.b, self.v
        weights = self.affine.weights(codes, lanes, mask, factors) if self.affine else v.columns(codes, lanes, mask)
        sums = [[v.splat(v.floats, 0.0)] * 2 for _ in vectors]  # starts at 0, so that every product is fused
        for column, weight in enumerate(weights):
            self.fetch(LANE_COLUMNS - column)
            at = b.add(place, self.times(lanes, 4 * column))
            for vector, halves in zip(vectors, sums, strict=True):
                x, half = v.load(b.add(vector, at), v.floats, mask), column % 2
                halves[half] = multiply_add(b, weight, x, halves[half])
        return [b.fadd(*halves) for halves in sums]

    def whole_sums(
        self,
        codes: list[Any],
        factors: list[list[LaneFactors]],
        vectors: list[Any],
        place: Any,
        lane: Any,
        lanes: Any,
        mask: Any,
        part: int,
    ) -> None:
        """Adds each row's and token's products of the lanes, multiplied with both scales, to the sums."""
        assert isinstance(self.v, CodeProducts)
        b, v, halves = self.b, self.v, self.encoding.halves
        scales, firsts, half_value = [], [], 0.5 if self.encoding.name == "mxfp4" else 1.0
        for vector in vectors:  # the scales follow all parts of the activations, the sums follow the scales
            at = b.add(vector, b.add(self.times(self.n, self.parts), self.times(lane, 4)))
            scales.append(b.fmul(v.load(at, v.floats, mask), v.splat(v.floats, half_value)))
            own = []
            for _ in range(halves):
                at = b.add(at, b.udiv(self.n, self.number(LANE_COLUMNS // 4)))
                own.append(v.load(at, v.words, mask) if v.excess else None)
            firsts.append(own)
        totals = self.products(codes, firsts, vectors, place, lanes, mask)
        for number, places in enumerate(self.sums):
            row, token = divmod(number, self.tokens)
            result = b.load(places[part])
            for half, (total, sums) in enumerate(zip(totals[number], firsts[token], strict=True)):
                lane_factors = factors[row][half]
                weight = b.fmul(lane_factors.scale, scales[token])
                if self.encoding.offset != MIDDLE and v.is_signed:  # bytes are codes less 128
                    total = b.add(total, b.shl(sums, v.splat(v.words, 7)))
                result = multiply_add(b, b.sitofp(total, v.floats), weight, result)
                if self.encoding.offset != MIDDLE:
                    minimum = b.fmul(lane_factors.minimum, scales[token])
                    result = multiply_add(b, b.sitofp(sums, v.floats), minimum, result)
            b.store(result, places[part])

    def products(
        self, codes: list[Any], firsts: list[list[Any]], vectors: list[Any], place: Any, lanes: Any, mask: Any
    ) -> list[list[Any]]:
        """Returns each row's and token's products by halves of the lanes. They start at `firsts` if it is excess."""
        assert isinstance(self.v, CodeProducts)
        b, v, halves = self.b, self.v, self.encoding.halves
        sums = [
            [[*[None] * (self.parts - 1), first if v.excess > 0 else None] for first in own]
            for _ in codes
            for own in firsts
        ]
        streams = [self.quads(code, lanes, mask) for code in codes]
        each = 1 if self.encoding.bits == 8 else 2  # quads of a word
        for four in range(LANE_COLUMNS // 4):
            if four % each == 0:
                self.fetch((LANE_COLUMNS // 4 - four) // each)
            quads = [next(stream) for stream in streams]
            numbers = [
                [
                    v.word(b.add(b.add(vector, self.times(self.n, part)), place), lanes, four, mask)
                    for part in range(self.parts)
                ]
                for vector in vectors
            ]
            for i, own in enumerate(sums):
                row, token = divmod(i, self.tokens)
                parts = own[four * halves // (LANE_COLUMNS // 4)]
                for part, x in enumerate(numbers[token]):
                    parts[part] = v.add(parts[part], quads[row], x)
        if self.parts == WORDS:
            return [[b.add(b.mul(upper, v.splat(v.words, BASE)), lower) for upper, lower in own] for own in sums]
        return [[total for (total,) in own] for own in sums]

    def quads(self, code: Any, lanes: Any, mask: Any) -> Iterator[Any]:
        """Yields words of 4 whole numbers, which are 4 columns of each lane."""
        assert isinstance(self.v, CodeProducts)
        if self.affine:
            yield from self.affine.quads(code, lanes, mask)
            return
        for word in range(LANE_COLUMNS * self.encoding.bits // 32):
            yield from self.v.quads(self.v.word(code, lanes, word, mask))

    def total(self, parts: list[Any]) -> Any:
        """Returns the sum of 16 lanes: of two halves, and so on."""
        b = self.b
        both = b.fadd(*self.halves(parts))
        for lanes in (4, 2, 1):
            both = b.fadd(self.some(both, 0, lanes), self.some(both, lanes, lanes))
        return b.extract_element(both, ir.Constant(ir.IntType(32), 0))

    def halves(self, parts: list[Any]) -> list[Any]:
        """Returns 16 lanes, in one vector, two or four, as two vectors."""
        if len(parts) == 1:
            return [self.some(parts[0], first, 8) for first in (0, 8)]
        every = ir.Constant(ir.VectorType(ir.IntType(32), 8), list(range(8)))
        return parts if len(parts) == 2 else [self.b.shuffle_vector(*parts[i : i + 2], every) for i in (0, 2)]

    def some(self, vector: Any, first: int, lanes: int) -> Any:
        kind = ir.VectorType(ir.IntType(32), lanes)
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.b.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(first, first + lanes))))


def _dots(encoding: Encoding, instructions: Instructions, parts: int, rows: int, tokens: int) -> Any:
    """Makes the intrinsic that writes out[token][row] = w[row] . x[index[token]] over n elements; strides in bytes."""

    @intrinsic
    def dots(
        typing: Any,
        w: Any,
        stride: Any,
        soon: Any,
        x: Any,
        x_stride: Any,
        index: Any,
        n: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _Emitter(builder, encoding, instructions, rows, tokens, parts).dots(*args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return dots


@cache
def make_encoded_rows(encoding: Encoding, instructions: Instructions, parts: int) -> Code:
    """Makes the same as `gemv.make_rows`, for encoded rows; activations are FLOATS or WORDS."""
    widest = 2 if instructions is AVX2 else 4  # tokens of one loop: sums for four need 32 registers
    together = TOGETHER if encoding.bits == 4 and instructions is AVX512 else 1
    dots = partial(_dots, encoding, instructions, parts)
    return rows_code("encoded_rows", dots, widest, together)


@cache
def make_byte_rows(encoding: Encoding, instructions: Instructions) -> Code:
    """Makes the same as `gemv.make_rows`, for encoded rows, many tokens and activations that are BYTES."""

    def dots(rows: int, tokens: int) -> Any:
        return _dots(encoding, instructions, BYTES, rows, tokens)

    tile, pair, column = (dots(TILE_ROWS, tokens) for tokens in (TILE_TOKENS, 2, 1))
    single = dots(1, 1)

    @code(*[INT] * 11)
    def byte_rows(
        w: int,
        stride: int,
        count: int,
        following: int,
        x: int,
        x_stride: int,
        index: int,
        tokens: int,
        n: int,
        out: int,
        out_stride: int,
    ) -> None:
        full, end = count - count % TILE_ROWS, w + count * stride
        for row in range(0, full, TILE_ROWS):
            line, token = w + row * stride, 0
            soon = line + TILE_ROWS * stride
            if soon >= end:
                soon = following + soon - end
            while token < tokens:
                left, which, to = tokens - token, index + 8 * token, out + token * out_stride + 4 * row
                if left >= TILE_TOKENS:
                    tile(line, stride, soon, x, x_stride, which, n, to, out_stride)
                    token += TILE_TOKENS
                elif left >= 2:
                    pair(line, stride, soon, x, x_stride, which, n, to, out_stride)
                    token += 2
                else:
                    column(line, stride, soon, x, x_stride, which, n, to, out_stride)
                    token += 1
                soon = line  # prefetched already
        for row in range(full, count):
            line = w + row * stride
            for token in range(tokens):
                to = out + token * out_stride + 4 * row
                single(line, stride, line, x, x_stride, index + 8 * token, n, to, out_stride)

    return byte_rows


TRIAL_COLUMNS, TRIAL_BYTES = 2048, 1 << 20


@dataclass(frozen=True, slots=True)
class RowCode:
    """Gives the code for rows of one encoding."""

    encoding: Encoding
    rows: Code  # as `gemv.make_rows` makes it
    pack: Code  # pack(values, first, count, n, out): elements first:first + count of a vector of n, from float32
    unpack: Code | None  # as `make_unpack` makes it, into the model's type; None where tiles read the rows as they are
    byte_rows: Code | None = None  # the same as `rows`, for many tokens and activations of 8 bits, if that is faster
    byte_pack: Code | None = None  # the same as `pack`, for `byte_rows`


def usable(whole: bool) -> list[Instructions]:
    """Returns the instructions among which the fastest is chosen, the widest first; for floats one."""
    candidates = [each for each in EVERY if each.is_available]
    return candidates if whole else candidates[:1]


def row_parts(encoding: Encoding, bf16: bool) -> list[CompiledPart]:
    """Returns all parts that `make_row_code` may link."""
    if not encoding.group:
        return [_plain_part(encoding)]
    candidates = usable(_is_whole(encoding, bf16))
    rows = [_rows_part(encoding, each, bf16) for each in candidates]
    packs = [_pack_part(encoding, each, bf16) for each in candidates]
    return [*rows, *packs, *_byte_parts(encoding, bf16)]


@cache
def make_row_code(encoding: Encoding, bf16: bool, directory: Path | None) -> RowCode:
    """Returns the format for a model whose type is bfloat16 or float32; compiles it at the first use."""
    if not encoding.group:
        part = _plain_part(encoding)
        link(part.codes, directory, part.variant)
        rows, pack = part.codes
        return RowCode(encoding, rows, pack, None)
    parts = {each: _rows_part(encoding, each, bf16) for each in usable(_is_whole(encoding, bf16))}
    for part in parts.values():
        link(part.codes, directory, part.variant)
    found = {each: part.codes[0] for each, part in parts.items()}
    chosen = min(found, key=lambda each: _seconds(found[each], encoding)) if len(found) > 1 else next(iter(found))
    part = _pack_part(encoding, chosen, bf16)
    link(part.codes, directory, part.variant)
    unpack, pack = part.codes
    byte_codes: list[Code] = []
    for part in _byte_parts(encoding, bf16):
        link(part.codes, directory, part.variant)
        byte_codes.extend(part.codes)
    return RowCode(encoding, found[chosen], pack, unpack, *byte_codes)


def _is_whole(encoding: Encoding, bf16: bool) -> bool:
    """Whether activations are multiplied as whole numbers."""
    return bf16 and encoding.name != "fp8"


def _plain_part(encoding: Encoding) -> CompiledPart:
    is_bf16 = encoding.name == "bfloat16"
    return CompiledPart((make_rows(is_bf16), make_pack_some(is_bf16)), encoding.name)


def _rows_part(encoding: Encoding, instructions: Instructions, bf16: bool) -> CompiledPart:
    parts = WORDS if _is_whole(encoding, bf16) else FLOATS
    rows = make_encoded_rows(encoding, instructions, parts)
    return CompiledPart((rows,), f"{encoding.name}.{instructions.name}.{parts}")


def _byte_parts(encoding: Encoding, bf16: bool) -> list[CompiledPart]:
    """Returns the part for many tokens with activations of 8 bits, where the processor has fast instructions for it.

    AMX multiplies decoded rows faster, and activations stay bfloat16.
    """
    if not AVX512.is_available or amx.HERE or not _is_whole(encoding, bf16):
        return []
    rows, pack = make_byte_rows(encoding, AVX512), make_pack_whole(excess_of(encoding, AVX512), BYTES, encoding.halves)
    return [CompiledPart((rows, pack), f"{encoding.name}.bytes")]


def _pack_part(encoding: Encoding, chosen: Instructions, bf16: bool) -> CompiledPart:
    """Returns the part that unpacks rows for tiles, and packs vectors for the chosen instructions."""
    whole = _is_whole(encoding, bf16)
    widest = usable(whole)[0]
    pack = make_pack_whole(excess_of(encoding, chosen), WORDS, encoding.halves) if whole else pack_floats
    unpack = make_unpack(encoding, widest, bf16)
    return CompiledPart((unpack, pack), f"{encoding.name}.{widest.name}.{chosen.name}.{bf16}")


def _seconds(rows: Code, encoding: Encoding) -> float:
    """Returns the shortest of some runs over rows that fit the second-level cache."""
    stride = encoding.row_bytes(TRIAL_COLUMNS)
    count = TRIAL_BYTES // stride // 2
    weights, x = np.zeros(count * stride, np.uint8), np.zeros(TRIAL_COLUMNS, np.float32)
    index, out, taken = np.zeros(1, np.int64), np.zeros(count, np.float32), []
    w, inputs = weights.ctypes.data, (x.ctypes.data, 0, index.ctypes.data, 1, TRIAL_COLUMNS)
    for _ in range(7):
        start = time.perf_counter()
        rows.call(w, stride, count, w, *inputs, out.ctypes.data, 0)
        taken.append(time.perf_counter() - start)
    return min(taken)
