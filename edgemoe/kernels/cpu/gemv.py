"""Multiplies rows of weights with T packed vectors, for decode-sized batches.

Weights are read in place, once for T tokens. Sums are float32. The order of additions does not depend on T, so a
token's result is the same bits in any batch. See docs/design/kernels.md for the packing and the vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir

from edgemoe.jit.intrinsics import (
    AHEAD_BYTES,
    F32,
    I64,
    INT,
    LANES,
    WIDEST,
    block_elements,
    cgutils,
    f32_at,
    i8_at,
    i64_at,
    intrinsic,
    jit,
    load_bf16,
    load_f32,
    multiply_add,
    prefetch,
    types,
)
from edgemoe.jit.object_cache import Code, code

LONG, SHORT = 128, 8  # rows in one chunk of a large matrix for two threads, and of a small one such as a gate
LEAST_BYTES = 8 << 10  # of weights in one chunk of a small matrix
Dots = Callable[[int, int, int, int, int, int, int, int, int], None]


class Emitter:
    """Writes the LLVM code of the loop over one row of weights and `tokens` vectors."""

    def __init__(self, builder: Any, tokens: int, bf16: bool) -> None:
        self.b, self.tokens, self.bf16 = builder, tokens, bf16
        self.vector = ir.VectorType(F32, LANES)
        self.integers = ir.VectorType(ir.IntType(32), LANES)

    @property
    def turn_bytes(self) -> int:
        """Returns the bytes of a row that one turn of the loop takes."""
        return 4 * LANES

    def load(self, base: Any, offset: Any, kind: Any, align: int = 4) -> Any:
        return self.b.load(self.b.inttoptr(self.b.add(base, offset), kind.as_pointer()), align=align)

    def vectors(self, x: Any, x_stride: Any, index: Any) -> list[Any]:
        """Returns the addresses of the packed vectors [tokens] whose numbers lie at `index`."""
        rows = [self.load(index, ir.Constant(I64, 8 * token), I64) for token in range(self.tokens)]
        return [self.b.add(x, self.b.mul(x_stride, row)) for row in rows]

    def weights(self, w: Any, offset: Any) -> list[Any]:
        """Returns one vector of float32, or two for bf16: the even elements and the odd ones."""
        if not self.bf16:
            return [self.load(w, offset, self.vector)]
        pairs = self.load(w, offset, self.integers)
        even = self.b.shl(pairs, ir.Constant(self.integers, [16] * LANES))
        odd = self.b.and_(pairs, ir.Constant(self.integers, [0xFFFF0000] * LANES))
        return [self.b.bitcast(half, self.vector) for half in (even, odd)]

    def loop(self, w: Any, soon: Any, x: Any, x_stride: Any, index: Any, blocks: Any) -> list[Any]:
        """Returns the sums [tokens] over `blocks` blocks, at least one, as vectors. Prefetches as much at `soon`."""
        b, entry = self.b, self.b.block
        vectors = self.vectors(x, x_stride, index)
        body, after = b.append_basic_block("body"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        block = b.phi(I64)
        parts = 2 if self.bf16 else 1
        sums = [[b.phi(self.vector) for _ in range(parts)] for _ in range(self.tokens)]
        place = b.mul(block, ir.Constant(I64, self.turn_bytes))
        prefetch(b, b.add(soon, place))
        weights = self.weights(w, place)
        start = b.mul(block, ir.Constant(I64, 4 * LANES * parts))
        totals = [
            [
                multiply_add(b, weights[i], self.load(vector, b.add(start, self.bytes(i)), self.vector), phis[i])
                for i in range(parts)
            ]
            for vector, phis in zip(vectors, sums, strict=True)
        ]
        following = b.add(block, ir.Constant(I64, 1))
        block.add_incoming(ir.Constant(I64, 0), entry)
        block.add_incoming(following, body)
        for phi, total in zip(chain(*sums), chain(*totals), strict=True):
            phi.add_incoming(ir.Constant(self.vector, [0.0] * LANES), entry)
            phi.add_incoming(total, body)
        b.cbranch(b.icmp_signed("<", following, blocks), body, after)
        b.position_at_end(after)
        return [reduce(b.fadd, total) for total in totals]

    def bytes(self, vectors: int) -> Any:
        return ir.Constant(I64, 4 * LANES * vectors)

    def total(self, vector: Any) -> Any:
        """Returns the sum of a vector's lanes, added pairwise."""
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        kind = ir.FunctionType(F32, [F32, self.vector])
        add = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(add, [ir.Constant(F32, 0.0), vector], fastmath=("reassoc",))


