"""Computes encoded experts of one layer on a GPU, where they lie in the slab, as `experts` does those that are not.

A block of a row's codes is decoded in registers, with the scales of its lanes, and multiplied with the activations of
the columns that it stands for (see `encodings.rows`). Parameters of what Triton compiles have no annotations.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from edgemoe.kernels.gpu.experts import BLOCK_COLS, OPTIONS, jit
from edgemoe.types.encoding import Encoding
from edgemoe.types.experts import Activation

INNER_BYTES = 64  # codes of a row in one step of a program's sum
KINDS = {"int8": 0, "int4": 1, "mxfp4": 2, "fp8": 3}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}


@jit
def lane_of(at, lanes: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lane, and the column in it, of the codes that begin at bytes `at` of a run of so many lanes."""
    if KIND == 3:
        return at % lanes, at // lanes
    if KIND == 0:
        return at % (4 * lanes) // 4, at // (4 * lanes) * 4 + at % 4
    return at % (4 * lanes) // 4, at // (4 * lanes) * 8 + at % 4


@jit
def places(at, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lane among all of a row, and the column, of the codes that begin at bytes `at` of a row."""
    size: tl.constexpr = 512 if KIND == 0 or KIND == 3 else 256
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 32
    run = at // size
    lane, column = lane_of(at % size, 16, KIND)
    if rest > 0:
        last_lane, last_column = lane_of(at % size, rest, KIND)
        lane, column = tl.where(run < full, lane, last_lane), tl.where(run < full, column, last_column)
    return run * 16 + lane, run * 512 + lane * 32 + column


@jit
def scales_at(rows, lane, wanted, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales of lanes [i, 1] of rows [1, c], float32."""
    codes: tl.constexpr = n if KIND == 0 or KIND == 3 else n // 2
    if KIND == 3:
        return tl.load((rows + codes + lane // 4 * 4).to(tl.pointer_type(tl.float32)), mask=wanted, other=0.0)
    if KIND == 2:
        bits = tl.load(rows + codes + lane, mask=wanted, other=0).to(tl.int32) << 23
        return tl.maximum(bits, 1 << 22).to(tl.float32, bitcast=True)
    bits = tl.load((rows + codes + lane * 2).to(tl.pointer_type(tl.uint16)), mask=wanted, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)


@jit
def decoded(code, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what codes stand for, float32, without their scale."""
    if KIND == 0:
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    if KIND == 1:
        return code.to(tl.float32) - 8.0
    if KIND == 2:
        size = (code & 7).to(tl.int32)
        whole = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16)).to(tl.float32)
        return tl.where(code >= 8, -0.5 * whole, 0.5 * whole)
    wide = code.to(tl.int16)
    bits = ((wide & 128) << 8) | ((wide & 127) << 7)  # an exponent of 4 bits is 8 less than that of a half
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def dots(rows, at, wanted, low, high, total, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns total [r, c] + the products of activations with the weights in bytes `at` [i] of `rows` [c].

    `low` and `high` are the activations [r, i] of the bytes' low and high halves, or of whole bytes.
    """
    lane, _ = places(at, n, KIND)
    scale = scales_at(rows[None, :], lane[:, None], wanted, n, KIND)
    code = tl.load(rows[None, :] + at[:, None], mask=wanted, other=0)
    if KIND == 0 or KIND == 3:
        return tl.dot(low, (decoded(code, KIND) * scale).to(low.dtype), total, input_precision="ieee")
    first = (decoded(code & 15, KIND) * scale).to(low.dtype)
    second = (decoded(code >> 4, KIND) * scale).to(low.dtype)
    total = tl.dot(low, first, total, input_precision="ieee")
    return tl.dot(high, second, total, input_precision="ieee")


@jit
def activated(gate, up, ACTIVATION: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what becomes of a gate and an up."""
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == 1:
        return gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)) * up
    gate = tl.minimum(gate, limit)
    return gate * tl.sigmoid(alpha * gate) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)


@jit
def rounded(values, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns values [r, 32], where WHOLE rounded to int8 with a scale for each row."""
    if not WHOLE:
        return values
    largest = tl.max(tl.abs(values), axis=1)[:, None]
    scaled = values * (127.0 / tl.maximum(largest, 1e-30))
    near = tl.floor(scaled + 0.5)
    near = tl.where((near - scaled == 0.5) & (near - 2.0 * tl.floor(near / 2.0) == 1.0), near - 1.0, near)
    return near * (largest / 127.0)


@jit
def encoded_gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, H]
    slab,  # bytes: a slot every `stride`: gate [I] and up [I] in rows of `line` bytes, down [H] in rows of `down_line`
    mid,  # [m, I] out
    blocks,  # [B, 3] int32: slot, first call, last call + 1
    calls,  # [m] int32: token * k + j
    k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    stride: tl.constexpr,
    line: tl.constexpr,
    bias: tl.constexpr,  # bytes from where a slot begins to its biases; 0: there are none
    alpha: tl.constexpr,
    limit: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    block = tl.program_id(1)
    slot = slab + tl.load(blocks + 3 * block).to(tl.int64) * stride
    rows = tl.load(blocks + 3 * block + 1) + tl.arange(0, ROWS)
    live = rows < tl.load(blocks + 3 * block + 2)
    tokens = tl.load(calls + rows, mask=live, other=0).to(tl.int64) // k
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    gate = tl.zeros((ROWS, COLS), tl.float32)
    up = tl.zeros((ROWS, COLS), tl.float32)
    codes: tl.constexpr = hidden if KIND == 0 or KIND == 3 else hidden // 2
    for start in range(0, codes, INNER):
        at = start + tl.arange(0, INNER)
        wanted = (cols < width)[None, :] & (at < codes)[:, None]
        inside = live[:, None] & (at < codes)[None, :]
        _, column = places(at, hidden, KIND)
        from_x = x + tokens[:, None] * hidden + column[None, :]
        low = tl.load(from_x, mask=inside, other=0.0)
        high = low
        if KIND == 1 or KIND == 2:
            high = tl.load(from_x + 4, mask=inside, other=0.0)
        gate = dots(slot + cols * line, at, wanted, low, high, gate, hidden, KIND)
        up = dots(slot + (cols + width) * line, at, wanted, low, high, up, hidden, KIND)
    if bias > 0:
        biases = (slot + bias).to(tl.pointer_type(tl.float32))
        gate += tl.load(biases + cols, mask=cols < width, other=0.0)[None, :]
        up += tl.load(biases + width + cols, mask=cols < width, other=0.0)[None, :]
    out = rounded(activated(gate, up, ACTIVATION, alpha, limit), WHOLE).to(mid.dtype.element_ty)
    at = mid + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(at, out, mask=live[:, None] & (cols < width)[None, :])


@jit
def encoded_down(  # type: ignore[no-untyped-def]
    mid,  # [m, I]
    slab,
    out,  # [T * k, H] float32
    shares,  # [m] float32
    blocks,
    calls,
    hidden: tl.constexpr,
    width: tl.constexpr,
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
    slot = slab + tl.load(blocks + 3 * block).to(tl.int64) * stride
    rows = tl.load(blocks + 3 * block + 1) + tl.arange(0, ROWS)
    live = rows < tl.load(blocks + 3 * block + 2)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    codes: tl.constexpr = width if KIND == 0 or KIND == 3 else width // 2
    for start in range(0, codes, INNER):
        at = start + tl.arange(0, INNER)
        wanted = (cols < hidden)[None, :] & (at < codes)[:, None]
        inside = live[:, None] & (at < codes)[None, :]
        _, column = places(at, width, KIND)
        from_mid = mid + rows.to(tl.int64)[:, None] * width + column[None, :]
        low = tl.load(from_mid, mask=inside, other=0.0)
        high = low
        if KIND == 1 or KIND == 2:
            high = tl.load(from_mid + 4, mask=inside, other=0.0)
        matrix = slot + 2 * width * line + cols * down_line
        total = dots(matrix, at, wanted, low, high, total, width, KIND)
    if bias > 0:
        biases = (slot + bias).to(tl.pointer_type(tl.float32)) + 2 * width
        total += tl.load(biases + cols, mask=cols < hidden, other=0.0)[None, :]
    share = tl.load(shares + rows, mask=live, other=0.0)
    call = tl.load(calls + rows, mask=live, other=0).to(tl.int64)
    at = out + call[:, None] * hidden + cols[None, :]
    tl.store(at, total * share[:, None], mask=live[:, None] & (cols < hidden)[None, :])


def encoded_shape(rows: int) -> dict[str, int]:
    """Returns the tile sizes of a program for blocks of up to `rows` calls."""
    return {"ROWS": rows, "COLS": BLOCK_COLS, "INNER": INNER_BYTES}


def encoded_sizes(
    hidden: int, width: int, encoding: Encoding, activation: Activation, biases: bool, int8_activations: bool
) -> dict[str, Any]:
    """Returns the constants of both kernels, but k and stride."""
    line, down_line = encoding.row_bytes(hidden), encoding.row_bytes(width)
    return {
        "hidden": hidden,
        "width": width,
        "line": line,
        "down_line": down_line,
        "bias": 2 * width * line + hidden * down_line if biases else 0,
        "alpha": activation.alpha,
        "limit": activation.limit,
        "KIND": KINDS[encoding.name],
        "ACTIVATION": ACTIVATIONS[activation.kind],
        "WHOLE": int8_activations and encoding.name != "fp8",
    }


def round_lanes(x: Any) -> Any:
    """Returns x [T, H] rounded to int8 with a scale for each 32 columns, in its own type."""
    groups = x.float().unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    return ((groups * (127 / largest.clamp_min(1e-30))).round() * (largest / 127)).flatten(1).to(x.dtype)


def encoded_experts(
    x: Any, slab: Any, out: Any, blocks: Any, calls: Any, shares: Any, sizes: dict[str, Any], rows: int
) -> None:
    """Does what `experts.experts` does for a slab of bytes, flat.

    `sizes` are those of `encoded_sizes`, with k and the bytes from slot to slot, `stride`.
    """
    import torch

    width, hidden, shape = sizes["width"], sizes["hidden"], encoded_shape(rows)
    mid = torch.empty((len(calls), width), dtype=x.dtype, device=x.device)
    x = round_lanes(x) if sizes["WHOLE"] else x
    grid = (triton.cdiv(width, BLOCK_COLS), len(blocks))
    ours = {name: value for name, value in sizes.items() if name != "down_line"}
    encoded_gate_up[grid](x, slab, mid, blocks, calls, **ours, **shape, **OPTIONS)
    grid = (triton.cdiv(hidden, BLOCK_COLS), len(blocks))
    ours = {name: sizes[name] for name in ("hidden", "width", "stride", "line", "down_line", "bias", "KIND")}
    encoded_down[grid](mid, slab, out, shares, blocks, calls, **ours, **shape, **OPTIONS)
