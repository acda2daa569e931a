"""Packs activations in the order in which rows of encoded weights are read, and decodes such rows.

Activations for byte products are whole numbers of 16 bits, in two parts of 8: BASE times the upper part, plus the lower
one. For many tokens they have 8 bits, one part. No part is -128, which has no opposite.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from edgemoe.encodings.rows import LANES, RUN
from edgemoe.jit.intrinsics import (
    I64,
    INT,
    PAIRS,
    BFloat,
    atomic_replace,
    atomic_store,
    cgutils,
    f32_at,
    f32_of,
    instruction,
    intrinsic,
    jit,
    round_bf16,
    rounded,
    types,
    u16_at,
    u32_at,
)
from edgemoe.jit.object_cache import Code, code
from edgemoe.kernels.cpu.encoded.instructions import F32, I8, I16, I32, AffineVectors, CodeVectors, Instructions
from edgemoe.kernels.cpu.panels import make_fill
from edgemoe.types.encoding import LANE_COLUMNS, Encoding

BASE = 255
MOST = np.float32(127 * BASE + 127)
MOST_NARROW = np.float32(127)
_LEAST = np.float32(1e-30)
_ROUND = np.float32(1.5 * 2**23)  # added to a number of less than 22 bits it leaves a whole one in the lowest bits
_ROUND_BITS = np.int32(0x4B400000)


@jit
def lanes_of(run: int, n: int) -> int:
    """Returns the lanes of a run of a row of n columns."""
    return min(LANES, n // LANE_COLUMNS - run * LANES)


@code(*[INT] * 5)
def pack_floats(values: int, first: int, count: int, n: int, out: int) -> None:
    """Packs elements first:first + count of a vector of n float32, which are at `values`; both are multiples of 32."""
    v, to = f32_at(values), f32_at(out)
    for at in range(0, count, LANE_COLUMNS):
        lane = (first + at) // LANE_COLUMNS
        run = lane // LANES
        lanes, start = lanes_of(run, n), run * RUN + lane % LANES
        for k in range(LANE_COLUMNS):
            to[start + k * lanes] = v[at + k]


def _splat(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * LANE_COLUMNS)


def _reduce(builder: Any, how: str, vector: Any) -> Any:
    """Reduces the whole numbers of a vector to one."""
    name, kind = f"llvm.vector.reduce.{how}.v{vector.type.count}i32", ir.FunctionType(I32, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])


def _nearest(builder: Any, values: Any, factor: Any, words: Any) -> Any:
    """Returns the whole numbers that are nearest to values * factor, the even ones of two."""
    name, kind = f"llvm.fma.v{LANE_COLUMNS}f32", ir.FunctionType(values.type, [values.type] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, name)  # so that all processors give the same bits
    moved = builder.call(fused, [values, factor, _splat(values.type, float(_ROUND))])
    return builder.sub(builder.bitcast(moved, words), _splat(words, int(_ROUND_BITS)))


def _store_fours(builder: Any, numbers: Any, out: Any, step: Any) -> None:
    """Writes whole numbers as bytes: four side by side, and then `step` bytes on."""
    fours = ir.VectorType(I32, LANE_COLUMNS // 4)
    packed = builder.bitcast(builder.trunc(numbers, ir.VectorType(I8, LANE_COLUMNS)), fours)
    for four in range(LANE_COLUMNS // 4):
        place = builder.add(out, builder.mul(step, ir.Constant(I64, four)))
        word = builder.extract_element(packed, ir.Constant(I32, four))
        builder.store(word, builder.inttoptr(place, I32.as_pointer()), align=1)


def _make_quantise(excess: int, parts: int, halves: int) -> Callable[[int, int, int, int, int, int], Any]:
    """Makes quantise(values, codes, n, step, scale, sums), which writes 32 float32 as whole numbers in `parts` parts.

    The parts lie `n` bytes apart. It writes the numbers' scale, a float32, and for each of `halves` their sum times
    -`excess`, int32, `n` / 8 bytes apart.
    """
    most = float(MOST if parts == 2 else MOST_NARROW)

    @intrinsic
    def quantise(typing: Any, values: Any, codes: Any, n: Any, step: Any, scale: Any, sums: Any) -> Any:
        def emit(context: Any, b: Any, __: Any, args: Any) -> Any:
            values, codes, n, step, scale, sums = args
            floats, words = ir.VectorType(F32, LANE_COLUMNS), ir.VectorType(I32, LANE_COLUMNS)
            given = b.load(b.inttoptr(values, floats.as_pointer()), align=4)
            sizes = b.and_(b.bitcast(given, words), _splat(words, 0x7FFFFFFF))  # ordered as the floats are
            largest = b.bitcast(_reduce(b, "umax", sizes), F32)
            tiny = b.fcmp_ordered("<=", largest, ir.Constant(F32, float(_LEAST)))
            inverse = b.select(tiny, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, most), largest))
            b.store(b.fdiv(largest, ir.Constant(F32, most)), b.inttoptr(scale, F32.as_pointer()), align=4)
            one = b.insert_element(ir.Constant(floats, ir.Undefined), inverse, ir.Constant(I32, 0))
            every = b.shuffle_vector(one, ir.Constant(floats, ir.Undefined), _splat(words, 0))
            upper = numbers = _nearest(b, given, every, words)
            if parts == 2:
                base = _splat(floats, float(np.float32(1 / BASE)))
                upper = _nearest(b, b.sitofp(numbers, floats), base, words)
                _store_fours(b, b.sub(numbers, b.mul(upper, _splat(words, BASE))), b.add(codes, n), step)
            _store_fours(b, upper, codes, step)
            for half in range(halves):
                size = LANE_COLUMNS // halves
                places = ir.Constant(ir.VectorType(I32, size), list(range(half * size, (half + 1) * size)))
                total = _reduce(b, "add", b.shuffle_vector(numbers, ir.Constant(words, ir.Undefined), places))
                to = b.add(sums, b.mul(b.udiv(n, ir.Constant(I64, 8)), ir.Constant(I64, half)))
                place = b.inttoptr(to, I32.as_pointer())
                b.store(b.mul(total, ir.Constant(I32, -excess)), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), emit

    return quantise  # type: ignore[no-any-return]


@cache
def make_pack_whole(excess: int, parts: int = 2, halves: int = 1) -> Code:
    """Makes the counterpart of `pack_floats` for whole numbers of 16 bits, in two parts, or of 8 bits, in one.

    It writes their parts [n], the upper one first, and the lanes' scales, float32. Sums of whole lanes follow, or of
    the first and then the second halves, times -`excess`, int32.
    """
    quantise = _make_quantise(excess, parts, halves)

    @code(*[INT] * 5)
    def pack_whole(values: int, first: int, count: int, n: int, out: int) -> None:
        scales = out + parts * n
        sums = scales + n // LANE_COLUMNS * 4
        for at in range(0, count, LANE_COLUMNS):
            lane = (first + at) // LANE_COLUMNS
            run = lane // LANES
            codes, step = out + run * RUN + lane % LANES * 4, lanes_of(run, n) * 4
            quantise(values + 4 * at, codes, n, step, scales + 4 * lane, sums + 4 * lane)

    return pack_whole


class _Emitter:
    """Writes the LLVM code that decodes one row to bf16 or float32."""

    def __init__(self, builder: Any, encoding: Encoding, instructions: Instructions, bf16: bool) -> None:
        self.b, self.encoding, self.size = builder, encoding, 2 if bf16 else 4
        self.v, self.lanes = CodeVectors(builder, encoding, instructions), instructions.lanes

    def row(self, w: Any, n: Any, out: Any) -> None:
        """Writes the n weights of the row at `w` to `out`."""
        b, encoding = self.b, self.encoding
        self.w, self.out = w, out
        self.affine = AffineVectors(self.v, encoding, n) if encoding.is_affine else None
        self.scales = b.add(w, b.udiv(b.mul(n, self.number(encoding.bits)), self.number(8)))
        runs, lanes = b.udiv(n, self.number(RUN)), b.udiv(b.urem(n, self.number(RUN)), self.number(LANE_COLUMNS))
        with cgutils.for_range(b, runs, intp=I64) as loop:
            for part in range(LANES // self.lanes):
                self.part(loop.index, self.number(LANES), part, None)
        for part in range(LANES // self.lanes):
            left = b.sub(lanes, self.number(part * self.lanes))
            for some in self.v.lanes_left(left):
                self.part(runs, lanes, part, some)

    def number(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def at(self, base: Any, run: Any, size: int, extra: int) -> Any:
        return self.b.add(base, self.b.add(self.b.mul(run, self.number(size)), self.number(extra)))

    def part(self, run: Any, lanes: Any, part: int, left: Any) -> None:
        """Decodes as many lanes of a run as a vector has; `left` of them are there."""
        b, first, encoding = self.b, part * self.lanes, self.encoding
        codes = self.at(self.w, run, RUN * encoding.bits // 8, first * (1 if encoding.name == "fp8" else 4))
        mask = None if left is None else self.v.first(left, self.lanes)
        if self.affine:
            values = self.affine.weights(codes, lanes, mask, self.affine.factors(self.w, run, first, left))
        else:
            scale_bytes = encoding.scale_bytes * LANE_COLUMNS * LANES // encoding.group
            scale = self.v.scales(self.at(self.scales, run, scale_bytes, first * scale_bytes // LANES), left)
            values = (b.fmul(weight, scale) for weight in self.v.columns(codes, lanes, mask))
        to = self.at(self.out, run, RUN * self.size, first * self.size)
        if PAIRS and self.size == 2 and left is None and self.lanes == LANES:
            self.store_pairs(list(values), to)
            return
        for column, value in enumerate(values):
            if self.size == 2:
                upper = b.lshr(round_bf16(b, value), self.v.splat(self.v.words, 16))
                value = b.trunc(upper, ir.VectorType(I16, self.lanes))
            self.v.store(b.add(to, b.mul(lanes, self.number(column * self.size))), value, mask)

    def store_pairs(self, columns: list[Any], to: Any) -> None:
        """Writes whole runs as bf16, by the instruction that rounds two columns. It takes the least numbers as 0."""
        kind = ir.VectorType(BFloat(), 2 * LANES)
        words = ir.VectorType(I32, LANES)
        for column in range(0, len(columns), 2):
            name, both = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", (columns[column + 1], columns[column])
            pair = self.b.bitcast(instruction(self.b, name, kind, both), words)
            self.v.store(self.b.add(to, self.number(column * LANES * 2)), pair)


def _row(encoding: Encoding, instructions: Instructions, bf16: bool) -> Callable[..., None]:
    @intrinsic
    def row(typing: Any, w: Any, n: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _Emitter(builder, encoding, instructions, bf16).row(*args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), emit

    return row  # type: ignore[no-any-return]


@cache
def make_unpack(encoding: Encoding, instructions: Instructions, bf16: bool) -> Code:
    """Makes unpack(w, stride, count, n, out): decodes `count` rows of n weights, `stride` bytes apart, to bf16 or
    float32, one after the other."""
    row, size = _row(encoding, instructions, bf16), 2 if bf16 else 4

    @code(*[INT] * 5)
    def unpack(w: int, stride: int, count: int, n: int, out: int) -> None:
        for number in range(count):
            row(w + number * stride, n, out + number * n * size)

    return unpack


@jit
def place(k: int, n: int) -> int:
    """Returns the index of element k of n in packed floats, and in decoded weights."""
    lane = k // LANE_COLUMNS
    run = lane // LANES
    return run * RUN + k % LANE_COLUMNS * lanes_of(run, n) + lane % LANES  # type: ignore[no-any-return]


@cache
def make_order(bf16: bool) -> Callable[[int, int, int, int], None]:
    """Makes order(source, from_bf16, n, out), which copies a vector into the order of decoded rows.

    It is bf16 or float32 at `source`, and becomes so at `out` as `bf16` says.
    """

    @jit
    def order(source: int, from_bf16: int, n: int, out: int) -> None:
        words, halves, to, narrow = u32_at(source), u16_at(source), u32_at(out), u16_at(out)
        for first in range(0, n, RUN):
            lanes = lanes_of(first // RUN, n)
            for lane in range(lanes):
                start, begin = first + lane * LANE_COLUMNS, first + lane
                for k in range(LANE_COLUMNS):
                    if bf16 and from_bf16:
                        narrow[begin + k * lanes] = halves[start + k]
                    elif bf16:
                        number = f32_of(words[start + k])
                        narrow[begin + k * lanes] = np.uint16(rounded(number) >> np.uint32(16))
                    elif from_bf16:
                        to[begin + k * lanes] = np.uint32(halves[start + k]) << np.uint32(16)
                    else:
                        to[begin + k * lanes] = words[start + k]

    return order  # type: ignore[no-any-return]


@cache
def make_scatter(bf16: bool, pairs: bool = PAIRS) -> Callable[..., None]:
    """Makes scatter(panel, stride, first, count, n, rows, row_stride, columns).

    It puts elements first:first + count of n into a panel in the order of decoded rows. An element is a row of
    `columns` float32; the panel's lines are `stride` bytes apart.
    """
    paired = bf16 and pairs
    _, lines = make_fill(bf16, pairs)

    @jit
    def scatter(
        panel: int, stride: int, first: int, count: int, n: int, rows: int, row_stride: int, columns: int
    ) -> None:
        lanes = lanes_of(first // RUN, n)
        if paired and lanes % 2 == 0 and first % (2 * LANE_COLUMNS) == count % (2 * LANE_COLUMNS) == 0:
            for begin in range(0, count, 2 * LANE_COLUMNS):  # two lanes, whose columns lie side by side
                for k in range(begin, begin + LANE_COLUMNS):
                    low = rows + k * row_stride
                    lines(panel, stride, place(first + k, n) >> 1, low, low + LANE_COLUMNS * row_stride, columns)
            return
        for k in range(count):
            v, at = f32_at(rows + k * row_stride), place(first + k, n)
            if paired:
                narrow = u16_at(panel + (at >> 1) * stride + 2 * (at & 1))
                for i in range(columns):
                    narrow[2 * i] = np.uint16(rounded(v[i]) >> np.uint32(16))
            else:
                wide = f32_at(panel + at * stride)
                for i in range(columns):
                    wide[i] = v[i]

    return scatter  # type: ignore[no-any-return]


@jit
def borrow(flags: int, count: int) -> int:
    """Takes one of `count` things, of which fewer are in use, and returns its number; `flags` [count] are int64."""
    while True:
        for number in range(count):
            if atomic_replace(flags + 8 * number, 0, 1):
                return number


@jit
def give_back(flags: int, number: int) -> None:
    """Releases the memory that `borrow` returned."""
    atomic_store(flags + 8 * number, 0)
