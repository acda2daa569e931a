"""Writes the LLVM code of products of tiles, which Intel's AMX computes in registers of up to 16 rows of 64 bytes.

A tile product adds to float32 or int32 C [rows, 16] the product of A [rows, K] and B [K, 16]. Elements of bf16 lie in
B's rows in pairs, bytes in fours, as in a panel of `gemm_tile`. Shapes are configured for all registers at once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgemoe.jit.compile_target import AMX, TARGET
from edgemoe.jit.intrinsics import cgutils, instruction, intrinsic, types

HERE = TARGET.has(*AMX)
ROWS = 16  # of a tile at most
ROW_BYTES = 64
SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # registers of C, row by row, of A and of B
_I8, _I16, _I64 = (ir.IntType(bits) for bits in (8, 16, 64))
_PALETTE, _COLUMN_BYTES, _ROWS = 0, 16, 48  # places in a configuration of 64 bytes


class TileWriter:
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

    def add_product(self, kind: str, sums: int, left: int, right: int) -> None:
        """Adds a product of A and B to C; `kind` is bf16ps, bssd for signed bytes, bsud where B's are unsigned."""
        self._call(f"tdp{kind}", *map(_number, (sums, left, right)))


def _number(register: int) -> Any:
    return ir.Constant(_I8, register)


@intrinsic
def configure(typing: Any, rows: Any, words: Any) -> Any:
    """Gives all tiles their shapes: A and C have `rows` rows; A's rows have `words` words of 4 bytes, B as many rows."""

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
def release(typing: Any) -> Any:
    """Clears the tiles, so that the system need not keep them when it changes the thread."""

    def emit(context: Any, builder: Any, _: Any, __: Any) -> Any:
        instruction(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), emit
