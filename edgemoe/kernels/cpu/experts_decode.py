"""Computes the experts of one layer for a few tokens each, where they lie in the slab.

Two parallel regions: gate and up rows, or up rows alone, give `mid`, scaled by the routing weight; then down rows add
to `out`. Both read rows in memory order, each weight once for all of its tokens. A token's experts are added in the
order of `slots`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from edgemoe.jit.intrinsics import INT, call_pack, call_rows, f32_at, i64_at, record
from edgemoe.jit.object_cache import address_of, chunk, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.gemv import shared_rows
from edgemoe.kernels.cpu.vector import ACTIVATIONS, activate, add_bias, widen
from edgemoe.types.arrays import fields
from edgemoe.types.encoding import Encoding
from edgemoe.types.experts import SILU, Activation, ExpertGeometry


class ExpertLayout(NamedTuple):
    """Describes experts: gate and up rows [first_rows, hidden], then down rows [hidden, width], then biases."""

    hidden: int
    width: int
    encoding: Encoding
    activation: Activation = SILU
    biases: bool = False  # float32 [first_rows], then [hidden]
    other_down: Encoding | None = None  # of down rows, where it differs

    @property
    def first_rows(self) -> int:
        """Returns the rows of gate and up together, or of up alone."""
        return self.activation.inputs * self.width

    @classmethod
    def of(cls, geometry: ExpertGeometry, layer: int) -> ExpertLayout:
        """Returns the layout of one layer's experts."""
        encoding, down = geometry.encoding(layer), geometry.down_encoding(layer)
        sizes, other = (geometry.hidden, geometry.width), None if down is encoding else down
        return cls(*sizes, encoding, geometry.activation, geometry.biases, other)

    @property
    def down_encoding(self) -> Encoding:
        return self.other_down or self.encoding

    def fill(self, record: Any) -> None:
        """Writes a record's fields of `experts_decode.LAYOUT`."""
        line, down_line = self.encoding.row_bytes(self.hidden), self.down_encoding.row_bytes(self.width)
        record["hidden"], record["width"], record["line"], record["down_line"] = (
            self.hidden,
            self.width,
            line,
            down_line,
        )
        record["first_rows"] = self.first_rows
        record["bias"] = self.first_rows * line + self.hidden * down_line if self.biases else 0
        record["activation"] = ACTIVATIONS.index(self.activation.kind)
        record["alpha"], record["limit"] = self.activation.alpha, self.activation.limit


# The fields common to the records of both kernels for experts; arrays are addresses.
# * `line` and `down_line` bytes of a row of gate or up, and of down
# * `first_rows` of gate and up together: 2 * width, or width where experts have no gate
# * `bias` bytes from a slot's start to its biases, or 0: gate and up [first_rows], then down [hidden], float32
# * `activation` as in `vector.activate`, with `alpha` and `limit`
LAYOUT = np.dtype(
    [
        *fields("hidden", "width", "first_rows", "line", "down_line", "bias", "activation").descr,
        ("alpha", np.float64),
        ("limit", np.float64),
    ]
)
# The record of one call.
# * `x` [tokens, hidden], bf16 if `x_bf16`, else float32
# * `out` [tokens, hidden] float32, to which the results are added
# * `slots` [count], `offsets` [count + 1] and `index` [m] int64, `weights` [m] float32, as in `Kernels.experts`
# * `multiply` and `pack` addresses of code for gate and up, `down_multiply` and `down_pack` for down
# * `plain` and `packed` [tokens, hidden], `mid` [m, width], `both`, `part` scratch memory, see `scratch_floats`
# * `stride` bytes from slot to slot
# * `iota` 0, 1, 2, ... int64
# * `threads` of the pool; `gate_rows` of gate and of up, and `down_rows` in one chunk, see `rows_in_chunks`
EXPERTS = np.dtype(
    [
        *fields(
            *("slab", "stride", "slots", "count", "offsets", "index", "weights", "x", "x_bf16", "out", "tokens"),
            *("multiply", "pack", "down_multiply", "down_pack"),
            *("plain", "packed", "mid", "both", "part", "iota", "threads", "gate_rows", "down_rows"),
        ).descr,
        *LAYOUT.descr,
    ]
)
MOST_ROWS = 128  # of gate, of up or of down in one chunk; few and long runs: reading is slow where a run begins
LEAST_GATE_ROWS, LEAST_DOWN_ROWS = 32, 16  # a lane of the next product's activations; a few kilobytes
GROUP = 16  # tokens that a chunk's rows are multiplied with in one pass; for further passes they come from the cache


