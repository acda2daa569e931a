"""Multiplies rows of bf16 with the columns of a panel by Intel's AMX, in tiles of 16 rows of 64 bytes.

A tile product adds to C [rows, 16] float32 the product of A [rows, 32] and B [32, 16]. B's elements lie in pairs, as in
a panel of `gemm_tile`. The products of first and of second elements are added apart, and then to the sum. Shapes are
configured for all registers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from edgemoe.jit.compile_target import AMX, TARGET
from edgemoe.jit.intrinsics import INT, LANES, cgutils, instruction, intrinsic, jit, prefetch, types
from edgemoe.jit.object_cache import Code, code

HERE = TARGET.has(*AMX)
ROWS = 16  # of a tile at most
ROW_BYTES = 64
TOGETHER = 8  # tiles side by side: their part of a panel, 16 KiB, stays in the first-level cache
SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # registers of C, row by row, of A and of B
_I8, _I16, _I64 = (ir.IntType(bits) for bits in (8, 16, 64))
_COLUMN_BYTES, _ROWS = 16, 48  # places in a configuration of 64 bytes


class _TileWriter:
    """Writes instructions on tiles. Registers are numbers."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def _call(self, name: str, *arguments: Any) -> None:
        instruction(self.b, f"llvm.x86.{name}", ir.VoidType(), arguments)

    def _pointer(self, address: Any) -> Any:
        return self.b.inttoptr(address, _I8.as_pointer())

    def zero(self, register: int) -> None:
        self._call("tilezero", _number(register))

    def load(self, register: int, address: Any, stride: Any) -> None:
        """Reads a tile whose rows are `stride` bytes apart."""
        self._call("tileloadd64", _number(register), self._pointer(address), stride)

    def store(self, register: int, address: Any, stride: Any) -> None:
        self._call("tilestored64", _number(register), self._pointer(address), stride)

    def add_product(self, sums: int, left: int, right: int) -> None:
        """Adds a product of A and B to C."""
        self._call("tdpbf16ps", *map(_number, (sums, left, right)))


def _number(register: int) -> Any:
    return ir.Constant(_I8, register)


