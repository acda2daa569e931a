"""Computes a dense product for decode-sized batches. Every weight is read once, by whichever thread is free."""

from __future__ import annotations

from edgemoe.jit.intrinsics import INT, address_of, call_rows, chunk, code, fields, jit, record
from edgemoe.jit.object_cache import Code
from edgemoe.jit.thread_pool import parallel

# The record of one call, out[t] = weight [rows, n] . x[index[t]]; arrays are addresses.
# `line` bytes of a row; `multiply` the address of the code that multiplies rows; `x` packed for it, float32; `index`
# [tokens] int64; `out` [tokens, rows] float32; `step`, rows in one chunk, is set by the kernel; `threads` those of the
# pool.
LINEAR = fields("weight", "line", "rows", "n", "multiply", "x", "index", "tokens", "out", "step", "threads")
# A matrix, for the records that name several: `plain` where it is in the model's type, and the addresses of the code
# that multiplies its rows and that packs vectors for it.
MATRIX = fields("weight", "line", "rows", "n", "multiply", "pack", "plain")
LONG, SHORT = 128, 8  # rows in one chunk of a large matrix, and of a small one such as a gate


@chunk
def some_rows(job: int, number: int) -> None:
    """Multiplies some rows with all vectors."""
    a = record(job, LINEAR)
    row = number * a.step
    count, out, w = min(a.step, a.rows - row), a.out + 4 * row, a.weight + row * a.line
    following = w + a.threads * a.step * a.line  # the other threads take the chunks between
    call_rows(a.multiply, w, a.line, count, following, a.x, a.n * 4, a.index, a.tokens, a.n, out, a.rows * 4)


_multiplying = address_of(some_rows)


@jit
def run_linear(control: int, job: int) -> None:
    """Runs the product from a LINEAR record, for kernels."""
    a = record(job, LINEAR)
    a.step = LONG if a.rows >= 4 * LONG else SHORT
    parallel(control, _multiplying(), job, (a.rows + a.step - 1) // a.step)


@jit
def multiply_matrix(control: int, job: int, matrix: int, x: int) -> None:
    """Runs the product of the matrix whose MATRIX record is at an address; the LINEAR record has the rest."""
    a, m = record(job, LINEAR), record(matrix, MATRIX)
    a.weight, a.line, a.rows, a.n, a.multiply, a.x = m.weight, m.line, m.rows, m.n, m.multiply, x
    run_linear(control, job)


linear: Code = code(INT, INT)(run_linear.py_func)
LINEAR_CODE = (some_rows, linear)
