"""Multiplies rows of bf16 with the columns of a panel by Intel's AMX, in tiles of 16 rows of 64 bytes.

A tile product adds to C [rows, 16] float32 the product of A [rows, 32] and B [32, 16]. B's elements lie in pairs, as in
a panel of `gemm_tile`. The products of first and of second elements are added apart, and then to the sum. Shapes are
configured for all registers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from edgemoe.jit.compile_target import AMX, TARGET
from edgemoe.jit.intrinsics import INT, LANES, cgutils, instruction, intrinsic, jit, prefetch, types
from edgemoe.jit.object_cache import code

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


class _Block:
    """Writes the LLVM code that multiplies `down` tiles of rows with `across` tiles of columns."""

    def __init__(self, builder: Any, down: int, across: int) -> None:
        self.b, self.down, self.across, self.tiles = builder, down, across, _TileWriter(builder)
        self.pairs = [(i, j) for i in range(down) for j in range(across)]

    def at(self, base: Any, stride: Any, rows: int, extra: int = 0) -> Any:
        """Returns the address `rows` rows and `extra` bytes on."""
        moved = self.b.add(base, self.b.mul(stride, ir.Constant(_I64, rows)))
        return self.b.add(moved, ir.Constant(_I64, extra))

    def run(
        self, a: Any, a_stride: Any, soon: Any, b: Any, b_stride: Any, steps: Any, c: Any, c_stride: Any, fresh: Any
    ) -> None:
        """Writes c = a . b in `steps` steps of a tile each, or += where `fresh` is 0; prefetches rows at `soon`."""
        places = [(SUMS[2 * i + j], self.at(c, c_stride, i * ROWS, j * ROW_BYTES)) for i, j in self.pairs]
        with self.b.if_else(self.b.icmp_signed("!=", fresh, ir.Constant(_I64, 0))) as (new, old):
            with new:
                for register, _ in places:
                    self.tiles.zero(register)
            with old:
                for register, place in places:
                    self.tiles.load(register, place, c_stride)
        with cgutils.for_range(self.b, steps, intp=_I64) as loop:
            along = self.b.mul(loop.index, ir.Constant(_I64, ROW_BYTES))
            panel = self.b.add(b, self.b.mul(loop.index, self.b.mul(b_stride, ir.Constant(_I64, ROWS))))
            self.step(self.b.add(a, along), a_stride, self.b.add(soon, along), panel, b_stride)
        for register, place in places:
            self.tiles.store(register, place, c_stride)

    def step(self, a: Any, a_stride: Any, soon: Any, panel: Any, b_stride: Any) -> None:
        """Writes the products of one tile of each row with one of each column."""
        for i in range(self.down):
            self.tiles.load(LEFT[i], self.at(a, a_stride, i * ROWS), a_stride)
        for j in range(self.across):
            self.tiles.load(RIGHT[j], self.at(panel, b_stride, 0, j * ROW_BYTES), b_stride)
        for row in range(self.down * ROWS):
            prefetch(self.b, self.at(soon, a_stride, row))
        for i, j in self.pairs:
            self.tiles.add_product(SUMS[2 * i + j], LEFT[i], RIGHT[j])


def _block(down: int, across: int) -> Callable[..., None]:
    """Makes the intrinsic that runs `_Block`."""

    @intrinsic
    def block(
        typing: Any,
        a: Any,
        a_stride: Any,
        soon: Any,
        b: Any,
        b_stride: Any,
        steps: Any,
        c: Any,
        c_stride: Any,
        new: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _Block(builder, down, across).run(*args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return block  # type: ignore[no-any-return]


_FOUR, _UPPER, _LEFT, _ONE = _block(2, 2), _block(1, 2), _block(2, 1), _block(1, 1)


@jit
def _multiply_strip(
    tall: bool,
    a: int,
    a_stride: int,
    soon: int,
    b: int,
    b_stride: int,
    steps: int,
    c: int,
    c_stride: int,
    n: int,
    new: int,
) -> None:
    """Multiplies 32 rows if `tall`, else at most 16, with `n` columns."""
    column = 0
    while column < n:
        lines, into = b + 4 * column, c + 4 * column
        two = n - column >= 2 * LANES
        if tall and two:
            _FOUR(a, a_stride, soon, lines, b_stride, steps, into, c_stride, new)
        elif tall:
            _LEFT(a, a_stride, soon, lines, b_stride, steps, into, c_stride, new)
        elif two:
            _UPPER(a, a_stride, soon, lines, b_stride, steps, into, c_stride, new)
        else:
            _ONE(a, a_stride, soon, lines, b_stride, steps, into, c_stride, new)
        column += 2 * LANES if two else LANES
        soon = a  # prefetched already


@jit
def _multiply_rows(
    a: int,
    a_stride: int,
    rows: int,
    coming: int,
    b: int,
    b_stride: int,
    words: int,
    c: int,
    c_stride: int,
    n: int,
    new: int,
) -> None:
    """Multiplies `words` words of all rows with `n` columns; prefetches rows at `coming` beside the last ones."""
    row = shape = 0
    whole, rest = words // ROWS, words % ROWS
    begun = whole * ROWS
    while row < rows:
        height, tall = min(ROWS, rows - row), rows - row >= 2 * ROWS
        together = 2 * ROWS if tall else height
        at, to, soon = a + row * a_stride, c + row * c_stride, a + (row + together) * a_stride
        if row + together >= rows:
            soon = coming
        if whole:
            if shape != height:
                _configure(height, ROWS)
                shape = height
            _multiply_strip(tall, at, a_stride, soon, b, b_stride, whole, to, c_stride, n, new)
        if rest:
            _configure(height, rest)
            shape, last, left = 0, b + begun * b_stride, 0 if whole else new
            _multiply_strip(tall, at + 4 * begun, a_stride, at, last, b_stride, 1, to, c_stride, n, left)
        row += together


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
    """Does the same as `gemm_tile.make_tile`'s code, for rows of bf16 and panels of pairs."""
    for first in range(0, words, TOGETHER * ROWS):
        some, here, lines = min(TOGETHER * ROWS, words - first), a + 4 * first, b + first * b_stride
        coming = here + TOGETHER * ROW_BYTES if first + some < words else following
        new = fresh if first == 0 else 0
        _multiply_rows(here, a_stride, rows, coming, lines, b_stride, some, c, c_stride, columns, new)
    _release()
