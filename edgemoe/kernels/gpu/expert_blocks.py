"""Computes the experts of one layer on a GPU, in their slots of the slab, in two launches for all experts.

Calls (token, expert) come sorted by expert and cut into blocks of one expert each, so that a weight is read once per
block. Each call's output goes to a row of its own; the caller sums the rows in its order. Parameters of Triton
functions have no annotations, because Triton would evaluate them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from edgemoe.kernels.gpu.weights import KINDS, dots, jit, places
from edgemoe.types.experts import ExpertGeometry

BLOCK_COLS = 32  # outputs of one program
INNER_BYTES = 64  # codes of a row in one step of a program's sum
PLAIN_INNER_BYTES = 256  # the same of numbers; twice as many float32 outgrow a block's shared memory
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu2": 3}
DOWN_CONSTANTS = ("hidden", "width", "first_rows", "stride", "line", "down_line", "bias")
OPTIONS = {"enable_fp_fusion": True}  # whose default depends on the release of Triton


@jit
def activated(gate, up, ACTIVATION: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Applies the activation to gate and up; one without a gate is applied to `gate` alone."""
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == 1:
        return gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)) * up
    if ACTIVATION == 3:
        gate = tl.maximum(gate, 0.0)
        return gate * gate
    gate = tl.minimum(gate, limit)
    return gate * tl.sigmoid(alpha * gate) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)


@jit
def gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, H]
    slab,  # bytes: a slot every `stride`: gate [I], if any, and up [I] in rows of `line` bytes, down [H] of `down_line`
    mid,  # [m, I] out
    blocks,  # [B, 3] int32: slot, first call, last call + 1
    calls,  # [m] int32: token * k + j
    k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    first_rows: tl.constexpr,  # of gate and up together, or of up alone
    stride: tl.constexpr,
    line: tl.constexpr,
    bias: tl.constexpr,  # bytes from a slot's start to its biases; 0: there are none
    alpha: tl.constexpr,
    limit: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    halved: tl.constexpr = KIND == 1 or KIND == 2 or (KIND < 0 and (-1 - KIND) % 4 < 3)
    codes: tl.constexpr = hidden // 2 if halved else hidden
    for start in range(0, codes, INNER):
        at = start + tl.arange(0, INNER)
        wanted = (cols < width)[None, :] & (at < codes)[:, None]
        inside = live[:, None] & (at < codes)[None, :]
        _, column = places(at, hidden, KIND)
        from_x = x + tokens[:, None] * hidden + column[None, :]
        low = tl.load(from_x, mask=inside, other=0.0)
        high = low
        if halved:
            high = tl.load(from_x + 4, mask=inside, other=0.0)
        gate = dots(slot + cols * line, at, wanted, low, high, gate, hidden, KIND)
        if first_rows > width:
            up = dots(slot + (cols + width) * line, at, wanted, low, high, up, hidden, KIND)
    if bias > 0:
        biases = (slot + bias).to(tl.pointer_type(tl.float32))
        gate += tl.load(biases + cols, mask=cols < width, other=0.0)[None, :]
        if first_rows > width:
            up += tl.load(biases + width + cols, mask=cols < width, other=0.0)[None, :]
    out = activated(gate, up, ACTIVATION, alpha, limit).to(mid.dtype.element_ty)
    at = mid + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(at, out, mask=live[:, None] & (cols < width)[None, :])


