"""The one inner loop that all products share: R rows of a weight matrix against T packed vectors.

Weights are read where they lie, once for T tokens. bf16 comes in pairs as uint32: the low half shifted, the high
half masked, both bit-cast to float32; so a packed vector holds, for every block of 2 x LANES elements, the even
ones and then the odd ones. Sums are float32, and the order of additions does not depend on R or T: a token's
result is the same bits in any batch.

LLVM's own vectoriser keeps to 256 bits and loses half the speed from T = 4 on, hence explicit vectors; they are
split into what the machine has, so this is portable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from edgemoe.kernels.machine import (
    F32,
    I64,
    bf16_to_f32,
    bits_of,
    cgutils,
    compiled,
    f32_at,
    i64_at,
    intrinsic,
    jit,
    types,
    u16_at,
)

WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
LANES = 16 if WIDE else 8
ROWS = 4  # rows of weights read side by side

Dots = Callable[[int, int, int, int, int, int, int, int], None]


class _Emitter:
    """Writes the loop over full vectors for `rows` x `tokens` sums."""

    def __init__(self, builder: Any, rows: int, tokens: int, bf16: bool) -> None:
        self.b, self.rows, self.tokens, self.bf16 = builder, rows, tokens, bf16
        self.vector = ir.VectorType(F32, LANES)
        self.integers = ir.VectorType(ir.IntType(32), LANES)

    def load(self, address: Any, kind: Any) -> Any:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=4)

    def at_rows(self, w: Any, w_stride: Any, offset: Any, kind: Any) -> list[Any]:
        starts = [self.b.add(w, self.b.mul(w_stride, ir.Constant(I64, row))) for row in range(self.rows)]
        return [self.load(self.b.add(start, offset), kind) for start in starts]

    def vectors(self, x: Any, x_stride: Any, index: Any) -> list[Any]:
        """Addresses of the packed vectors that `index` names."""
        places = [self.b.add(index, ir.Constant(I64, 8 * token)) for token in range(self.tokens)]
        return [self.b.add(x, self.b.mul(x_stride, self.load(place, I64))) for place in places]

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.b.fadd(self.b.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def weights(self, base: Any, stride: Any, offset: Any) -> list[list[Any]]:
        """Per row, the vectors of one block: one of float32, or the even and the odd ones of bf16."""
        if not self.bf16:
            return [[row] for row in self.at_rows(base, stride, offset, self.vector)]
        pairs = self.at_rows(base, stride, offset, self.integers)
        shift = ir.Constant(self.integers, [16] * LANES)
        mask = ir.Constant(self.integers, [0xFFFF0000] * LANES)
        return [
            [self.b.bitcast(half, self.vector) for half in (self.b.shl(pair, shift), self.b.and_(pair, mask))]
            for pair in pairs
        ]

    def loop(self, w: Any, w_stride: Any, x: Any, x_stride: Any, index: Any, blocks: Any) -> list[list[Any]]:
        """Sums [rows][tokens] over `blocks` (at least one) blocks."""
        b, entry = self.b, self.b.block
        vectors = self.vectors(x, x_stride, index)
        body, after = b.append_basic_block("body"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        block = b.phi(I64)
        block.add_incoming(ir.Constant(I64, 0), entry)
        sums = [[b.phi(self.vector) for _ in range(self.tokens)] for _ in range(self.rows)]
        weights = self.weights(w, w_stride, b.mul(block, ir.Constant(I64, 4 * LANES)))
        parts = len(weights[0])
        totals = [list(row) for row in sums]
        for token in range(self.tokens):
            for part in range(parts):
                offset = b.mul(block, ir.Constant(I64, 4 * LANES * parts))
                offset = b.add(offset, ir.Constant(I64, 4 * LANES * part))
                values = self.load(b.add(vectors[token], offset), self.vector)
                for row in range(self.rows):
                    totals[row][token] = self.multiply_add(weights[row][part], values, totals[row][token])
        following = b.add(block, ir.Constant(I64, 1))
        block.add_incoming(following, body)
        for phi, total in zip(chain(*sums), chain(*totals), strict=True):
            phi.add_incoming(ir.Constant(self.vector, [0.0] * LANES), entry)
            phi.add_incoming(total, body)
        b.cbranch(b.icmp_signed("<", following, blocks), body, after)
        b.position_at_end(after)
        return totals

    def total(self, vector: Any) -> Any:
        """Sum of a vector's lanes, pairwise."""
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        kind = ir.FunctionType(F32, [F32, self.vector])
        reduce = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(reduce, [ir.Constant(F32, 0.0), vector], fastmath=("reassoc",))


