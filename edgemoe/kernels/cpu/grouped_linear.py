"""Computes one product per group for decode-sized batches: each group has its matrix, and its part of every vector."""

from __future__ import annotations

from functools import cache

from edgemoe.jit.intrinsics import INT, address_of, call_rows, chunk, code, fields, record
from edgemoe.jit.object_cache import Code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.gemv import make_rows

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
