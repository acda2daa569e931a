"""Carries a matrix of a state through one token: writes it new, and reads it for this token and for the next.

Columns of a state go their own ways, so COLUMNS of them fit the first-level cache, and their sums the registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgemoe.jit.intrinsics import F32, I64, LANES, WIDE, intrinsic, multiply_add, types

VECTORS = 4 if WIDE else 2  # of columns
COLUMNS = VECTORS * LANES
TOGETHER = 2  # rows of one turn, each with sums of its own: an addition waits for the one before
_I32 = ir.IntType(32)


class _Scan:
    """Writes the LLVM code of the loop over rows."""

    def __init__(self, builder: Any) -> None:
        self.b, self.vector = builder, ir.VectorType(F32, LANES)

    def size(self, count: int) -> Any:
        return ir.Constant(I64, count)

    def place(self, base: Any, number: int, kind: Any) -> Any:
        """Returns the pointer to the vector or float of this number at an address."""
        size = 4 * (LANES if kind is self.vector else 1)
        return self.b.inttoptr(self.b.add(base, self.size(number * size)), kind.as_pointer())

    def load(self, base: Any, number: int = 0) -> Any:
        return self.b.load(self.place(base, number, self.vector), align=4)

    def spread(self, value: Any) -> Any:
        """Returns a float in all lanes."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))

    def run(
        self, state: Any, rows: Any, decay: Any, given: Any, change: Any, readers: Sequence[Any], outs: Sequence[Any]
    ) -> None:
        """Computes state = decay * state + given change^T, and each out = state^T reader; `rows` are even."""
        b, nothing = self.b, ir.Constant(self.vector, [0.0] * LANES)
        kept, changes = self.spread(decay), [self.load(change, k) for k in range(VECTORS)]
        entry, body, after = b.block, b.append_basic_block("rows"), b.append_basic_block("summed")
        b.branch(body)
        b.position_at_end(body)
        row = b.phi(I64)
        sums = [b.phi(self.vector) for _ in range(TOGETHER * len(readers) * VECTORS)]
        along, line = b.mul(row, self.size(4)), b.add(state, b.mul(row, self.size(4 * COLUMNS)))
        totals: list[Any] = []
        for each in range(TOGETHER):
            key, *asked = (
                self.spread(b.load(self.place(b.add(base, along), each, F32), align=4)) for base in (given, *readers)
            )
            for k in range(VECTORS):
                number = each * VECTORS + k
                old = b.fmul(kept, self.load(line, number), flags=("contract",))
                new = b.fadd(b.fmul(key, changes[k], flags=("contract",)), old, flags=("contract",))
                b.store(new, self.place(line, number, self.vector), align=4)
                for factor in asked:
                    totals.append(multiply_add(b, factor, new, sums[len(totals)]))
        following = b.add(row, self.size(TOGETHER))
        for phi, first, then in zip(
            (row, *sums), (self.size(0), *[nothing] * len(sums)), (following, *totals), strict=True
        ):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, body)
        b.cbranch(b.icmp_signed("<", following, rows), body, after)
        b.position_at_end(after)
        for number, (odd, even) in enumerate(zip(totals[len(totals) // 2 :], totals, strict=False)):
            k, j = divmod(number, len(readers))
            b.store(b.fadd(even, odd), self.place(outs[j], k, self.vector), align=4)


@intrinsic
def scan(typing: Any, state: Any, rows: Any, decay: Any, given: Any, change: Any, asked: Any, out: Any) -> Any:
    """Computes state = decay * state + given change^T, then out = state^T asked.

    `state` [rows, COLUMNS], `given` and `asked` [rows], `change` and `out` as wide as it; `rows` are even.
    """

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        state, rows, decay, given, change, *rest = args
        _Scan(builder).run(state, rows, decay, given, change, rest[::2], rest[1::2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, *[types.int64] * 4), emit


@intrinsic
def scan_for_two(
    typing: Any, state: Any, rows: Any, decay: Any, given: Any, change: Any, asked: Any, out: Any, other: Any, too: Any
) -> Any:
    """Does the same as `scan`, and computes `too` = state^T `other`."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        state, rows, decay, given, change, *rest = args
        _Scan(builder).run(state, rows, decay, given, change, rest[::2], rest[1::2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, *[types.int64] * 6), emit