def _blocks(rows: int, tokens: int, bf16: bool) -> Any:
    """out[token][row] = sum over full blocks; `out_stride` bytes between tokens."""

    @intrinsic
    def blocks(
        typing: Any, w: Any, w_stride: Any, x: Any, x_stride: Any, index: Any, n: Any, out: Any, out_stride: Any
    ) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            emitter = _Emitter(builder, rows, tokens, bf16)
            *inputs, out, out_stride = args
            sums = emitter.loop(*inputs)
            for row in range(rows):
                for token in range(tokens):
                    place = builder.add(out, builder.mul(out_stride, ir.Constant(I64, token)))
                    place = builder.add(place, ir.Constant(I64, 4 * row))
                    builder.store(emitter.total(sums[row][token]), builder.inttoptr(place, F32.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), emit

    return blocks


def _dots(rows: int, tokens: int, bf16: bool) -> Dots:
    """out[token][row] = w[row] . x[index[token]] over n elements; strides in bytes."""
    blocks, block, rest = _blocks(rows, tokens, bf16), 2 * LANES if bf16 else LANES, _rest(bf16)

    @jit
    def dots(w: int, w_stride: int, x: int, x_stride: int, index: int, n: int, out: int, out_stride: int) -> None:
        full = n // block
        if full:
            blocks(w, w_stride, x, x_stride, index, full, out, out_stride)
        if full * block < n:
            for row in range(rows):
                for token in range(tokens):
                    values, to = x + i64_at(index)[token] * x_stride, out + token * out_stride + 4 * row
                    rest(w + row * w_stride, values, full * block, n, to)

    return dots  # type: ignore[no-any-return]


@cache
def _rest(bf16: bool) -> Callable[[int, int, int, int, int], None]:
    """The elements that fill no vector."""
    weight = load_bf16 if bf16 else load_f32

    @jit
    def rest(w: int, x: int, start: int, n: int, out: int) -> None:
        total = f32_at(out)[0] if start else np.float32(0)
        for k in range(start, n):
            total += weight(w, k) * f32_at(x)[k]
        f32_at(out)[0] = total

    return rest  # type: ignore[no-any-return]


@jit
def load_bf16(address: int, index: int) -> float:
    return bf16_to_f32(np.uint32(u16_at(address)[index]))  # type: ignore[no-any-return]


@jit
def load_f32(address: int, index: int) -> float:
    return f32_at(address)[index]  # type: ignore[no-any-return]


@jit
def store_bf16(address: int, index: int, value: float) -> None:
    """Rounds to nearest, ties to even."""
    bits = np.uint32(bits_of(np.float32(value)))
    u16_at(address)[index] = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


@jit
def store_f32(address: int, index: int, value: float) -> None:
    f32_at(address)[index] = value


@cache
def make_place(bf16: bool) -> Callable[[int, int], int]:
    """Where element k of a vector of n goes when packed."""
    block = 2 * LANES

    @jit
    def place(k: int, n: int) -> int:
        start = k - k % block
        if not bf16 or start + block > n:
            return k
        return start + (k - start) // 2 + LANES * (k & 1)

    return place  # type: ignore[no-any-return]


@cache
def make_rows(bf16: bool) -> Any:
    """rows(w, w_stride, count, x, x_stride, index, tokens, n, out, out_stride): any number of rows and tokens.

    Call it by its `.address` with `call_rows`.

    Tokens go in groups; a group of rows stays in the first-level cache between them.
    """
    single, by1, by2 = _dots(1, 1, bf16), _dots(ROWS, 1, bf16), _dots(ROWS, 2, bf16)
    by4 = _dots(ROWS, 4, bf16) if WIDE else by2  # accumulators for four tokens need 32 wide registers
    widest = 4 if WIDE else 2

    @jit
    def group(
        w: int, w_stride: int, x: int, x_stride: int, index: int, tokens: int, n: int, out: int, out_stride: int
    ) -> None:
        token = 0
        while token < tokens:
            left, which, to = tokens - token, index + 8 * token, out + token * out_stride
            if left >= widest:
                by4(w, w_stride, x, x_stride, which, n, to, out_stride)
                token += widest
            elif left >= 2:
                by2(w, w_stride, x, x_stride, which, n, to, out_stride)
                token += 2
            else:
                by1(w, w_stride, x, x_stride, which, n, to, out_stride)
                token += 1

    @compiled(10)
    def rows(
        w: int,
        w_stride: int,
        count: int,
        x: int,
        x_stride: int,
        index: int,
        tokens: int,
        n: int,
        out: int,
        out_stride: int,
    ) -> None:
        full = count - count % ROWS
        for row in range(0, full, ROWS):
            group(w + row * w_stride, w_stride, x, x_stride, index, tokens, n, out + 4 * row, out_stride)
        for row in range(full, count):
            for token in range(tokens):
                to = out + token * out_stride + 4 * row
                single(w + row * w_stride, w_stride, x, x_stride, index + 8 * token, n, to, out_stride)

    return rows
