"""Computes the experts of many tokens on a GPU, in their slots of the slab, on its matrix units.

Calls come sorted by expert and cut into blocks, as in `expert_blocks`. A tile of weights is read as words of four
bytes, decoded once and multiplied with all rows of a block. Activations lie in the order of the codes, so that they
are read sixteen bytes at once. Parameters of Triton functions have no annotations, because Triton would evaluate them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from edgemoe.kernels.gpu.affine_weights import affine_number, code_words, word_in_lane, words_above
from edgemoe.kernels.gpu.expert_blocks import DOWN_CONSTANTS, OPTIONS, activated
from edgemoe.kernels.gpu.experts_decode import COMPILED, number, word_factors
from edgemoe.kernels.gpu.weights import jit
from edgemoe.types.experts import ExpertGeometry


@jit
def column_of(at, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the column of the weight that comes at place `at` when words of a row of n columns are decoded."""
    if KIND >= 4:
        return at
    run = at // 512
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 32
    lanes = tl.where(run < full, 16, rest)
    inside = at % 512
    if KIND == 3:
        return run * 512 + inside % lanes * 32 + inside // lanes
    each: tl.constexpr = 4 if KIND == 0 or (KIND < 0 and (-1 - KIND) % 4 == 3) else 8
    word = inside // each
    j = inside % each
    if each == 8:
        j = tl.where(j < 4, 2 * j, 2 * j - 7)  # codes are taken in pairs, 16 bits apart
    return run * 512 + word % lanes * 32 + word // lanes * each + j


