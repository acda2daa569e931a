"""Computes the SwiGLU experts of one layer for a few tokens each, where they lie in the slab.

Two parallel regions do it: gate and up rows give `mid`, scaled by the routing weight, then down rows add to `out`. Both
read rows in the order of memory, each weight once from memory for all of its tokens. The outputs of a token's experts
are added in the order of `slots`.
"""

from __future__ import annotations

from functools import cache

from edgemoe.kernels.cpu.gemv import make_place, make_rows
from edgemoe.kernels.cpu.intrinsics import INT, address_of, call_rows, chunk, code, f32_at, fields, i64_at, record
from edgemoe.kernels.cpu.object_cache import Code
from edgemoe.kernels.cpu.thread_pool import parallel
from edgemoe.kernels.cpu.vector import make_pack, swiglu

# The record of one call; arrays are addresses.
# `x` [tokens, hidden] bf16 where `x_bf16`, else float32; `out` [tokens, hidden] float32, which is added to; `slots`
# [count], `offsets` [count + 1] and `index` [m] int64 and `weights` [m] float32 as in `Kernels.experts`; `packed`
# [tokens, hidden], `mid` [m, width], `both` and `part` scratch memory, see `scratch_floats`; `stride` bytes from slot
# to slot; `iota` 0, 1, 2, ... int64; `threads` those of the pool; `down_rows` is set by the kernel.
EXPERTS = fields(
    *("slab", "stride", "slots", "count", "offsets", "index", "weights", "x", "x_bf16", "out", "tokens"),
    *("hidden", "width", "packed", "mid", "both", "part", "iota", "threads", "down_rows"),
)
GATE_ROWS = 128  # rows of gate and of up in one chunk; few and long runs, because reading is slow where a run begins
MOST_DOWN_ROWS = 128
GROUP = 16  # tokens that a chunk's rows are multiplied with in one pass; for further passes they come from the cache


def scratch_floats(hidden: int, width: int, tokens: int, pairs: int, slots: int) -> dict[str, int]:
    """Returns the sizes of the scratch arrays, in float32, for so many tokens, (token, expert) pairs and slots."""
    return {
        "packed": tokens * hidden,
        "mid": pairs * width,
        "both": slots * -(-width // GATE_ROWS) * 2 * GROUP * GATE_ROWS,
        "part": (hidden + MOST_DOWN_ROWS) * GROUP,
    }


def _make_pack_token(bf16: bool) -> Code:
    """Makes the chunk that packs one token."""
    pack = make_pack(bf16)

    @chunk
    def pack_token(job: int, token: int) -> None:
        e = record(job, EXPERTS)
        source = e.x + token * e.hidden * (2 if e.x_bf16 else 4)
        pack(source, e.x_bf16, e.hidden, e.packed + token * e.hidden * 4)

    return pack_token


def _make_gate_up(bf16: bool, row_code: Code) -> Code:
    """Makes the chunk that multiplies some rows of gate and of up of one slot with all of its tokens."""
    rows, place = address_of(row_code), make_place(bf16)
    size = 2 if bf16 else 4

    @chunk
    def gate_up(job: int, number: int) -> None:
        e = record(job, EXPERTS)
        per_slot = (e.width + GATE_ROWS - 1) // GATE_ROWS
        slot, row, line = number // per_slot, number % per_slot * GATE_ROWS, e.hidden * size
        count, after = min(GATE_ROWS, e.width - row), i64_at(e.offsets)[slot + 1]
        w = e.slab + i64_at(e.slots)[slot] * e.stride + row * line
        gates = e.both + number * 2 * GROUP * GATE_ROWS * 4
        ups = gates + GROUP * GATE_ROWS * 4
        for first in range(i64_at(e.offsets)[slot], after, GROUP):
            n, index = min(GROUP, after - first), e.index + 8 * first
            # Up's rows are prefetched beside the gate's; beside up's, the rows that this thread probably takes next.
            v, soon = w + e.width * line, w + e.threads * GATE_ROWS * line
            call_rows(rows(), w, line, count, v, e.packed, e.hidden * 4, index, n, e.hidden, gates, GATE_ROWS * 4)
            call_rows(rows(), v, line, count, soon, e.packed, e.hidden * 4, index, n, e.hidden, ups, GATE_ROWS * 4)
            for pair in range(n):
                gate, up = gates + pair * GATE_ROWS * 4, ups + pair * GATE_ROWS * 4
                swiglu(gate, up, count, f32_at(e.weights)[first + pair])
                mid, values = f32_at(e.mid + (first + pair) * e.width * 4), f32_at(gate)
                for k in range(count):
                    mid[place(row + k, e.width)] = values[k]

    return gate_up


def _make_down(bf16: bool, row_code: Code) -> Code:
    """Makes the chunk that multiplies some rows of down of every slot, and adds to `out`."""
    rows = address_of(row_code)
    size = 2 if bf16 else 4

    @chunk
    def down(job: int, number: int) -> None:
        e = record(job, EXPERTS)
        row, line, to_next = number * e.down_rows, e.width * size, e.down_rows * 4
        count, part = min(e.down_rows, e.hidden - row), e.part + number * GROUP * to_next
        for slot in range(e.count):
            w = e.slab + i64_at(e.slots)[slot] * e.stride + (2 * e.width * e.hidden + row * e.width) * size
            soon, after = w, i64_at(e.offsets)[slot + 1]
            if slot + 1 < e.count:
                soon += (i64_at(e.slots)[slot + 1] - i64_at(e.slots)[slot]) * e.stride
            for first in range(i64_at(e.offsets)[slot], after, GROUP):
                n, mid = min(GROUP, after - first), e.mid + first * e.width * 4
                call_rows(rows(), w, line, count, soon, mid, e.width * 4, e.iota, n, e.width, part, to_next)
                for pair in range(n):
                    out = f32_at(e.out + (i64_at(e.index)[first + pair] * e.hidden + row) * 4)
                    values = f32_at(part + pair * to_next)
                    for k in range(count):
                        out[k] += values[k]

    return down


@cache
def make_experts(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel run(control, address of an EXPERTS record). Returns it and all code that it refers to."""
    row_code = make_rows(bf16)
    pack_token, gate_up, down = _make_pack_token(bf16), _make_gate_up(bf16, row_code), _make_down(bf16, row_code)
    packing, gating, adding = address_of(pack_token), address_of(gate_up), address_of(down)

    @code(INT, INT)
    def run(control: int, job: int) -> None:
        e = record(job, EXPERTS)
        parallel(control, packing(), job, e.tokens)
        parallel(control, gating(), job, e.count * ((e.width + GATE_ROWS - 1) // GATE_ROWS))
        e.down_rows = min(MOST_DOWN_ROWS, max(8, e.hidden // (4 * e.threads)))
        parallel(control, adding(), job, (e.hidden + e.down_rows - 1) // e.down_rows)

    return run, (row_code, pack_token, gate_up, down, run)
