"""Multiplies rows of a matrix, read in place, with many vectors, the columns of a panel.

A row is read in words of 32 bits: one float32 or two bf16. Each word is broadcast and multiplied with a line of the
panel, so that sums stay in registers until the row ends. A line holds one float32 of every column; a word of bf16 takes
two lines. With AVX-512 BF16, a line holds two bf16 of every column. Sums are float32, in the order of the elements;
`amx` has another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from edgemoe.jit.intrinsics import (
    F32,
    I64,
    INT,
    LANES,
    PAIRS,
    WIDE,
    BFloat,
    cgutils,
    intrinsic,
    multiply_add,
    prefetch,
    types,
)
from edgemoe.jit.object_cache import Code, code
from edgemoe.kernels.cpu import amx

ROWS = 8 if WIDE else 4  # rows whose sums for two vectors of columns fit into the registers


class _Emitter:
    """Writes the LLVM code of the loop for `rows` rows and `vectors` vectors of columns."""

    def __init__(self, builder: Any, rows: int, vectors: int, bf16: bool, paired: bool) -> None:
        self.b, self.rows, self.vectors, self.bf16, self.paired = builder, rows, vectors, bf16, paired
        self.vector, self.words = ir.VectorType(F32, LANES), ir.VectorType(ir.IntType(32), LANES)
        self.lines = 2 if bf16 and not paired else 1  # of the panel, for one word of a row

    def at(self, base: Any, offset: Any, kind: Any) -> Any:
        return self.b.inttoptr(self.b.add(base, offset), kind.as_pointer())

    def load(self, base: Any, offset: Any, kind: Any) -> Any:
        return self.b.load(self.at(base, offset, kind), align=4)

    def spread(self, word: Any) -> list[Any]:
        """Returns a word in all lanes, once for each line of the panel that it is multiplied with."""
        undefined = ir.Constant(self.words, ir.Undefined)
        first = self.b.insert_element(undefined, word, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(self.words, [0] * LANES)
        every = self.b.shuffle_vector(first, undefined, zeros)
        if self.lines == 1:
            return [every if self.paired else self.b.bitcast(every, self.vector)]
        low = self.b.shl(every, ir.Constant(self.words, [16] * LANES))
        high = self.b.and_(every, ir.Constant(self.words, [0xFFFF0000] * LANES))
        return [self.b.bitcast(half, self.vector) for half in (low, high)]

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        if not self.paired:
            return multiply_add(self.b, a, b, c)
        pairs = ir.VectorType(BFloat(), 2 * LANES)
        kind = ir.FunctionType(self.vector, [self.vector, pairs, pairs])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(function, [c, self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)])

    def size(self, count: int) -> Any:
        return ir.Constant(I64, count)

    def run(
        self, a: Any, a_stride: Any, soon: Any, b: Any, b_stride: Any, words: Any, c: Any, c_stride: Any, fresh: Any
    ) -> None:
        """Computes c [rows, vectors] = a . b, or += where `fresh` is 0. Prefetches as much as `a` has at `soon`."""
        build, kind = self.b, self.words if self.paired else self.vector
        starts = [build.add(a, build.mul(a_stride, self.size(row))) for row in range(self.rows)]
        places = [
            self.at(build.add(c, build.mul(c_stride, self.size(row))), self.size(4 * LANES * i), self.vector)
            for row in range(self.rows)
            for i in range(self.vectors)
        ]
        is_fresh, nothing = build.icmp_signed("!=", fresh, self.size(0)), ir.Constant(self.vector, [0.0] * LANES)
        initial = [build.select(is_fresh, nothing, build.load(place, align=4)) for place in places]
        entry, body, after = build.block, build.append_basic_block("body"), build.append_basic_block("after")
        build.branch(body)
        build.position_at_end(body)
        word, line = build.phi(I64), build.phi(I64)
        sums = [build.phi(self.vector) for _ in places]
        prefetch(build, build.add(soon, build.mul(word, self.size(4 * self.rows))))
        columns = [
            [
                self.load(build.add(line, build.mul(b_stride, self.size(k))), self.size(4 * LANES * i), kind)
                for i in range(self.vectors)
            ]
            for k in range(self.lines)
        ]
        totals: list[Any] = []
        for row, start in enumerate(starts):
            parts = self.spread(self.load(start, build.mul(word, self.size(4)), ir.IntType(32)))
            for i in range(self.vectors):
                total = sums[row * self.vectors + i]
                for k in range(self.lines):
                    total = self.multiply_add(parts[k], columns[k][i], total)
                totals.append(total)
        following, next_line = (
            build.add(word, self.size(1)),
            build.add(line, build.mul(b_stride, self.size(self.lines))),
        )
        for phi, first, then in zip(
            (word, line, *sums), (self.size(0), b, *initial), (following, next_line, *totals), strict=True
        ):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, body)
        build.cbranch(build.icmp_signed("<", following, words), body, after)
        build.position_at_end(after)
        for place, total in zip(places, totals, strict=True):
            build.store(total, place, align=4)


def _block(rows: int, vectors: int, bf16: bool, paired: bool) -> Callable[..., None]:
    """Makes the intrinsic that runs the loop of `_Emitter` for `rows` rows and `vectors` vectors."""

    @intrinsic
    def block(
        typing: Any,
        a: Any,
        a_stride: Any,
        soon: Any,
        b: Any,
        b_stride: Any,
        words: Any,
        c: Any,
        c_stride: Any,
        fresh: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _Emitter(builder, rows, vectors, bf16, paired).run(*args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return block  # type: ignore[no-any-return]


@cache
def make_tile(bf16: bool, pairs: bool = PAIRS, tiles: bool = amx.HERE) -> Code:
    """Makes tile(a, a_stride, rows, following, b, b_stride, words, c, c_stride, columns, fresh).

    It computes c = a . b if `fresh` is 1, c += a . b if 0. Beside the last rows it prefetches from `following`. Call it
    by its address with `call_rows`.

    * `a` has `rows` rows of `words` words, `a_stride` bytes apart
    * `b` is a panel, its lines `b_stride` bytes apart
    * `c` [rows, columns] is float32, its rows `c_stride` bytes apart
    * `columns` is a multiple of LANES
    """
    paired = bf16 and pairs
    if paired and tiles:
        return amx.tile
    wide, narrow = _block(ROWS, 2, bf16, paired), _block(ROWS, 1, bf16, paired)
    wide_row, narrow_row = _block(1, 2, bf16, paired), _block(1, 1, bf16, paired)

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
        row = 0
        while row < rows:
            together = ROWS if rows - row >= ROWS else 1
            at, to, soon = a + row * a_stride, c + row * c_stride, a + (row + together) * a_stride
            if row + together >= rows:
                soon = following
            column = 0
            while column < columns:
                lines, into = b + 4 * column, to + 4 * column
                two = columns - column >= 2 * LANES
                if together == ROWS and two:
                    wide(at, a_stride, soon, lines, b_stride, words, into, c_stride, fresh)
                elif together == ROWS:
                    narrow(at, a_stride, soon, lines, b_stride, words, into, c_stride, fresh)
                elif two:
                    wide_row(at, a_stride, soon, lines, b_stride, words, into, c_stride, fresh)
                else:
                    narrow_row(at, a_stride, soon, lines, b_stride, words, into, c_stride, fresh)
                column += 2 * LANES if two else LANES
                soon = at  # prefetched already
            row += together

    return tile
