"""Dense products: for decode-sized batches, for one matrix per group, and of encoded weights for many tokens.

Every weight is read once, by the next free thread. For many tokens, rows are decoded a few at a time and multiplied in
tiles.
"""

from __future__ import annotations

from functools import cache

from edgemoe.jit.intrinsics import INT, LANES, call_pack, call_rows, f32_at, record
from edgemoe.jit.object_cache import Code, address_of, chunk, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.encoded.packing import borrow, give_back, make_order
from edgemoe.kernels.cpu.gemm_tile import make_tile
from edgemoe.kernels.cpu.gemv import make_rows, shared_rows
from edgemoe.kernels.cpu.panels import GROUP, LINE, SIDE, make_fill_panel, transpose
from edgemoe.kernels.cpu.vector import widen
from edgemoe.types.arrays import fields

# The record of one call, out[t] = weight [rows, n] . x[index[t]]; arrays are addresses.
# * `line` bytes of a row
# * `multiply` address of the code that multiplies rows
# * `x` packed for it, float32; `index` [tokens] int64
# * `out` [tokens, rows] float32
# * `step` rows in one chunk
# * `threads` of the pool
LINEAR = fields("weight", "line", "rows", "n", "multiply", "x", "index", "tokens", "out", "step", "threads")


@chunk
def some_rows(job: int, number: int) -> None:
    """Multiplies some rows with all vectors."""
    a = record(job, LINEAR)
    row = number * a.step
    count, out, w = min(a.step, a.rows - row), a.out + 4 * row, a.weight + row * a.line
    following = w + a.threads * a.step * a.line  # the other threads take the chunks between
    call_rows(a.multiply, w, a.line, count, following, a.x, a.n * 4, a.index, a.tokens, a.n, out, a.rows * 4)


_multiplying = address_of(some_rows)