@intrinsic
def _configure(typing: Any, rows: Any, words: Any) -> Any:
    """Gives all tiles their shapes: A and C have `rows` rows, A's have `words` words of 4 bytes, B has as many rows."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        rows, words = args
        kind = ir.ArrayType(_I8, 64)
        room = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, [1] + 63 * [0]), room, align=1)
        start = builder.ptrtoint(room, _I64)

        def put(place: int, value: Any) -> None:
            to = builder.add(start, ir.Constant(_I64, place))
            builder.store(value, builder.inttoptr(to, value.type.as_pointer()), align=1)

        height, depth = builder.trunc(rows, _I8), builder.trunc(words, _I8)
        width = builder.trunc(builder.mul(words, ir.Constant(_I64, 4)), _I16)
        for register in (*SUMS, *LEFT, *RIGHT):
            put(_ROWS + register, depth if register in RIGHT else height)
            put(_COLUMN_BYTES + 2 * register, width if register in LEFT else ir.Constant(_I16, ROW_BYTES))
        instruction(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [builder.bitcast(room, _I8.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _release(typing: Any) -> Any:
    """Clears the tiles, so that the system need not keep them when it changes the thread."""

    def emit(context: Any, builder: Any, _: Any, __: Any) -> Any:
        instruction(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), emit


def _tile_block(down: int, across: int) -> Callable[..., None]:
    """Makes the intrinsic that multiplies `down` tiles of rows with `across` of columns in `steps` steps.

    A step is a tile of A and of B, as they are configured. It prefetches as many rows at `soon`.
    """

    @intrinsic
    def tile_block(
        typing: Any,
        a: Any,
        a_stride: Any,
        soon: Any,
        b: Any,
        b_stride: Any,
        steps: Any,
        c: Any,
        c_stride: Any,
        fresh: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            a, a_stride, soon, b, b_stride, steps, c, c_stride, fresh = args
            tiles = _TileWriter(builder)

            def number(value: int) -> Any:
                return ir.Constant(_I64, value)

            lefts = [builder.add(a, builder.mul(a_stride, number(i * ROWS))) for i in range(down)]
            places = [
                (
                    SUMS[2 * i + j],
                    builder.add(builder.add(c, builder.mul(c_stride, number(i * ROWS))), number(64 * j)),
                )
                for i in range(down)
                for j in range(across)
            ]
            with builder.if_else(builder.icmp_signed("!=", fresh, number(0))) as (new, old):
                with new:
                    for register, _place in places:
                        tiles.zero(register)
                with old:
                    for register, place in places:
                        tiles.load(register, place, c_stride)
            with cgutils.for_range(builder, steps, intp=_I64) as loop:
                along = builder.mul(loop.index, number(ROW_BYTES))
                panel = builder.add(b, builder.mul(loop.index, builder.mul(b_stride, number(ROWS))))
                for i, left in enumerate(lefts):
                    tiles.load(LEFT[i], builder.add(left, along), a_stride)
                for j in range(across):
                    tiles.load(RIGHT[j], builder.add(panel, number(64 * j)), b_stride)
                coming = builder.add(soon, along)
                for row in range(down * ROWS):
                    prefetch(builder, builder.add(coming, builder.mul(a_stride, number(row))))
                for i in range(down):
                    for j in range(across):
                        tiles.add_product(SUMS[2 * i + j], LEFT[i], RIGHT[j])
            for register, place in places:
                tiles.store(register, place, c_stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return tile_block  # type: ignore[no-any-return]


@cache
def make_tile() -> Code:
    """Makes the same as `gemm_tile.make_tile`, for rows of bf16 and panels of pairs."""
    four, upper, left, one = _tile_block(2, 2), _tile_block(1, 2), _tile_block(2, 1), _tile_block(1, 1)

    @jit
    def strip(
        tall: bool,
        a: int,
        a_stride: int,
        soon: int,
        b: int,
        b_stride: int,
        steps: int,
        c: int,
        c_stride: int,
        columns: int,
        fresh: int,
    ) -> None:
        column = 0
        while column < columns:
            lines, into = b + 4 * column, c + 4 * column
            two = columns - column >= 2 * LANES
            if tall and two:
                four(a, a_stride, soon, lines, b_stride, steps, into, c_stride, fresh)
            elif tall:
                left(a, a_stride, soon, lines, b_stride, steps, into, c_stride, fresh)
            elif two:
                upper(a, a_stride, soon, lines, b_stride, steps, into, c_stride, fresh)
            else:
                one(a, a_stride, soon, lines, b_stride, steps, into, c_stride, fresh)
            column += 2 * LANES if two else LANES
            soon = a  # prefetched already

    @code(*[INT] * 11)
    def tile(
        a: int,
        a_stride: int,
        rows: int,
        following: int,
        b: int,
        b_stride: int,
        words: int,
        c: int,
        c_stride: int,
        columns: int,
        fresh: int,
    ) -> None:
        steps, shape = (words + ROWS - 1) // ROWS, 0
        for step in range(0, steps, TOGETHER):
            first = step * ROWS
            some = min(TOGETHER * ROWS, words - first)
            here, lines, new = a + 4 * first, b + first * b_stride, fresh if step == 0 else 0
            row = 0
            while row < rows:
                height = min(ROWS, rows - row)
                tall = rows - row >= 2 * ROWS
                together = 2 * ROWS if tall else height
                at, to, soon = here + row * a_stride, c + row * c_stride, here + (row + together) * a_stride
                if row + together >= rows:
                    soon = here + TOGETHER * ROW_BYTES if step + TOGETHER < steps else following
                whole, rest = some // ROWS, some % ROWS
                if whole:
                    if shape != height:
                        _configure(height, ROWS)
                        shape = height
                    strip(tall, at, a_stride, soon, lines, b_stride, whole, to, c_stride, columns, new)
                if rest:
                    _configure(height, rest)
                    shape, begun = 0, whole * ROWS
                    last = lines + begun * b_stride
                    strip(
                        tall,
                        at + 4 * begun,
                        a_stride,
                        at,
                        last,
                        b_stride,
                        1,
                        to,
                        c_stride,
                        columns,
                        0 if whole else new,
                    )
                row += together
        _release()

    return tile
