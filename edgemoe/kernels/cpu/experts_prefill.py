"""Computes the SwiGLU experts of one layer for many tokens each, where they lie in the slab.

A group is at most GROUP tokens of one expert. Their vectors are the columns of a panel. Gate and up rows turn it into
the panel of the next product, scaled by the routing weight; down rows add to `out`. Each chunk multiplies a run of rows
with all groups, so that weights are read from memory once. The outputs of a token's experts are added in the order of
`slots`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from edgemoe.kernels.cpu.gemm_tile import make_fill, make_tile
from edgemoe.kernels.cpu.gemv import LANES
from edgemoe.kernels.cpu.intrinsics import INT, address_of, call_rows, chunk, code, f32_at, fields, i64_at, record
from edgemoe.kernels.cpu.object_cache import Code
from edgemoe.kernels.cpu.thread_pool import parallel
from edgemoe.kernels.cpu.vector import swiglu

GROUP = 2 * LANES  # tokens of a group at most
LINE = 4 * GROUP  # bytes of a panel's line
GATE_ROWS = 64  # rows of gate and of up in one chunk
DOWN_ROWS = 64  # rows of down in one chunk

# The record of one call; arrays are addresses.
# `x` [tokens, hidden] in the weights' type; `out` [tokens, hidden] float32, which is added to; `slots` [count] and
# `index` [m] int64 and `weights` [m] float32 as in `Kernels.experts`; `groups` [group_count, 3] int64: index into
# `slots`, first pair and number of pairs of each group, in the order of `slots`; `firsts` [count + 1] int64, the first
# group of each slot; `panels`, `mid`, `gates` and `part` scratch memory, see `scratch_floats`.
PREFILL_EXPERTS = fields(
    *("slab", "stride", "slots", "count", "index", "weights", "x", "out", "hidden", "width"),
    *("groups", "group_count", "firsts", "panels", "mid", "gates", "part"),
)


def scratch_floats(hidden: int, width: int, groups: int, slots: int) -> dict[str, int]:
    """Returns the sizes of the scratch arrays, in float32, for so many groups and slots."""
    return {
        "panels": groups * hidden * GROUP,
        "mid": groups * width * GROUP,
        "gates": slots * -(-width // GATE_ROWS) * 2 * GATE_ROWS * GROUP,
        "part": -(-hidden // DOWN_ROWS) * DOWN_ROWS * GROUP,
    }


def group_pairs(offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns `groups` and `firsts` of a PREFILL_EXPERTS record; slot i serves the pairs offsets[i]:offsets[i + 1]."""
    counts = np.diff(offsets)
    each = -(-counts // GROUP)
    firsts = np.concatenate(([0], np.cumsum(each)))
    slot = np.repeat(np.arange(len(counts)), each)
    begin = offsets[slot] + (np.arange(len(slot)) - firsts[slot]) * GROUP
    return np.stack([slot, begin, np.minimum(GROUP, offsets[slot + 1] - begin)], axis=1), firsts


def _make_fill_panel(bf16: bool) -> Code:
    """Makes the chunk that puts the vectors of one group into its panel."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    column, _ = make_fill(bf16)

    @chunk
    def fill(job: int, number: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        group = i64_at(m.groups + 24 * number)
        panel, line = m.panels + number * m.hidden * LINE, m.hidden * size
        for j in range(group[2]):
            source = m.x + i64_at(m.index)[group[1] + j] * line
            column(panel, LINE, j, source, m.hidden // per_word)

    return fill


def _make_gate_up(bf16: bool, tile_code: Code) -> Code:
    """Makes the chunk that multiplies some rows of gate and of up of one slot with all of its groups."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    multiply, (_, lines) = address_of(tile_code), make_fill(bf16)

    @chunk
    def gate_up(job: int, number: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        per_slot = (m.width + GATE_ROWS - 1) // GATE_ROWS
        slot, row, line = number // per_slot, number % per_slot * GATE_ROWS, m.hidden * size
        count, words = min(GATE_ROWS, m.width - row), m.hidden // per_word
        w = m.slab + i64_at(m.slots)[slot] * m.stride + row * line
        v, gates = w + m.width * line, m.gates + number * 2 * GATE_ROWS * LINE
        ups = gates + GATE_ROWS * LINE
        for number in range(i64_at(m.firsts)[slot], i64_at(m.firsts)[slot + 1]):
            group = i64_at(m.groups + 24 * number)
            panel, columns = m.panels + number * m.hidden * LINE, (group[2] + LANES - 1) // LANES * LANES
            call_rows(multiply(), w, line, count, v, panel, LINE, words, gates, LINE, columns, 1)
            call_rows(multiply(), v, line, count, w, panel, LINE, words, ups, LINE, columns, 1)
            for k in range(count):
                swiglu(gates + k * LINE, ups + k * LINE, columns, np.float32(1))
            scales = f32_at(m.weights + 4 * group[1])
            for k in range(count):
                values = f32_at(gates + k * LINE)
                for j in range(group[2]):
                    values[j] *= scales[j]
            mid = m.mid + number * m.width * LINE
            for pair in range(count // 2):
                low = gates + 2 * pair * LINE
                lines(mid, LINE, row // 2 + pair, low, low + LINE, columns)

    return gate_up


def _make_down(bf16: bool, tile_code: Code) -> Code:
    """Makes the chunk that multiplies some rows of down of every slot, and adds to `out`."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    multiply = address_of(tile_code)

    @chunk
    def down(job: int, number: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        row, line = number * DOWN_ROWS, m.width * size
        count, part = min(DOWN_ROWS, m.hidden - row), m.part + number * DOWN_ROWS * LINE
        for slot in range(m.count):
            w = m.slab + i64_at(m.slots)[slot] * m.stride + (2 * m.width * m.hidden + row * m.width) * size
            soon = w
            if slot + 1 < m.count:
                soon += (i64_at(m.slots)[slot + 1] - i64_at(m.slots)[slot]) * m.stride
            for number in range(i64_at(m.firsts)[slot], i64_at(m.firsts)[slot + 1]):
                group = i64_at(m.groups + 24 * number)
                mid, columns = m.mid + number * m.width * LINE, (group[2] + LANES - 1) // LANES * LANES
                words = m.width // per_word
                call_rows(multiply(), w, line, count, soon, mid, LINE, words, part, LINE, columns, 1)
                for j in range(group[2]):
                    out = f32_at(m.out + (i64_at(m.index)[group[1] + j] * m.hidden + row) * 4)
                    values = f32_at(part + 4 * j)
                    for k in range(count):
                        out[k] += values[k * GROUP]

    return down


@cache
def make_prefill_experts(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel run(control, address of a PREFILL_EXPERTS record). Returns it and all code that it refers to."""
    tile_code = make_tile(bf16)
    fill, gate_up, down = _make_fill_panel(bf16), _make_gate_up(bf16, tile_code), _make_down(bf16, tile_code)
    filling, gating, adding = address_of(fill), address_of(gate_up), address_of(down)

    @code(INT, INT)
    def run(control: int, job: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        parallel(control, filling(), job, m.group_count)
        parallel(control, gating(), job, m.count * ((m.width + GATE_ROWS - 1) // GATE_ROWS))
        parallel(control, adding(), job, (m.hidden + DOWN_ROWS - 1) // DOWN_ROWS)

    return run, (tile_code, fill, gate_up, down, run)