@code(INT, INT)
def linear(control: int, job: int) -> None:
    """Runs the product from a LINEAR record."""
    a = record(job, LINEAR)
    parallel(control, _multiplying(), job, (a.rows + a.step - 1) // a.step)


# The record of one call, out[t, g] = weight[g] . x[t, g]; arrays are addresses.
# `weight` [groups, rows, n]; `x` [tokens, groups, n] float32, each vector of n packed; `out` [tokens, groups, rows]
# float32; `iota` 0, 1, 2, ... int64.
GROUPED = fields("weight", "groups", "rows", "n", "x", "tokens", "out", "iota")


@cache
def make_grouped_linear(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel run(control, address of a GROUPED record). Returns it and all code that it refers to."""
    rows = make_rows(bf16)
    multiply = address_of(rows)
    size = 2 if bf16 else 4

    @chunk
    def one_group(job: int, number: int) -> None:
        a = record(job, GROUPED)
        line = a.n * size
        w, x, out = a.weight + number * a.rows * line, a.x + number * a.n * 4, a.out + number * a.rows * 4
        x_stride, out_stride = a.groups * a.n * 4, a.groups * a.rows * 4
        call_rows(multiply(), w, line, a.rows, w, x, x_stride, a.iota, a.tokens, a.n, out, out_stride)

    multiplying = address_of(one_group)

    @code(INT, INT)
    def run(control: int, job: int) -> None:
        parallel(control, multiplying(), job, record(job, GROUPED).groups)

    return run, (rows, one_group, run)


# The record of one call, out [tokens, rows] = x [tokens, n] . weight [rows, n] transposed; arrays are addresses.
# * `line` bytes of a row
# * `x` bf16 if `x_bf16`, else float32; `out` float32
# * `panels`, `ordered` and `part` scratch memory, see `scratch_floats`
# * `some` rows in one chunk, see `many_rows`
# * the rest as in PREFILL_EXPERTS
PRODUCT = fields(
    *("weight", "line", "rows", "n", "x", "x_bf16", "tokens", "out", "panels", "ordered", "part", "some"),
    *("unpack", "decoded", "decoded_bytes", "borrowed", "threads"),
)
MOST_ROWS, LEAST_ROWS = 64, 16  # in one chunk; each rows' share of reading the tokens grows as they become few


def many_rows(threads: int) -> int:
    """Returns how many rows one chunk of a product with many tokens has."""
    return shared_rows(MOST_ROWS, LEAST_ROWS, threads)


def scratch_floats(n: int, tokens: int, threads: int) -> dict[str, int]:
    """Returns the sizes of the scratch arrays, in float32."""
    groups = -(-tokens // GROUP)
    return {"panels": groups * n * GROUP, "ordered": tokens * n, "part": threads * MOST_ROWS * GROUP}


def _make_fill(bf16: bool) -> Code:
    """Makes the chunk that puts one group of tokens into its panel."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    order, fill = make_order(bf16), make_fill_panel(bf16)

    @chunk
    def fill_product(job: int, number: int) -> None:
        p = record(job, PRODUCT)
        first, line = number * GROUP, p.n * size
        count = min(GROUP, p.tokens - first)
        for token in range(first, first + count):
            order(p.x + token * p.n * (2 if p.x_bf16 else 4), p.x_bf16, p.n, p.ordered + token * line)
        fill(p.panels + number * p.n * LINE, p.ordered, line, 0, first, count, p.n // per_word)

    return fill_product


def _make_multiply(bf16: bool, tile_code: Code) -> Code:
    """Makes the chunk that multiplies some rows with all tokens."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    tile = address_of(tile_code)

    @chunk
    def multiply_rows(job: int, number: int) -> None:
        p = record(job, PRODUCT)
        row, mine = number * p.some, borrow(p.borrowed, p.threads)
        count, line = min(p.some, p.rows - row), p.n * size
        rows, part = p.decoded + mine * p.decoded_bytes, p.part + mine * p.some * LINE
        call_pack(p.unpack, p.weight + row * p.line, p.line, count, p.n, rows)
        for first in range(0, p.tokens, GROUP):
            tokens, panel = min(GROUP, p.tokens - first), p.panels + first // GROUP * p.n * LINE
            columns = (tokens + LANES - 1) // LANES * LANES
            call_rows(tile(), rows, line, count, rows, panel, LINE, p.n // per_word, part, LINE, columns, 1)
            turned = count - count % SIDE if tokens == columns else 0
            for begin in range(0, tokens, SIDE):
                for k in range(0, turned, SIDE):
                    to = p.out + ((first + begin) * p.rows + row + k) * 4
                    transpose(part + k * LINE + 4 * begin, LINE, to, 4 * p.rows)
            for j in range(tokens):
                out, values = f32_at(p.out + ((first + j) * p.rows + row) * 4), f32_at(part + 4 * j)
                for k in range(turned, count):
                    out[k] = values[k * GROUP]
        give_back(p.borrowed, mine)

    return multiply_rows


# The record of one call, which computes the same with activations in whole numbers of 8 bits; arrays are addresses.
# * `multiply` and `pack` addresses of the code that multiplies rows, and that packs vectors for it
# * `packed` and `plain` scratch memory, see `byte_scratch_floats`; `iota` 0, 1, 2, ... int64
# * the rest as in PRODUCT
BYTE_PRODUCT = fields(
    *("weight", "line", "rows", "n", "multiply", "pack", "x", "x_bf16", "tokens", "out", "packed", "plain", "iota"),
    "some",
)
BYTE_TOKENS = 16  # multiplied with a chunk's rows in one pass


def byte_scratch_floats(n: int, tokens: int) -> dict[str, int]:
    """Returns the sizes of the scratch arrays, in float32."""
    return {"packed": tokens * n, "plain": -(-tokens // BYTE_TOKENS) * n}


@chunk
def pack_bytes(job: int, number: int) -> None:
    """Packs BYTE_TOKENS tokens of `x` as whole numbers of 8 bits."""
    p = record(job, BYTE_PRODUCT)
    plain = p.plain + number * p.n * 4
    for token in range(number * BYTE_TOKENS, min(p.tokens, (number + 1) * BYTE_TOKENS)):
        widen(p.x + token * p.n * (2 if p.x_bf16 else 4), p.x_bf16, p.n, plain)
        call_pack(p.pack, plain, 0, p.n, p.n, p.packed + token * p.n * 4)


@chunk
def multiply_bytes(job: int, number: int) -> None:
    """Multiplies some rows with all tokens."""
    p = record(job, BYTE_PRODUCT)
    row = number * p.some
    count, w = min(p.some, p.rows - row), p.weight + row * p.line
    for first in range(0, p.tokens, BYTE_TOKENS):
        tokens, x = min(BYTE_TOKENS, p.tokens - first), p.packed + first * p.n * 4
        out = p.out + (first * p.rows + row) * 4
        call_rows(p.multiply, w, p.line, count, w, x, p.n * 4, p.iota, tokens, p.n, out, p.rows * 4)


_packing_bytes, _multiplying_bytes = address_of(pack_bytes), address_of(multiply_bytes)


@code(INT, INT)
def byte_product(control: int, job: int) -> None:
    """Runs the product from a BYTE_PRODUCT record."""
    p = record(job, BYTE_PRODUCT)
    parallel(control, _packing_bytes(), job, (p.tokens + BYTE_TOKENS - 1) // BYTE_TOKENS)
    parallel(control, _multiplying_bytes(), job, (p.rows + p.some - 1) // p.some)


@cache
def make_product(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel run(control, address of a PRODUCT record). Returns it and all code that it refers to."""
    tile_code = make_tile(bf16)
    fill, multiply = _make_fill(bf16), _make_multiply(bf16, tile_code)
    filling, multiplying = address_of(fill), address_of(multiply)

    @code(INT, INT)
    def run_product(control: int, job: int) -> None:
        p = record(job, PRODUCT)
        parallel(control, filling(), job, (p.tokens + GROUP - 1) // GROUP)
        parallel(control, multiplying(), job, (p.rows + p.some - 1) // p.some)

    return run_product, (tile_code, fill, multiply, run_product)


LINEAR_CODE = (some_rows, linear, pack_bytes, multiply_bytes, byte_product)