def _blocks(make: type[Emitter], tokens: int, bf16: bool) -> Any:
    """Makes the intrinsic that writes the sum over full blocks to out[token], `out_stride` bytes apart."""

    @intrinsic
    def blocks(
        typing: Any, w: Any, soon: Any, x: Any, x_stride: Any, index: Any, count: Any, out: Any, out_stride: Any
    ) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            emitter = make(builder, tokens, bf16)
            *inputs, out, out_stride = args
            for token, vector in enumerate(emitter.loop(*inputs)):
                place = builder.add(out, builder.mul(out_stride, ir.Constant(I64, token)))
                builder.store(emitter.total(vector), builder.inttoptr(place, F32.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), emit

    return blocks


def make_dots(make: type[Emitter], tokens: int, bf16: bool, load: Callable[[int, int], float]) -> Dots:
    """Makes the function that computes out[token] = w . x[index[token]] over n elements; strides in bytes.

    `load` returns one element of a row; `stride` is used by functions of several rows only.
    """
    blocks, block, rest = _blocks(make, tokens, bf16), block_elements(bf16), _rest(load)

    @jit
    def dots(
        w: int, stride: int, soon: int, x: int, x_stride: int, index: int, n: int, out: int, out_stride: int
    ) -> None:
        full = n // block
        if full:
            blocks(w, soon, x, x_stride, index, full, out, out_stride)
        if full * block < n:
            for token in range(tokens):
                rest(w, x + i64_at(index)[token] * x_stride, full * block, n, out + token * out_stride)

    return dots  # type: ignore[no-any-return]


@cache
def _rest(weight: Callable[[int, int], float]) -> Callable[[int, int, int, int, int], None]:
    """Makes the function that adds the last elements of a row, which fill no block, to one sum."""

    @jit
    def rest(w: int, x: int, start: int, n: int, out: int) -> None:
        total = f32_at(out)[0] if start else np.float32(0)
        for k in range(start, n):
            total += weight(w, k) * f32_at(x)[k]
        f32_at(out)[0] = total

    return rest  # type: ignore[no-any-return]


def rows_code(name: str, dots: Callable[[int, int], Dots], widest: int, together: int = 1) -> Code:
    """Makes rows(w, stride, count, following, x, x_stride, index, tokens, n, out, out_stride).

    It multiplies `count` rows of n weights at `w` with the packed vectors x[index[t]] of `tokens` tokens, into
    out[t][row]; strides are in bytes. It reads rows one after the other, for one token `together` side by side. Tokens
    go in groups; from the second group on a row comes from the first-level cache. Beside the last rows it prefetches
    from `following`, the caller's probable next rows. Call it by its address with `call_rows`.

    `dots` makes the dot products of a number of rows and of tokens, at most `widest` (4 or 2) tokens. `name` is the
    code's in the cache of compiled code.
    """
    by1, by2, some = dots(1, 1), dots(1, 2), dots(together, 1)
    by4 = dots(1, 4) if widest == 4 else by2

    def rows(
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
        end, row = w + count * stride, 0
        ahead = max(1, AHEAD_BYTES // (together * stride)) * together * stride  # whole groups
        if together > 1 and tokens == 1:
            while row + together <= count:
                line = w + row * stride
                soon = line + ahead
                if soon >= end:
                    soon = following + soon - end
                some(line, stride, soon, x, x_stride, index, n, out + 4 * row, out_stride)
                row += together
        while row < count:
            line, token = w + row * stride, 0
            soon = line + ahead
            if soon >= end:
                soon = following + soon - end
            while token < tokens:
                left, which, to = tokens - token, index + 8 * token, out + token * out_stride + 4 * row
                if left >= widest:
                    by4(line, stride, soon, x, x_stride, which, n, to, out_stride)
                    token += widest
                elif left >= 2:
                    by2(line, stride, soon, x, x_stride, which, n, to, out_stride)
                    token += 2
                else:
                    by1(line, stride, soon, x, x_stride, which, n, to, out_stride)
                    token += 1
                soon = line  # prefetched already
            row += 1

    rows.__qualname__ = name
    return code(*[INT] * 11)(rows)


@cache
def make_rows(bf16: bool) -> Code:
    """Makes `rows_code` for rows of bf16 or float32."""
    load = load_bf16 if bf16 else load_f32
    return rows_code("rows", lambda _, tokens: make_dots(Emitter, tokens, bf16, load), WIDEST)


class _CodeEmitter(Emitter):
    """Writes the loop over one line of codes, in the order in which vectors for the model's type are packed."""

    @property
    def turn_bytes(self) -> int:
        return 2 * LANES if self.bf16 else LANES

    def weights(self, w: Any, offset: Any) -> list[Any]:
        kind = ir.VectorType(ir.IntType(16 if self.bf16 else 8), LANES)
        codes = self.b.sext(self.load(w, offset, kind, align=1), self.integers)
        if not self.bf16:
            return [self.b.sitofp(codes, self.vector)]
        up, down = (ir.Constant(self.integers, [bits] * LANES) for bits in (24, 8))
        even = self.b.ashr(self.b.shl(codes, up), up)
        return [self.b.sitofp(half, self.vector) for half in (even, self.b.ashr(codes, down))]


@cache
def make_code_rows(bf16: bool) -> Code:
    """Makes the same as `make_rows`, for lines of codes without their scales."""
    return rows_code("code_rows", lambda _, tokens: make_dots(_CodeEmitter, tokens, bf16, load_code), WIDEST)


@jit
def load_code(address: int, index: int) -> float:
    """Returns code `index` of the line at `address`, as float32."""
    return np.float32(i8_at(address)[index])  # type: ignore[return-value]


def shared_rows(rows: int, least: int, threads: int) -> int:
    """Returns `rows`, a chunk's for two threads, halved for more: the last chunk of a slow core is waited for."""
    while rows > least and rows * threads > 2 * LONG:
        rows //= 2
    return rows


def rows_in_chunk(rows: int, row_bytes: int, threads: int) -> int:
    """Returns how many of a matrix's rows one chunk multiplies."""
    return shared_rows(LONG, SHORT, threads) if rows >= 4 * LONG else max(SHORT, LEAST_BYTES // row_bytes)