@jit
def to_code_order(x, out, n: tl.constexpr, KIND: tl.constexpr, COLS: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Writes a row of activations [T, n] in the order of the codes."""
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = at < n
    tl.store(out + row + at, tl.load(x + row + column_of(at, n, KIND), mask=live), mask=live)


@jit
def containing(places):  # type: ignore[no-untyped-def]
    """Returns pointers to the aligned words that hold bytes at `places`, and the bytes' first bits in them."""
    address = places.to(tl.int64)
    return (address & -4).to(tl.pointer_type(tl.int32)), ((address & 3) << 3).to(tl.int32)


@jit
def loaded(places, live):  # type: ignore[no-untyped-def]
    """Loads from places [c, w]; zero for words [w] that are not live. All are if `live` is None."""
    if live is None:
        result = tl.load(places)
    else:
        result = tl.load(places, mask=live[None, :], other=0)
    return result


@jit
def words_of(rows, at, live, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns words `at` [w] of rows [c] of LINE bytes that begin at bytes `rows`."""
    if LINE % 4 == 0:
        return loaded(rows.to(tl.pointer_type(tl.int32))[:, None] + at[None, :], live)
    places, bits = containing(rows)
    low = loaded(places[:, None] + at[None, :], live)
    high = loaded(places[:, None] + at[None, :] + 1, live)
    shift = tl.broadcast_to(bits[:, None], low.shape)
    if COMPILED:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], dtype=tl.int32, is_pure=True, pack=1
        )
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return (both >> shift.to(tl.int64)).to(tl.int32)


@jit
def scale_index(at, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the index of the scale of each word `at` of a row."""
    words: tl.constexpr = 64 if KIND == 1 or KIND == 2 else 128  # of 512 columns
    scales: tl.constexpr = 4 if KIND == 3 else 16
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 128 if KIND == 3 else n % 512 // 32
    run = at // words
    index = at % scales
    if rest > 0:
        index = tl.where(run < full, index, (at - full * words) % rest)
    index = run * scales + index
    if rest % 4 == 0:  # so that a thread reads the scales of its own four words
        index = tl.max_contiguous(tl.multiple_of(index, [4]), [4])
    return index


@jit
def scales_of(rows, index, live, n: tl.constexpr, LINE: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales [c, w] with these indices [w] of rows [c], float32."""
    at = rows[:, None] + (n if KIND == 0 or KIND == 3 else n // 2)
    if KIND == 3:
        return loaded(at.to(tl.pointer_type(tl.float32)) + index[None, :], live)
    if LINE % 4 > 0:
        places, first = containing(at + index[None, :] * (1 if KIND == 2 else 2))
        bits = loaded(places, live) >> first
    elif KIND == 2:
        bits = loaded(at + index[None, :], live).to(tl.int32)
    else:
        bits = loaded(at.to(tl.pointer_type(tl.uint16)) + index[None, :], live).to(tl.int32)
    if KIND == 2:
        bits = tl.maximum((bits & 0xFF) << 23, 1 << 22)
    else:
        bits = bits << 16
    return bits.to(tl.float32, bitcast=True)


# Each decodes words $2 or $4 to pairs of bfloat16, and multiplies them with the scales in both halves of the last word.
# A code becomes the end of a mantissa; then its excess is subtracted, which is exact. 0x80008000 is twice -0.0.
INT8_PAIRS: Any = tl.constexpr(
    """{
    .reg .b32 a, b, c, minus;
    mov.b32 minus, 0xBF80BF80;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 a, c, minus, a;
    lop3.b32 c, b, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 b, c, minus, b;
    mov.b32 c, 0x80008000;
    fma.rn.bf16x2 $0, a, $3, c;
    fma.rn.bf16x2 $1, b, $3, c;
    }"""
)
INT4_PAIR = """
    lop3.b32 a, w, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 a, a, one, excess;
    fma.rn.bf16x2 ${pair}, a, $5, zero;
    shr.u32 w, w, 4;
"""
INT4_PAIRS: Any = tl.constexpr(
    """{
    .reg .b32 a, w, one, excess, zero;
    mov.b32 one, 0x3F803F80;
    mov.b32 excess, 0xC308C308;
    mov.b32 zero, 0x80008000;
    mov.b32 w, $4;"""
    + "".join(INT4_PAIR.format(pair=pair) for pair in range(4))
    + "}"
)
MXFP4_PAIR = """
    {sign} a, $4, {sign_bits};
    {size} b, $4, {size_bits};
    and.b32 b, b, 0x01C001C0;
    lop3.b32 a, a, 0x80008000, b, 0xEA;
    fma.rn.bf16x2 a, a, large, zero;
    fma.rn.bf16x2 ${pair}, a, $5, zero;
"""
MXFP4_PAIRS: Any = tl.constexpr(
    """{
    .reg .b32 a, b, large, zero;
    mov.b32 large, 0x7E807E80;
    mov.b32 zero, 0x80008000;"""
    + "".join(
        MXFP4_PAIR.format(pair=pair, sign="shl.b32", sign_bits=12 - 4 * pair, size=shift, size_bits=abs(6 - 4 * pair))
        for pair, shift in enumerate(("shl.b32", "shl.b32", "shr.u32", "shr.u32"))
    )
    + "}"
)
FP8_PAIR = """
    prmt.b32 a, $2, 0, {bytes};
    shr.u32 b, a, 4;
    and.b32 b, b, 0x07F007F0;
    lop3.b32 a, a, 0x80008000, b, 0xEA;
    fma.rn.bf16x2 a, a, large, zero;
    shl.b32 b, a, 16;
    and.b32 a, a, 0xFFFF0000;
    mul.f32 a, a, $3;
    mul.f32 b, b, $3;
    cvt.rn.bf16x2.f32 ${pair}, a, b;
"""
FP8_PAIRS: Any = tl.constexpr(
    """{
    .reg .b32 a, b, large, zero;
    mov.b32 large, 0x7B807B80;
    mov.b32 zero, 0x80008000;"""
    + "".join(FP8_PAIR.format(pair=pair, bytes=order) for pair, order in enumerate(("0x1404", "0x3424")))
    + "}"
)


@jit
def paired(pairs):  # type: ignore[no-untyped-def]
    """Returns the halves of words, int16 [..., 2]."""
    return tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))


@jit
def four(a, b, c, d):  # type: ignore[no-untyped-def]
    """Joins four tensors, [..., 2, 2]."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@jit
def bf16_weights(word, scale, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decodes words [c, w] with one scale each to bfloat16 [c, numbers], in the order of `column_of`."""
    if KIND == 3:
        first, second = tl.inline_asm_elementwise(
            FP8_PAIRS, "=&r,=&r,r,r", [word, scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        made = paired(tl.join(first, second))
    else:
        bits = scale.to(tl.int32, bitcast=True)
        both = bits | ((bits >> 16) & 0xFFFF)
        if KIND == 0:
            first, second = tl.inline_asm_elementwise(
                INT8_PAIRS, "=&r,=&r,r,r", [word, both], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
            made = paired(tl.join(first, second))
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                INT4_PAIRS if KIND == 1 else MXFP4_PAIRS,
                "=&r,=&r,=&r,=&r,r,r",
                [word, both],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
            made = paired(four(a, b, c, d))
    each: tl.constexpr = 4 if KIND == 0 or KIND == 3 else 8
    return tl.reshape(made, (word.shape[0], word.shape[1] * each)).to(tl.bfloat16, bitcast=True)


@jit
def affine_scaled(word, above, which, scale, minimum, J: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns number J of each word of affine rows, float32."""
    return affine_number(word, above, which, J, KIND) * scale + minimum


@jit
def affine_tile(rows, at, live, n: tl.constexpr, LINE: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the weights [c, numbers] in words `at` [w] of affine rows [c], float32, in the order of `column_of`."""
    each: tl.constexpr = 4 if (-1 - KIND) % 4 == 3 else 8
    word = words_of(rows, code_words(at, KIND), live, LINE)
    above = word
    if (-1 - KIND) % 4 == 1 or (-1 - KIND) % 4 == 2:
        above = words_of(rows, words_above(at, n, KIND), live, LINE)
    which = word_in_lane(at, n, KIND)
    scale, minimum = word_factors(rows, at, live, n, KIND)
    w = which[None, :]
    a, b = (
        affine_scaled(word, above, w, scale, minimum, 0, KIND),
        affine_scaled(word, above, w, scale, minimum, 1, KIND),
    )
    c, d = (
        affine_scaled(word, above, w, scale, minimum, 2, KIND),
        affine_scaled(word, above, w, scale, minimum, 3, KIND),
    )
    if each == 4:
        return tl.reshape(four(a, b, c, d), (word.shape[0], word.shape[1] * 4))
    e, f = (
        affine_scaled(word, above, w, scale, minimum, 4, KIND),
        affine_scaled(word, above, w, scale, minimum, 5, KIND),
    )
    g, h = (
        affine_scaled(word, above, w, scale, minimum, 6, KIND),
        affine_scaled(word, above, w, scale, minimum, 7, KIND),
    )
    both = tl.permute(tl.join(four(a, c, e, g), four(b, d, f, h)), (0, 1, 4, 2, 3))
    return tl.reshape(both, (word.shape[0], word.shape[1] * 8))


@jit
def scaled(word, scale, J: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns number J of each word, float32."""
    made = number(word, J, KIND)
    if KIND == 1:
        made -= 24.0
    return made * scale


@jit
def float32_weights(word, scale, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decodes words [c, w] with one scale each to float32 [c, numbers], in the order of `column_of`."""
    a, b = scaled(word, scale, 0, KIND), scaled(word, scale, 1, KIND)
    c, d = scaled(word, scale, 2, KIND), scaled(word, scale, 3, KIND)
    if KIND == 0 or KIND == 3:
        made = tl.reshape(four(a, b, c, d), (word.shape[0], word.shape[1] * 4))
    else:
        e, f = scaled(word, scale, 4, KIND), scaled(word, scale, 5, KIND)
        g, h = scaled(word, scale, 6, KIND), scaled(word, scale, 7, KIND)
        both = tl.permute(tl.join(four(a, c, e, g), four(b, d, f, h)), (0, 1, 4, 2, 3))
        made = tl.reshape(both, (word.shape[0], word.shape[1] * 8))
    return made


@jit
def tile(  # type: ignore[no-untyped-def]
    rows, at, live, n: tl.constexpr, LINE: tl.constexpr, KIND: tl.constexpr, item: tl.constexpr
):
    """Returns the weights [c, numbers] in words `at` [w] of rows [c], in numbers of type `item`."""
    if KIND >= 4:
        own: tl.constexpr = tl.float32 if KIND == 4 else tl.bfloat16
        made = loaded(rows.to(tl.pointer_type(own))[:, None] + at[None, :], live).to(item)
    elif KIND < 0:
        made = affine_tile(rows, at, live, n, LINE, KIND).to(item)
    else:
        word = words_of(rows, at, live, LINE)
        scale = scales_of(rows, scale_index(at, n, KIND), live, n, LINE, KIND)
        if COMPILED and item == tl.bfloat16:
            made = bf16_weights(word, scale, KIND)
        else:
            made = float32_weights(word, scale, KIND).to(item)
    return made


@jit
def multiplied(  # type: ignore[no-untyped-def]
    x, inside, rows, n: tl.constexpr, LINE: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """Returns the products [r, c] of activations at x [r] of n columns with weight rows [c]."""
    wide: tl.constexpr = KIND == 0 or KIND == 3 or (KIND < 0 and (-1 - KIND) % 4 == 3)
    each: tl.constexpr = 1 if KIND >= 4 else 4 if wide else 8
    item: tl.constexpr = x.dtype.element_ty
    words: tl.constexpr = n // each
    step: tl.constexpr = INNER // each
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, words, step):
        at = start + tl.arange(0, step)
        places = start * each + tl.arange(0, INNER)
        if words % step == 0:
            live = None
            wanted = inside[:, None]
        else:
            live = at < words
            wanted = inside[:, None] & (places < n)[None, :]
        values = tl.load(x[:, None] + places[None, :], mask=wanted, other=0.0)
        weights = tile(rows, at, live, n, LINE, KIND, item)
        total = tl.dot(values, tl.trans(weights), total, input_precision="ieee")
    return total


@jit
def tile_gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, H], in the order of the codes
    slab,  # bytes: a slot every `stride`, see `expert_blocks.gate_up`
    mid,  # [m, I] out, in the order of the codes of down
    blocks,  # [B, 3] int32: slot, first call, last call + 1
    calls,  # [m] int32: token * k + j
    k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    first_rows: tl.constexpr,
    stride: tl.constexpr,
    line: tl.constexpr,
    bias: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    KIND: tl.constexpr,
    DOWN_KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    block = tl.program_id(1)
    first, end = tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    if first >= end:
        return
    slot = slab + tl.load(blocks + 3 * block).to(tl.int64) * stride
    rows = first + tl.arange(0, ROWS)
    live = rows < end
    tokens = tl.load(calls + rows, mask=live, other=0).to(tl.int64) // k
    each: tl.constexpr = first_rows // width  # 2: a gate, its up, the next gate; 1: ups alone
    outs = tl.program_id(0) * (COLS // each) + tl.arange(0, COLS) // each
    out_columns = column_of(tl.minimum(outs, width - 1), width, DOWN_KIND)
    both = multiplied(
        x + tokens * hidden, live, slot + (out_columns + tl.arange(0, COLS) % each * width) * line,
        hidden, line, KIND, ROWS, COLS, INNER,
    )  # fmt: skip
    if each == 2:
        gate, up = tl.split(tl.reshape(both, (ROWS, COLS // 2, 2)))
    else:
        gate = both
        up = both
    cols = tl.program_id(0) * (COLS // each) + tl.arange(0, COLS // each)
    if bias > 0:
        biases = (slot + bias).to(tl.pointer_type(tl.float32)) + column_of(
            tl.minimum(cols, width - 1), width, DOWN_KIND
        )
        gate += tl.load(biases)[None, :]
        if each == 2:
            up += tl.load(biases + width)[None, :]
    out = activated(gate, up, ACTIVATION, alpha, limit).to(mid.dtype.element_ty)
    at = mid + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(at, out, mask=live[:, None] & (cols < width)[None, :])


@jit
def tile_down(  # type: ignore[no-untyped-def]
    mid,  # [m, I], in the order of the codes
    slab,
    out,  # [T * k, H]
    shares,  # [m] float32
    blocks,
    calls,
    hidden: tl.constexpr,
    width: tl.constexpr,
    first_rows: tl.constexpr,
    stride: tl.constexpr,
    line: tl.constexpr,
    down_line: tl.constexpr,
    bias: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    block = tl.program_id(1)
    first, end = tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    if first >= end:
        return
    slot = slab + tl.load(blocks + 3 * block).to(tl.int64) * stride
    rows = first + tl.arange(0, ROWS)
    live = rows < end
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = multiplied(
        mid + rows.to(tl.int64) * width, live, slot + first_rows * line + tl.minimum(cols, hidden - 1) * down_line,
        width, down_line, KIND, ROWS, COLS, INNER,
    )  # fmt: skip
    if bias > 0:
        biases = (slot + bias).to(tl.pointer_type(tl.float32)) + first_rows
        total += tl.load(biases + cols, mask=cols < hidden, other=0.0)[None, :]
    share = tl.load(shares + rows, mask=live, other=0.0)
    call = tl.load(calls + rows, mask=live, other=0).to(tl.int64)
    at = out + call[:, None] * hidden + cols[None, :]
    tl.store(at, (total * share[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (cols < hidden)[None, :])


ORDERED = 1024  # columns of one program that brings activations into order


def fits(geometry: ExpertGeometry, layer: int) -> bool:
    """Returns whether the experts of a layer can be computed here: each word of their codes has one scale."""
    return geometry.encoding(layer).name != "fp8" or not (geometry.hidden % 128 or geometry.width % 128)


def tile_shape(geometry: ExpertGeometry, layer: int, rows: int) -> dict[str, int]:
    """Returns the sizes of a tile, and launch options, for blocks of up to `rows` calls of a layer's experts."""
    return {"ROWS": rows, "COLS": 128, "INNER": 64, "num_warps": max(4, rows // 16), "num_stages": 3}


def experts_in_tiles(
    x: Any, slab: Any, out: Any, blocks: Any, calls: Any, shares: Any, sizes: dict[str, Any], shape: dict[str, int]
) -> None:
    """Writes the weighted outputs of calls to their rows of `out` [T * k, H], as `expert_blocks.experts` does.

    `shape` is a `tile_shape`. Blocks whose first call is not before their end are left out.
    """
    import torch

    width, hidden, kind = sizes["width"], sizes["hidden"], sizes["KIND"]
    if kind < 4:
        ordered = torch.empty_like(x)
        to_code_order[(len(x), triton.cdiv(hidden, ORDERED))](x, ordered, n=hidden, KIND=kind, COLS=ORDERED)
        x = ordered
    mid = torch.empty((len(calls), width), dtype=x.dtype, device=x.device)
    ours = {name: value for name, value in sizes.items() if name != "down_line"}
    grid = (triton.cdiv(sizes["first_rows"], shape["COLS"]), len(blocks))
    tile_gate_up[grid](x, slab, mid, blocks, calls, **ours, **shape, **OPTIONS)
    ours = {name: sizes[name] for name in DOWN_CONSTANTS}
    grid = (triton.cdiv(hidden, shape["COLS"]), len(blocks))
    tile_down[grid](mid, slab, out, shares, blocks, calls, **ours, KIND=sizes["DOWN_KIND"], **shape, **OPTIONS)
