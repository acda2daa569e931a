"""Fills panels, whose columns are vectors of tokens, for products with the rows of a matrix (see `gemm_tile`).

Squares of 16 x 16 words of 32 bits are transposed in registers: between vectors of tokens and lines of a panel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from edgemoe.jit.intrinsics import (
    F32,
    I64,
    LANES,
    PAIRS,
    cgutils,
    f32_at,
    i64_at,
    intrinsic,
    jit,
    rounded,
    types,
    u32_at,
)

SIDE = 16  # rows and columns
GROUP = 2 * LANES  # tokens of a group at most: the columns of a panel
LINE = 4 * GROUP  # bytes of a panel's line
_I8, _I32 = ir.IntType(8), ir.IntType(32)
_QUARTER, _WHOLE = ir.VectorType(_I32, 4), ir.VectorType(_I32, SIDE)
_HIGH = 0xFFFF0000
_UPPER = np.uint32(_HIGH)


class _Emitter:
    """Writes the LLVM code, which reads quarters of rows and mixes them."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def place(self, address: Any, offset: int, kind: Any) -> Any:
        pointer = self.b.gep(self.b.inttoptr(address, _I8.as_pointer()), [ir.Constant(I64, offset)])
        return self.b.bitcast(pointer, kind.as_pointer())

    def mixed(self, left: Any, right: Any, which: list[int]) -> Any:
        """Returns the chosen ones of the words of both."""
        return self.b.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, len(which)), which))

    def columns(self, rows: list[Any]) -> list[Any]:
        """Returns the 16 columns of the rows at 16 addresses."""
        found = []
        for quarter in range(4):
            four = []
            for row in range(4):  # of which each fourth one joins a vector
                parts = [
                    self.b.load(self.place(rows[row + 4 * lane], 16 * quarter, _QUARTER), align=4) for lane in range(4)
                ]
                halves = [self.mixed(parts[i], parts[i + 1], list(range(8))) for i in (0, 2)]
                four.append(self.mixed(halves[0], halves[1], list(range(16))))
            pairs = [
                [self.by_quarters(four[i], four[i + 1], which) for which in ((0, 16, 1, 17), (2, 18, 3, 19))]
                for i in (0, 2)
            ]
            for column in range(4):
                which = (2, 3, 18, 19) if column % 2 else (0, 1, 16, 17)
                found.append(self.by_quarters(pairs[0][column // 2], pairs[1][column // 2], which))
        return found

    def by_quarters(self, left: Any, right: Any, which: tuple[int, ...]) -> Any:
        return self.mixed(left, right, [4 * quarter + each for quarter in range(4) for each in which])

    def write(self, columns: list[Any], to: Any, stride: Any, split: bool) -> None:
        """Writes columns `stride` bytes apart; if `split`, the low and then the high half of each word as float32."""
        lines = []
        for column in columns:
            low, high = ir.Constant(_WHOLE, [16] * SIDE), ir.Constant(_WHOLE, [_HIGH] * SIDE)
            lines.extend([self.b.shl(column, low), self.b.and_(column, high)] if split else [column])
        for number, line in enumerate(lines):
            place = self.b.add(to, self.b.mul(stride, ir.Constant(I64, number)))
            self.b.store(line, self.place(place, 0, _WHOLE), align=4)


@intrinsic
def room_for_rows(typing: Any) -> Any:
    """Returns the address of 16 int64 on the stack, for addresses of rows."""

    def emit(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(I64, SIDE)), I64)

    return types.int64(), emit


@intrinsic
def room_for_square(typing: Any) -> Any:
    """Returns the address of 16 x 16 words on the stack."""

    def emit(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.VectorType(F32, SIDE), size=SIDE), I64)

    return types.int64(), emit


@intrinsic
def transpose(typing: Any, source: Any, stride: Any, to: Any, to_stride: Any) -> Any:
    """Writes the transpose of 16 rows of 16 words; rows are `stride` and `to_stride` bytes apart."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, stride, to, to_stride = args
        write = _Emitter(builder)
        rows = [builder.add(source, builder.mul(stride, ir.Constant(I64, row))) for row in range(SIDE)]
        write.write(write.columns(rows), to, to_stride, split=False)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def add_words(typing: Any, to: Any, source: Any) -> Any:
    """Adds 16 float32 to others."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        kind, write = ir.VectorType(F32, SIDE), _Emitter(builder)
        places = [write.place(each, 0, kind) for each in args]
        total = builder.fadd(*(builder.load(place, align=4) for place in places))
        builder.store(total, places[0], align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@cache
def make_gather(split: bool) -> Callable[[int, int, int, int], None]:
    """Makes gather(rows, offset, to, stride): column i of 16 rows becomes line i, or if `split`, two lines of float32.

    `rows` [16] int64 are the rows' addresses, of which 16 words are read `offset` bytes on. Lines are `stride` bytes
    apart.
    """

    @intrinsic
    def gather(typing: Any, rows: Any, offset: Any, to: Any, stride: Any) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            rows, offset, to, stride = args
            write = _Emitter(builder)
            places = [builder.load(write.place(rows, 8 * row, I64), align=8) for row in range(SIDE)]
            columns = write.columns([builder.add(place, offset) for place in places])
            write.write(columns, to, stride, split)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), emit

    return gather  # type: ignore[no-any-return]


def panel_words(elements: int, bf16: bool, pairs: bool = PAIRS) -> int:
    """Returns the number of lines of a panel whose columns have `elements` elements."""
    return elements // 2 if bf16 and pairs else elements


@cache
def make_fill(bf16: bool, pairs: bool = PAIRS) -> tuple[Callable[..., None], Callable[..., None]]:
    """Makes the functions that put vectors into a panel whose lines are `stride` bytes apart. Returns both.

    * column(panel, stride, number, source, words) writes a vector in the model's type as column `number`
    * lines(panel, stride, pair, low, high, count) writes elements 2 * pair and 2 * pair + 1 of `count` columns

    `low` [count] and `high` [count] are float32.
    """
    paired, split = bf16 and pairs, bf16 and not pairs

    @jit
    def column(panel: int, stride: int, number: int, source: int, words: int) -> None:
        values, to = u32_at(source), panel + 4 * number
        if split:
            for word in range(words):
                u32_at(to + 2 * word * stride)[0] = values[word] << np.uint32(16)
                u32_at(to + (2 * word + 1) * stride)[0] = values[word] & _UPPER
        else:
            for word in range(words):
                u32_at(to + word * stride)[0] = values[word]

    @jit
    def lines(panel: int, stride: int, pair: int, low: int, high: int, count: int) -> None:
        l, h = f32_at(low), f32_at(high)  # noqa: E741
        if paired:
            to = u32_at(panel + pair * stride)
            for k in range(count):
                to[k] = (rounded(l[k]) >> np.uint32(16)) | rounded(h[k])
        else:
            first, second = f32_at(panel + 2 * pair * stride), f32_at(panel + (2 * pair + 1) * stride)
            for k in range(count):
                first[k], second[k] = l[k], h[k]

    return column, lines


@cache
def make_fill_panel(bf16: bool, pairs: bool = PAIRS) -> Callable[..., None]:
    """Makes fill(panel, x, line, index, first, count, words), which puts tokens into a panel as its columns.

    Token j is row `first` + j of `x`, or row index[first + j] where `index` is no 0; rows are `line` bytes apart.
    """
    column, _ = make_fill(bf16, pairs)
    gather, lines = make_gather(bf16 and not pairs), 2 if bf16 and not pairs else 1

    @jit
    def fill(panel: int, x: int, line: int, index: int, first: int, count: int, words: int) -> None:
        sixteen = room_for_rows()
        rows, whole = i64_at(sixteen), words - words % SIDE
        for begin in range(0, count, SIDE):
            for j in range(SIDE):
                number = first + min(begin + j, count - 1)
                if index:
                    number = i64_at(index)[number]
                rows[j] = x + number * line
            for word in range(0, whole, SIDE):
                gather(sixteen, 4 * word, panel + 4 * begin + word * lines * LINE, LINE)
            if whole < words:
                for j in range(min(SIDE, count - begin)):
                    column(panel + whole * lines * LINE, LINE, begin + j, rows[j] + 4 * whole, words - whole)

    return fill  # type: ignore[no-any-return]