def scratch_floats(hidden: int, width: int, tokens: int, pairs: int, slots: int) -> dict[str, int]:
    """Returns the sizes of the scratch arrays, in float32, for numbers of tokens, (token, expert) pairs and slots."""
    return {
        "plain": tokens * hidden,
        "packed": tokens * hidden,
        "mid": pairs * width,
        "both": slots * -(-width // MOST_ROWS) * 2 * GROUP * MOST_ROWS,
        "part": (hidden + MOST_ROWS) * GROUP,
    }


def rows_in_chunks(hidden: int, threads: int) -> tuple[int, int]:
    """Returns `gate_rows`, which divide MOST_ROWS, and `down_rows` of a record."""
    down = min(shared_rows(MOST_ROWS, LEAST_DOWN_ROWS, threads), max(LEAST_DOWN_ROWS, hidden // (4 * threads)))
    return shared_rows(MOST_ROWS, LEAST_GATE_ROWS, threads), down


@chunk
def pack_token(job: int, token: int) -> None:
    """Widens a token's row of `x` to float32 and packs it for `multiply`."""
    e = record(job, EXPERTS)
    plain = e.plain + token * e.hidden * 4
    widen(e.x + token * e.hidden * (2 if e.x_bf16 else 4), e.x_bf16, e.hidden, plain)
    call_pack(e.pack, plain, 0, e.hidden, e.hidden, e.packed + token * e.hidden * 4)


@chunk
def gate_up(job: int, number: int) -> None:
    """Multiplies some rows of gate and of up, or of up alone, of one slot with all of its tokens."""
    e = record(job, EXPERTS)
    most = e.gate_rows
    per_slot, to_next = (e.width + most - 1) // most, most * 4
    slot, row, line = number // per_slot, number % per_slot * most, e.line
    count, after = min(most, e.width - row), i64_at(e.offsets)[slot + 1]
    base = e.slab + i64_at(e.slots)[slot] * e.stride
    w, bias = base + row * line, base + e.bias + row * 4
    gates = e.both + number * 2 * GROUP * to_next
    ups, is_gated = gates + GROUP * to_next, e.first_rows > e.width
    for first in range(i64_at(e.offsets)[slot], after, GROUP):
        n, index = min(GROUP, after - first), e.index + 8 * first
        # Up's rows are prefetched beside the gate's; beside up's, the rows that this thread probably takes next.
        v, soon = w + e.width * line, w + e.threads * most * line
        if is_gated:
            call_rows(e.multiply, w, line, count, v, e.packed, e.hidden * 4, index, n, e.hidden, gates, to_next)
            call_rows(e.multiply, v, line, count, soon, e.packed, e.hidden * 4, index, n, e.hidden, ups, to_next)
        else:
            call_rows(e.multiply, w, line, count, soon, e.packed, e.hidden * 4, index, n, e.hidden, gates, to_next)
        for pair in range(n):
            gate, up = gates + pair * to_next, ups + pair * to_next
            if e.bias:
                add_bias(gate, bias, count, np.float32(1))
                if is_gated:
                    add_bias(up, bias + e.width * 4, count, np.float32(1))
            activate(e.activation, gate, up, count, f32_at(e.weights)[first + pair], e.alpha, e.limit)
            call_pack(e.down_pack, gate, row, count, e.width, e.mid + (first + pair) * e.width * 4)


@chunk
def down(job: int, number: int) -> None:
    """Multiplies some rows of down of every slot, and adds to `out`."""
    e = record(job, EXPERTS)
    row, line, to_next = number * e.down_rows, e.down_line, e.down_rows * 4
    count, part = min(e.down_rows, e.hidden - row), e.part + number * GROUP * to_next
    for slot in range(e.count):
        base = e.slab + i64_at(e.slots)[slot] * e.stride
        w = base + e.first_rows * e.line + row * line
        soon, after = w, i64_at(e.offsets)[slot + 1]
        if slot + 1 < e.count:
            soon += (i64_at(e.slots)[slot + 1] - i64_at(e.slots)[slot]) * e.stride
        for first in range(i64_at(e.offsets)[slot], after, GROUP):
            n, mid = min(GROUP, after - first), e.mid + first * e.width * 4
            call_rows(e.down_multiply, w, line, count, soon, mid, e.width * 4, e.iota, n, e.width, part, to_next)
            for pair in range(n):
                out = f32_at(e.out + (i64_at(e.index)[first + pair] * e.hidden + row) * 4)
                values = part + pair * to_next
                if e.bias:
                    bias = base + e.bias + (e.first_rows + row) * 4
                    add_bias(values, bias, count, f32_at(e.weights)[first + pair])
                result = f32_at(values)
                for k in range(count):
                    out[k] += result[k]


_packing, _gating, _adding = address_of(pack_token), address_of(gate_up), address_of(down)


@code(INT, INT)
def run_experts(control: int, job: int) -> None:
    """Runs the kernel from an EXPERTS record."""
    e = record(job, EXPERTS)
    parallel(control, _packing(), job, e.tokens)
    parallel(control, _gating(), job, e.count * ((e.width + e.gate_rows - 1) // e.gate_rows))
    parallel(control, _adding(), job, (e.hidden + e.down_rows - 1) // e.down_rows)


EXPERTS_CODE = (pack_token, gate_up, down, run_experts)
