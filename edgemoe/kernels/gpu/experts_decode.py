"""Computes the experts of few tokens on a GPU, where they lie, without the host: in the slab or in pinned RAM.

Each call (token, expert) is computed by programs of its own, which look its address up. Weights are read as words of
four bytes, sixteen bytes at once if the row length allows, and multiplied in registers. Plane j of the activations
holds the factors of number j of each word. Parameters of Triton functions have no annotations, because Triton would
evaluate them.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

from edgemoe.kernels.gpu.affine_weights import affine_number, code_words, lane_factors, word_in_lane, words_above
from edgemoe.kernels.gpu.expert_blocks import DOWN_CONSTANTS, activated
from edgemoe.kernels.gpu.launches import await_inputs, launch, launch_options
from edgemoe.kernels.gpu.weights import jit

COMPILED: Any = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
WORDS = 128  # of a row in one step of a program: four of each of a warp's threads
UNROLLED = 4  # steps at most that are not a loop


@jit
def number(word, J: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns number j of each word, float32, without its scale; of int4 it is larger by `excess`."""
    if KIND == 0:
        return ((((word >> (8 * J)) & 0xFF) ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    if KIND == 1:  # of the code c, 16 + c, whose mantissa begins with the code
        place: tl.constexpr = 8 * J if J < 4 else 8 * J - 28
        moved = word
        if place < 19:
            moved = word << (19 - place)
        if place > 19:
            moved = word >> (place - 19)
        if COMPILED:  # in one instruction, which ptxas does not find
            mixed = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x780000, 0x41800000, 0xEA;", "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            mixed = (moved & 0x780000) | 0x41800000
        return mixed.to(tl.float32, bitcast=True)
    if KIND == 2:
        at: tl.constexpr = 8 * J if J < 4 else 8 * J - 28
        code = word >> at
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126
    if KIND == 3:
        byte = word >> (8 * J)
        bits = ((byte & 127) << 20) | ((byte & 128) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    if KIND == 4:
        return word.to(tl.float32, bitcast=True)
    if J == 0:
        return (word << 16).to(tl.float32, bitcast=True)
    return (word & -65536).to(tl.float32, bitcast=True)


@jit
def plane_of(column, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the index of a column's activation in planes of n columns: its plane first, then its word."""
    if KIND == 4:
        return column
    if KIND == 5:
        return column % 2 * (n // 2) + column // 2
    run = column // 512
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 32
    lanes = tl.where(run < full, 16, rest)
    lane = column % 512 // 32
    place = column % 32
    if KIND == 3:
        byte = run * 512 + place * lanes + lane
        return byte % 4 * (n // 4) + byte // 4
    if KIND == 0 or (KIND < 0 and (-1 - KIND) % 4 == 3):
        return place % 4 * (n // 4) + run * 128 + place // 4 * lanes + lane
    return place % 8 * (n // 8) + run * 64 + place // 8 * lanes + lane


@jit
def lane_among(at, per: tl.constexpr, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lane, among all of a row, of words or bytes `at`; a full run has `per` of them."""
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 32
    run = at // per
    lane = at % 16
    if rest > 0:
        lane = tl.where(run < full, lane, (at - full * per) % rest)
    return run * 16 + lane


@jit
def read(places, live):  # type: ignore[no-untyped-def]
    """Loads words at places [r, w]; zero for words [w] that are not live. All are if `live` is None."""
    if live is None:
        result = tl.load(places, eviction_policy="evict_first")
    else:
        result = tl.load(places, mask=live[None, :], other=0, eviction_policy="evict_first")
    return result


@jit
def words_at(rows, at, live, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns words `at` [w] of rows [r] of LINE bytes that begin at bytes `rows`, as they can be read."""
    if LINE % 4 == 0:
        return read(rows.to(tl.pointer_type(tl.int32))[:, None] + at[None, :], live)
    if LINE % 2 == 0:
        halves = rows.to(tl.pointer_type(tl.uint16))[:, None] + 2 * at[None, :]
        return read(halves, live).to(tl.int32) | (read(halves + 1, live).to(tl.int32) << 16)
    first = rows[:, None] + 4 * at[None, :]
    word = read(first, live).to(tl.int32)
    for byte in tl.static_range(1, 4):
        word |= read(first + byte, live).to(tl.int32) << (8 * byte)
    return word


@jit
def scale_of(rows, lane, live, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales [r, w] of lanes [w] of rows [r], float32."""
    codes: tl.constexpr = n if KIND == 0 or KIND == 3 else n // 2
    at = rows[:, None] + codes
    if KIND == 3:
        return read(at.to(tl.pointer_type(tl.float32)) + lane[None, :] // 4, live)
    if KIND == 2:
        bits = read(at + lane[None, :], live).to(tl.int32) << 23
        return tl.maximum(bits, 1 << 22).to(tl.float32, bitcast=True)
    return read(at.to(tl.pointer_type(tl.bfloat16)) + lane[None, :], live).to(tl.float32)


@jit
def words_of(  # type: ignore[no-untyped-def]
    rows, start, count: tl.constexpr, LINE: tl.constexpr, KIND: tl.constexpr, KW: tl.constexpr
):
    """Returns KW words of rows [r], of `count` words each, from word `start` on; zero beyond."""
    at = start + tl.arange(0, KW)
    index = at
    if KIND < 0:
        index = code_words(at, KIND)
    if count % KW == 0:
        return words_at(rows, index, None, LINE)
    return words_at(rows, index, at < count, LINE)


@jit
def word_factors(rows, at, live, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scale and minimum [r, w] of words `at` [w] of affine rows [r], float32."""
    each: tl.constexpr = 4 if (-1 - KIND) % 4 == 3 else 8
    split: tl.constexpr = (-1 - KIND) // 64 % 4 == 2
    which = word_in_lane(at, n, KIND)
    half = which * each // 16 if split else which * 0
    lane = lane_among(at, 512 // each, n)
    if live is None:
        scale, minimum = lane_factors(rows[:, None], lane[None, :], half[None, :], None, n, KIND)
    else:
        scale, minimum = lane_factors(rows[:, None], lane[None, :], half[None, :], live[None, :], n, KIND)
    return scale, minimum


@jit
def affine_products(  # type: ignore[no-untyped-def]
    rows, word, x, at, live, n: tl.constexpr, LINE: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    KW: tl.constexpr,
):  # fmt: skip
    """Returns the same as `products`, of words `at` of affine rows."""
    each: tl.constexpr = 4 if (-1 - KIND) % 4 == 3 else 8
    count: tl.constexpr = n // each
    which = word_in_lane(at, n, KIND)
    above = word
    if (-1 - KIND) % 4 == 1 or (-1 - KIND) % 4 == 2:
        above = words_at(rows, words_above(at, n, KIND), live, LINE)
    total = tl.zeros((ROWS, KW), tl.float32)
    sums = tl.zeros((KW,), tl.float32)
    for j in tl.static_range(each):
        if live is None:
            xj = tl.load(x + j * count + at)
        else:
            xj = tl.load(x + j * count + at, mask=live, other=0.0)
        total += affine_number(word, above, which[None, :], j, KIND) * xj[None, :]
        sums += xj
    scale, minimum = word_factors(rows, at, live, n, KIND)
    return total * scale + sums[None, :] * minimum


@jit
def products(  # type: ignore[no-untyped-def]
    rows, word, x, start, n: tl.constexpr, LINE: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """Returns sums [r, KW] of the products of words start: of rows [r] with activations x, in planes.

    A word has EACH numbers.
    """
    count: tl.constexpr = n // EACH
    at = start + tl.arange(0, KW)
    if count % KW == 0:
        live = None
    else:
        live = at < count
    if KIND < 0:
        return affine_products(rows, word, x, at, live, n, LINE, KIND, ROWS, KW)
    total = tl.zeros((ROWS, KW), tl.float32)
    excess = tl.zeros((KW,), tl.float32)
    for j in tl.static_range(EACH):
        if count % KW == 0:
            xj = tl.load(x + j * count + at)
        else:
            xj = tl.load(x + j * count + at, mask=live, other=0.0)
        if KIND == 3 and n % 128 > 0:  # the numbers of a word may have several scales
            scale = scale_of(rows, lane_among(4 * at + j, 512, n), live, n, KIND)
            total += number(word, j, KIND) * scale * xj[None, :]
        else:
            total += number(word, j, KIND) * xj[None, :]
        if KIND == 1:
            excess += xj
    if KIND == 1:
        total -= 24.0 * excess[None, :]
    if KIND < 3:
        by_four = at // 4 * 4 + at % 4  # so that a thread reads the scales of its own four words
        total *= scale_of(rows, lane_among(by_four, 512 // EACH, n), live, n, KIND)
    if KIND == 3 and n % 128 == 0:
        total *= scale_of(rows, lane_among(4 * at, 512, n), live, n, KIND)
    return total


@jit
def row_sums(  # type: ignore[no-untyped-def]
    rows,
    x,
    n: tl.constexpr,
    LINE: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KW: tl.constexpr,
    LOOPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Returns the products [r] of rows [r], which begin at bytes `rows`, with activations x of n columns.

    Awaits the activations once its first weights are under way.
    """
    wide: tl.constexpr = KIND == 0 or KIND == 3 or (KIND < 0 and (-1 - KIND) % 4 == 3)  # codes are whole bytes
    each: tl.constexpr = (1 if KIND == 4 else 2) if KIND >= 4 else 4 if wide else 8
    words: tl.constexpr = n // each
    first = words_of(rows, 0, words, LINE, KIND, KW)
    await_inputs(EARLY)
    total = products(rows, first, x, 0, n, LINE, KIND, each, ROWS, KW)
    if LOOPS:
        for start in range(KW, words, KW):
            word = words_of(rows, start, words, LINE, KIND, KW)
            total += products(rows, word, x, start, n, LINE, KIND, each, ROWS, KW)
    else:
        for step in tl.static_range(1, (words + KW - 1) // KW):
            word = words_of(rows, step * KW, words, LINE, KIND, KW)
            total += products(rows, word, x, step * KW, n, LINE, KIND, each, ROWS, KW)
    return tl.sum(total, 1)


@jit
def expert_at(slab, places, ids, call):  # type: ignore[no-untyped-def]
    """Returns the address of the expert of a call, which Triton is told to be aligned as slots are."""
    return slab + tl.multiple_of(tl.load(places + tl.load(ids + call)), 16)


@jit
def call_gate_up(  # type: ignore[no-untyped-def]
    x,  # float32 [T, H], in planes
    slab,  # bytes
    places,  # int64 [E]: bytes from the slab's begin to each expert, laid out as in `expert_blocks.gate_up`
    ids,  # int64 [T * k]
    mid,  # float32 [T * k, I] out, in planes
    k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    first_rows: tl.constexpr,
    line: tl.constexpr,
    bias: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    KIND: tl.constexpr,
    DOWN_KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    KW: tl.constexpr,
    LOOPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    await_inputs(EARLY)  # the ids may be new
    call = tl.program_id(0)
    expert = expert_at(slab, places, ids, call)
    each: tl.constexpr = first_rows // width  # 2: a gate, its up, the next gate; 1: ups alone
    r = tl.arange(0, each * ROWS)
    outs = tl.program_id(1) * ROWS + r // each
    both = row_sums(
        expert + (tl.minimum(outs, width - 1) + r % each * width) * line,
        x + call // k * hidden,
        hidden,
        line,
        KIND,
        each * ROWS,
        KW,
        LOOPS,
        False,
    )
    if each == 2:
        gate, up = tl.split(tl.reshape(both, (ROWS, 2)))
    else:
        gate = both
        up = both
    cols = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if bias > 0:
        biases = (expert + bias).to(tl.pointer_type(tl.float32)) + cols
        gate += tl.load(biases, mask=cols < width, other=0.0)
        if each == 2:
            up += tl.load(biases + width, mask=cols < width, other=0.0)
    out = activated(gate, up, ACTIVATION, alpha, limit)
    tl.store(mid + call * width + plane_of(cols, width, DOWN_KIND), out, mask=cols < width)


@jit
def call_down(  # type: ignore[no-untyped-def]
    mid,  # float32 [T * k, I], in planes
    slab,
    places,
    ids,
    shares,  # float32 [T * k]
    out,  # float32 [T * k, H]
    hidden: tl.constexpr,
    width: tl.constexpr,
    first_rows: tl.constexpr,
    line: tl.constexpr,
    down_line: tl.constexpr,
    bias: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KW: tl.constexpr,
    LOOPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    call = tl.program_id(0)  # whose id is older than the kernel before
    expert = expert_at(slab, places, ids, call)
    cols = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows = expert + first_rows * line + tl.minimum(cols, hidden - 1) * down_line
    total = row_sums(rows, mid + call * width, width, down_line, KIND, ROWS, KW, LOOPS, EARLY)
    if bias > 0:
        biases = (expert + bias).to(tl.pointer_type(tl.float32)) + first_rows
        total += tl.load(biases + cols, mask=cols < hidden, other=0.0)
    tl.store(out + call * hidden + cols, total * tl.load(shares + call), mask=cols < hidden)


@jit
def combine(  # type: ignore[no-untyped-def]
    out, to, factor, k: tl.constexpr, hidden: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr
):
    """Adds the sums of each token's calls, in their order, times `factor` to `to` [T, H]."""
    await_inputs(EARLY)
    token = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = cols < hidden
    total = tl.zeros((COLS,), tl.float32)
    for j in tl.static_range(k):
        total += tl.load(out + (token * k + j) * hidden + cols, mask=live, other=0.0)
    before = tl.load(to + token * hidden + cols, mask=live, other=0.0)
    tl.store(to + token * hidden + cols, before + factor * total, mask=live)


@jit
def to_planes(  # type: ignore[no-untyped-def]
    x, planes, n: tl.constexpr, KIND: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr
):
    """Lays activations [T, n] out in planes, float32."""
    await_inputs(EARLY)
    row = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    value = tl.load(x + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(planes + row * n + plane_of(cols, n, KIND), value, mask=cols < n)


COMBINED = 256  # columns of one program
GATES, OUTPUTS = 4, 8  # rows of one program


def in_planes(x: Any, kind: int) -> Any:
    """Returns activations x [T, n] in planes, float32 [T, n], for weights of a kind."""
    import torch

    planes = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    grid = (len(x), triton.cdiv(x.shape[1], COMBINED))
    launch(to_planes, grid, x, planes, n=x.shape[1], KIND=kind, COLS=COMBINED, **launch_options(x.device))
    return planes


def steps_of(columns: int, kind: int) -> dict[str, Any]:
    """Returns the number of words of a row of `columns` columns that are read at a time, and whether in a loop."""
    each = {0: 4, 1: 8, 2: 8, 3: 4, 4: 1, 5: 2}[kind] if kind >= 0 else 4 if (-1 - kind) % 4 == 3 else 8
    return {"KW": WORDS, "LOOPS": columns // each > UNROLLED * WORDS}


def experts_decode(planes: Any, slab: Any, places: Any, ids: Any, shares: Any, sizes: dict[str, Any], out: Any) -> Any:
    """Writes the weighted outputs of the calls `ids` [T * k] to `out` [T * k, H], each in a row of its own.

    `planes` are the hidden states [T, H] by `in_planes`. `places` [E] are the bytes from the slab's begin to the
    layer's experts, and `sizes` its `expert_blocks.constants`. Nothing is read by the host.
    """
    import torch

    calls, hidden, width, kind = ids.numel(), sizes["hidden"], sizes["width"], sizes["KIND"]
    early = launch_options(planes.device)
    mid = torch.empty((calls, width), dtype=torch.float32, device=planes.device)
    ours = {name: value for name, value in sizes.items() if name not in ("down_line", "stride")}
    grid = (calls, triton.cdiv(width, GATES))
    launch(
        call_gate_up,
        grid,
        planes,
        slab,
        places,
        ids,
        mid,
        **ours,
        **steps_of(hidden, kind),
        ROWS=GATES,
        num_warps=1,
        **early,
    )
    ours = {name: sizes[name] for name in DOWN_CONSTANTS if name != "stride"}
    grid = (calls, triton.cdiv(hidden, OUTPUTS))
    launch(
        call_down,
        grid,
        mid,
        slab,
        places,
        ids,
        shares,
        out,
        **ours,
        KIND=sizes["DOWN_KIND"],
        **steps_of(width, sizes["DOWN_KIND"]),
        ROWS=OUTPUTS,
        num_warps=1,
        **early,
    )
    return out


def add_sums(out: Any, to: Any, k: int, factor: float) -> None:
    """Adds the sums of `out` [T * k, H] by token, times `factor`, to `to` [T, H]."""
    grid = (len(to), triton.cdiv(to.shape[1], COMBINED))
    launch(
        combine, grid, out, to, factor, k=k, hidden=to.shape[1], COLS=COMBINED, num_warps=4, **launch_options(to.device)
    )
