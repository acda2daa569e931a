"""Computes a dense product for decode-sized batches. Every weight is read once, by whichever thread is free."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from edgemoe.kernels.cpu.gemv import make_rows
from edgemoe.kernels.cpu.intrinsics import INT, address_of, call_rows, chunk, code, fields, jit, record
from edgemoe.kernels.cpu.object_cache import Code
from edgemoe.kernels.cpu.thread_pool import parallel

# The record of one call, out[t] = weight [rows, n] . x[index[t]]; arrays are addresses.
# `x` packed float32; `index` [tokens] int64; `out` [tokens, rows] float32; `step`, rows in one chunk, is set by the
# kernel; `threads` those of the pool.
LINEAR = fields("weight", "rows", "n", "x", "index", "tokens", "out", "step", "threads")
LONG, SHORT = 128, 8  # rows in one chunk of a large matrix, and of a small one such as a gate


@cache
def make_linear(bf16: bool) -> tuple[Callable[[int, int], None], Code, tuple[Code, ...]]:
    """Makes the product kernel: run(control, address of a LINEAR record).

    Returns it for kernels, the same for Python, and all code that they refer to.
    """
    rows = make_rows(bf16)
    multiply = address_of(rows)
    size = 2 if bf16 else 4

    @chunk
    def some_rows(job: int, number: int) -> None:
        a = record(job, LINEAR)
        row, line = number * a.step, a.n * size
        count, out, w = min(a.step, a.rows - row), a.out + 4 * row, a.weight + row * line
        following = w + a.threads * a.step * line  # the other threads take the chunks between
        call_rows(multiply(), w, line, count, following, a.x, a.n * 4, a.index, a.tokens, a.n, out, a.rows * 4)

    multiplying = address_of(some_rows)

    @jit
    def run(control: int, job: int) -> None:
        a = record(job, LINEAR)
        a.step = LONG if a.rows >= 4 * LONG else SHORT
        parallel(control, multiplying(), job, (a.rows + a.step - 1) // a.step)

    linear = code(INT, INT)(run.py_func)
    return run, linear, (rows, some_rows, linear)
