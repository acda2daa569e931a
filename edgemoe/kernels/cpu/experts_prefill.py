"""Computes the experts of one layer for many tokens each, where they lie in the slab.

A group is at most GROUP tokens of one expert. Their vectors are the columns of a panel. Gate and up rows, or up rows
alone, turn it into the panel of the next product, scaled by the routing weight. Down rows add to `out`. Each chunk
multiplies a run of rows with all groups, so that weights are read from memory once. Encoded rows are decoded first,
into memory that stays in the cache. The outputs of a token's experts are added in the order of `slots`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from edgemoe.jit.intrinsics import INT, LANES, call_pack, call_rows, f32_at, i64_at, record
from edgemoe.jit.object_cache import Code, address_of, chunk, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.encoded.packing import borrow, give_back, make_order, make_scatter
from edgemoe.kernels.cpu.experts_decode import LAYOUT
from edgemoe.kernels.cpu.gemm_tile import make_tile
from edgemoe.kernels.cpu.gemv import shared_rows
from edgemoe.kernels.cpu.panels import (
    GROUP,
    LINE,
    SIDE,
    add_words,
    make_fill,
    make_fill_panel,
    room_for_square,
    transpose,
)
from edgemoe.kernels.cpu.vector import activate, shift
from edgemoe.types.arrays import fields

GATE_ROWS = 64  # rows of gate and of up in one chunk
MOST_DOWN_ROWS, LEAST_DOWN_ROWS = 64, 16  # rows of down in one chunk

# The record of one call; arrays are addresses.
# * `x` [tokens, hidden] in the model's type
# * `out` [tokens, hidden] float32, to which the results are added
# * `slots` [count] and `index` [m] int64, `weights` [m] float32, as in `Kernels.experts`
# * `groups` [group_count, 3] int64, in the order of `slots`: index into `slots`, first pair and number of pairs
# * `firsts` [count + 1] int64, the first group of each slot
# * `down_rows` rows of down in one chunk, see `down_rows`
# * `panels`, `mid`, `gates` and `part` scratch memory, see `scratch_floats`
# For encoded rows:
# * `unpack` and `down_unpack` addresses of the code that decodes rows of gate and up, and of down
# * `ordered` [tokens, hidden] scratch memory in the model's type
# * `decoded` scratch memory of rows for each thread, `decoded_bytes` apart
# * `borrowed` [threads] int64, 1 if a thread's is in use
PREFILL_EXPERTS = np.dtype(
    [
        *fields(
            *("slab", "stride", "slots", "count", "index", "weights", "x", "out"),
            *("groups", "group_count", "firsts", "panels", "mid", "gates", "part"),
            *("unpack", "down_unpack", "ordered", "tokens", "decoded", "decoded_bytes", "borrowed", "threads"),
            "down_rows",
        ).descr,
        *LAYOUT.descr,
    ]
)


def scratch_floats(hidden: int, width: int, groups: int, slots: int) -> dict[str, int]:
    """Returns the sizes of the scratch arrays, in float32, for numbers of groups and slots."""
    return {
        "panels": groups * hidden * GROUP,
        "mid": groups * width * GROUP,
        "gates": slots * -(-width // GATE_ROWS) * 2 * GATE_ROWS * GROUP,
        "part": -(-hidden // MOST_DOWN_ROWS) * MOST_DOWN_ROWS * GROUP,
    }


def down_rows(threads: int) -> int:
    """Returns `down_rows` of a record."""
    return shared_rows(MOST_DOWN_ROWS, LEAST_DOWN_ROWS, threads)


def decoded_floats(hidden: int, width: int) -> int:
    """Returns the size, in float32, of the decoded rows of one thread."""
    return max(2 * GATE_ROWS * hidden, MOST_DOWN_ROWS * width) + LANES


def group_pairs(offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns `groups` and `firsts` of a PREFILL_EXPERTS record; slot i serves the pairs offsets[i]:offsets[i + 1]."""
    counts = np.diff(offsets)
    each = -(-counts // GROUP)
    firsts = np.concatenate(([0], np.cumsum(each)))
    slot = np.repeat(np.arange(len(counts)), each)
    begin = offsets[slot] + (np.arange(len(slot)) - firsts[slot]) * GROUP
    return np.stack([slot, begin, np.minimum(GROUP, offsets[slot + 1] - begin)], axis=1), firsts


def _make_order_token(bf16: bool) -> Code:
    """Makes the chunk that copies a token into the order of decoded rows."""
    size, order = 2 if bf16 else 4, make_order(bf16)

    @chunk
    def order_token(job: int, token: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        line = m.hidden * size
        order(m.x + token * line, bf16, m.hidden, m.ordered + token * line)

    return order_token


def _make_fill_group(bf16: bool) -> Code:
    """Makes the chunk that puts the vectors of one group into its panel."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    fill = make_fill_panel(bf16)

    @chunk
    def fill_group(job: int, number: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        group, x = i64_at(m.groups + 24 * number), m.ordered if m.unpack else m.x
        fill(m.panels + number * m.hidden * LINE, x, m.hidden * size, m.index, group[1], group[2], m.hidden // per_word)

    return fill_group


def _make_gate_up(bf16: bool, tile_code: Code) -> Code:
    """Makes the chunk that multiplies some rows of gate and of up, or of up alone, of one slot with all its groups."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    multiply, (_, lines) = address_of(tile_code), make_fill(bf16)
    scatter = make_scatter(bf16)

    @chunk
    def gate_up(job: int, number: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        per_slot = (m.width + GATE_ROWS - 1) // GATE_ROWS
        slot, row, line = number // per_slot, number % per_slot * GATE_ROWS, m.line
        count, words = min(GATE_ROWS, m.width - row), m.hidden // per_word
        base = m.slab + i64_at(m.slots)[slot] * m.stride
        w, bias = base + row * line, base + m.bias + row * 4
        v, gates = w + m.width * line, m.gates + number * 2 * GATE_ROWS * LINE
        ups, mine, is_gated = gates + GATE_ROWS * LINE, -1, m.first_rows > m.width
        if m.unpack:
            mine, line = borrow(m.borrowed, m.threads), m.hidden * size
            decoded = m.decoded + mine * m.decoded_bytes
            call_pack(m.unpack, w, m.line, count, m.hidden, decoded)
            if is_gated:
                call_pack(m.unpack, v, m.line, count, m.hidden, decoded + count * line)
            w, v = decoded, decoded + count * line
        for number in range(i64_at(m.firsts)[slot], i64_at(m.firsts)[slot + 1]):
            group = i64_at(m.groups + 24 * number)
            panel, columns = m.panels + number * m.hidden * LINE, (group[2] + LANES - 1) // LANES * LANES
            call_rows(multiply(), w, line, count, v, panel, LINE, words, gates, LINE, columns, 1)
            if is_gated:
                call_rows(multiply(), v, line, count, w, panel, LINE, words, ups, LINE, columns, 1)
            for k in range(count):
                if m.bias:
                    shift(gates + k * LINE, f32_at(bias)[k], columns)
                    if is_gated:
                        shift(ups + k * LINE, f32_at(bias)[m.width + k], columns)
                activate(m.activation, gates + k * LINE, ups + k * LINE, columns, np.float32(1), m.alpha, m.limit)
            scales = f32_at(m.weights + 4 * group[1])
            for k in range(count):
                values = f32_at(gates + k * LINE)
                for j in range(group[2]):
                    values[j] *= scales[j]
            mid = m.mid + number * m.width * LINE
            if m.unpack:
                scatter(mid, LINE, row, count, m.width, gates, LINE, columns)
                continue
            for pair in range(count // 2):
                low = gates + 2 * pair * LINE
                lines(mid, LINE, row // 2 + pair, low, low + LINE, columns)
        if mine >= 0:
            give_back(m.borrowed, mine)

    return gate_up


def _make_down(bf16: bool, tile_code: Code) -> Code:
    """Makes the chunk that multiplies some rows of down of every slot, and adds to `out`."""
    size, per_word = (2, 2) if bf16 else (4, 1)
    multiply = address_of(tile_code)

    @chunk
    def down(job: int, number: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        row, mine = number * m.down_rows, -1
        count, part = min(m.down_rows, m.hidden - row), m.part + number * m.down_rows * LINE
        square = room_for_square()
        if m.unpack:
            mine = borrow(m.borrowed, m.threads)
        for slot in range(m.count):
            base, line = m.slab + i64_at(m.slots)[slot] * m.stride, m.down_line
            w = base + m.first_rows * m.line + row * line
            soon = w
            if slot + 1 < m.count:
                soon += (i64_at(m.slots)[slot + 1] - i64_at(m.slots)[slot]) * m.stride
            if m.unpack:
                decoded = m.decoded + mine * m.decoded_bytes
                call_pack(m.down_unpack, w, line, count, m.width, decoded)
                w, line = decoded, m.width * size
            bias = f32_at(base + m.bias + (m.first_rows + row) * 4)
            for number in range(i64_at(m.firsts)[slot], i64_at(m.firsts)[slot + 1]):
                group = i64_at(m.groups + 24 * number)
                mid, columns = m.mid + number * m.width * LINE, (group[2] + LANES - 1) // LANES * LANES
                words = m.width // per_word
                call_rows(multiply(), w, line, count, soon, mid, LINE, words, part, LINE, columns, 1)
                turned = count - count % SIDE
                for begin in range(0, group[2], SIDE):
                    for k in range(0, turned, SIDE):
                        transpose(part + k * LINE + 4 * begin, LINE, square, 4 * SIDE)
                        for j in range(min(SIDE, group[2] - begin)):
                            token = i64_at(m.index)[group[1] + begin + j]
                            add_words(m.out + (token * m.hidden + row + k) * 4, square + j * 4 * SIDE)
                for j in range(group[2]):
                    out = f32_at(m.out + (i64_at(m.index)[group[1] + j] * m.hidden + row) * 4)
                    values, share = f32_at(part + 4 * j), f32_at(m.weights)[group[1] + j]
                    for k in range(turned, count):
                        out[k] += values[k * GROUP]
                    if m.bias:
                        for k in range(count):
                            out[k] += share * bias[k]
        if mine >= 0:
            give_back(m.borrowed, mine)

    return down


@cache
def make_prefill_experts(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel run(control, address of a PREFILL_EXPERTS record). Returns it and all code that it refers to."""
    tile_code = make_tile(bf16)
    order, fill = _make_order_token(bf16), _make_fill_group(bf16)
    gate_up, down = _make_gate_up(bf16, tile_code), _make_down(bf16, tile_code)
    ordering, filling, gating, adding = map(address_of, (order, fill, gate_up, down))

    @code(INT, INT)
    def run(control: int, job: int) -> None:
        m = record(job, PREFILL_EXPERTS)
        if m.unpack:
            parallel(control, ordering(), job, m.tokens)
        parallel(control, filling(), job, m.group_count)
        parallel(control, gating(), job, m.count * ((m.width + GATE_ROWS - 1) // GATE_ROWS))
        parallel(control, adding(), job, (m.hidden + m.down_rows - 1) // m.down_rows)

    return run, (tile_code, order, fill, gate_up, down, run)
