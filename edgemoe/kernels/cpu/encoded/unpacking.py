"""Decodes rows of encoded weights, for tiles: their columns come in the order in which activations are packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from edgemoe.encodings.rows import LANES, RUN
from edgemoe.jit.intrinsics import I64, INT, cgutils, code, intrinsic, round_bf16, types
from edgemoe.jit.object_cache import Code
from edgemoe.kernels.cpu.encoded.vectors import I16, Instructions, Vectors
from edgemoe.types.encoding import LANE_COLUMNS, Encoding


class _Emitter:
    """Writes the LLVM code that decodes one row to bf16 or float32."""

    def __init__(self, builder: Any, encoding: Encoding, instructions: Instructions, bf16: bool) -> None:
        self.b, self.encoding, self.size = builder, encoding, 2 if bf16 else 4
        self.v, self.lanes = Vectors(builder, encoding, instructions), instructions.lanes

    def row(self, w: Any, n: Any, out: Any) -> None:
        """Writes the n weights of the row at `w` to `out`."""
        b, encoding = self.b, self.encoding
        self.w, self.out = w, out
        self.scales = b.add(w, b.udiv(b.mul(n, self.number(encoding.bits)), self.number(8)))
        runs, lanes = b.udiv(n, self.number(RUN)), b.udiv(b.urem(n, self.number(RUN)), self.number(LANE_COLUMNS))
        with cgutils.for_range(b, runs, intp=I64) as loop:
            for part in range(LANES // self.lanes):
                self.part(loop.index, self.number(LANES), part, None)
        for part in range(LANES // self.lanes):
            left = b.sub(lanes, self.number(part * self.lanes))
            with b.if_then(b.icmp_signed(">", left, self.number(0))):
                self.part(runs, lanes, part, left)

    def number(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def at(self, base: Any, run: Any, size: int, extra: int) -> Any:
        return self.b.add(base, self.b.add(self.b.mul(run, self.number(size)), self.number(extra)))

    def part(self, run: Any, lanes: Any, part: int, left: Any) -> None:
        """Decodes as many lanes of a run as a vector has; `left` of them are there."""
        b, first, encoding = self.b, part * self.lanes, self.encoding
        codes = self.at(self.w, run, RUN * encoding.bits // 8, first * (1 if encoding.name == "fp8" else 4))
        scale_bytes = encoding.scale_bytes * LANE_COLUMNS * LANES // encoding.group
        scale = self.v.scales(self.at(self.scales, run, scale_bytes, first * scale_bytes // LANES), left)
        mask = None if left is None else self.v.first(left, self.lanes)
        to = self.at(self.out, run, RUN * self.size, first * self.size)
        for column, weight in enumerate(self.v.columns(codes, lanes, mask)):
            value = b.fmul(weight, scale)
            if self.size == 2:
                upper = b.lshr(round_bf16(b, value), self.v.splat(self.v.words, 16))
                value = b.trunc(upper, ir.VectorType(I16, self.lanes))
            self.v.store(b.add(to, b.mul(lanes, self.number(column * self.size))), value, mask)


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