@jit
def down(  # type: ignore[no-untyped-def]
    mid,  # [m, I]
    slab,
    out,  # [T * k, H] float32
    shares,  # [m] float32
    blocks,
    calls,
    hidden: tl.constexpr,
    width: tl.constexpr,
    first_rows: tl.constexpr,  # of gate and up together, or of up alone
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
    halved: tl.constexpr = KIND == 1 or KIND == 2 or (KIND < 0 and (-1 - KIND) % 4 < 3)
    codes: tl.constexpr = width // 2 if halved else width
    for start in range(0, codes, INNER):
        at = start + tl.arange(0, INNER)
        wanted = (cols < hidden)[None, :] & (at < codes)[:, None]
        inside = live[:, None] & (at < codes)[None, :]
        _, column = places(at, width, KIND)
        from_mid = mid + rows.to(tl.int64)[:, None] * width + column[None, :]
        low = tl.load(from_mid, mask=inside, other=0.0)
        high = low
        if halved:
            high = tl.load(from_mid + 4, mask=inside, other=0.0)
        matrix = slot + first_rows * line + cols * down_line
        total = dots(matrix, at, wanted, low, high, total, width, KIND)
    if bias > 0:
        biases = (slot + bias).to(tl.pointer_type(tl.float32)) + first_rows
        total += tl.load(biases + cols, mask=cols < hidden, other=0.0)[None, :]
    share = tl.load(shares + rows, mask=live, other=0.0)
    call = tl.load(calls + rows, mask=live, other=0).to(tl.int64)
    at = out + call[:, None] * hidden + cols[None, :]
    tl.store(at, total * share[:, None], mask=live[:, None] & (cols < hidden)[None, :])


def block_shape(geometry: ExpertGeometry, layer: int, rows: int) -> dict[str, int]:
    """Returns the tile sizes of a program for blocks of up to `rows` calls of a layer's experts."""
    encoding = geometry.encoding(layer)
    inner = INNER_BYTES if encoding.scales(1) else PLAIN_INNER_BYTES // max(geometry.item_bytes, encoding.bits // 8)
    return {"ROWS": rows, "COLS": BLOCK_COLS, "INNER": inner}


def constants(geometry: ExpertGeometry, layer: int, stride_bytes: int) -> dict[str, Any]:
    """Returns the compile-time constants of the kernels for a layer's experts, in slots of `stride_bytes` bytes."""
    encoding, activation, width = geometry.encoding(layer), geometry.activation, geometry.width
    down = geometry.down_encoding(layer)
    line, down_line = encoding.row_bytes(geometry.hidden), down.row_bytes(width)
    return {
        "k": geometry.top_k,
        "hidden": geometry.hidden,
        "width": width,
        "first_rows": geometry.first_rows,
        "stride": stride_bytes,
        "line": line,
        "down_line": down_line,
        "bias": geometry.first_rows * line + geometry.hidden * down_line if geometry.biases else 0,
        "alpha": activation.alpha,
        "limit": activation.limit,
        "KIND": KINDS[encoding.name],
        "DOWN_KIND": KINDS[down.name],
        "ACTIVATION": ACTIVATIONS[activation.kind],
    }


def experts(
    x: Any, slab: Any, out: Any, blocks: Any, calls: Any, shares: Any, sizes: dict[str, Any], shape: dict[str, int]
) -> None:
    """Writes rows `calls` of `out` [T * k, H]: the weighted outputs of the calls [m] that `blocks` [B, 3] covers.

    `x` [T, H] is in the model's type, `slab` is bytes, flat; `sizes` are `constants`. `shape` is a `block_shape`; its
    rows, a power of two from 16 on, are the most calls of any block. All tensors are on one GPU.
    """
    import torch

    width, hidden = sizes["width"], sizes["hidden"]
    mid = torch.empty((len(calls), width), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, BLOCK_COLS), len(blocks))
    ours = {name: value for name, value in sizes.items() if name not in ("down_line", "DOWN_KIND")}
    gate_up[grid](x, slab, mid, blocks, calls, **ours, **shape, **OPTIONS)
    grid = (triton.cdiv(hidden, BLOCK_COLS), len(blocks))
    ours = {name: sizes[name] for name in DOWN_CONSTANTS}
    down[grid](mid, slab, out, shares, blocks, calls, **ours, KIND=sizes["DOWN_KIND"], **shape, **OPTIONS)
