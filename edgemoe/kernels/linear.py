"""Dense product for decode-sized batches: every weight is read once, by whichever thread gets to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from edgemoe.kernels.dot import make_rows
from edgemoe.kernels.machine import call_rows, chunk, entry, fields, record
from edgemoe.kernels.pool import parallel

# out[t] = weight [rows, n] . x[index[t]] for `tokens` tokens; `x` packed float32, `out` [tokens, rows] float32.
LINEAR = fields("weight", "rows", "n", "x", "index", "tokens", "out")
STEP_ROWS = 32  # rows in one chunk


@cache
def make_linear(bf16: bool) -> tuple[Callable[[int, int], None], Any]:
    """(run(control, address of a LINEAR record), what must outlive it)."""
    multiply = make_rows(bf16).address
    size = 2 if bf16 else 4

    @chunk
    def some_rows(job: int, number: int) -> None:
        a = record(job, LINEAR)
        row, line = number * STEP_ROWS, a.n * size
        count, out = min(STEP_ROWS, a.rows - row), a.out + 4 * row
        call_rows(multiply, a.weight + row * line, line, count, a.x, a.n * 4, a.index, a.tokens, a.n, out, a.rows * 4)

    multiplying = some_rows.address

    @entry
    def run(control: int, job: int) -> None:
        a = record(job, LINEAR)
        parallel(control, multiplying, job, (a.rows + STEP_ROWS - 1) // STEP_ROWS)

    return run, some_rows
