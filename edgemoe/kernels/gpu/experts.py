"""Computes the SwiGLU experts of one layer on a GPU, where they lie in the slab, in two launches for all experts.

Calls (token, expert) come sorted by expert and cut into blocks of one expert each, so that a weight is read once per
block. Each call's output goes to a row of its own; the caller sums the rows, in the order that it wants. Parameters of
what Triton compiles have no annotations, because Triton would evaluate them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[[Any], Any] = triton.jit

BLOCK_COLS = 32  # outputs of one program
BLOCK_INNER_BYTES = 256  # inputs of one step of its sum; twice as many float32 outgrow a block's shared memory

OPTIONS = {"enable_fp_fusion": True}  # whose default depends on the release of Triton


@jit
def gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, H]
    slab,  # a slot every `stride` items: gate [I, H], up [I, H], down [H, I]
    mid,  # [m, I] out
    blocks,  # [B, 3] int32: slot, first call, last call + 1
    calls,  # [m] int32: token * k + j
    k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    stride: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    block = tl.program_id(1)
    weights = slab + tl.load(blocks + 3 * block).to(tl.int64) * stride
    rows = tl.load(blocks + 3 * block + 1) + tl.arange(0, ROWS)
    live = rows < tl.load(blocks + 3 * block + 2)
    tokens = tl.load(calls + rows, mask=live, other=0).to(tl.int64) // k
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    gate = tl.zeros((ROWS, COLS), tl.float32)
    up = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, hidden, INNER):
        inner = start + tl.arange(0, INNER)
        inside = inner < hidden
        xs = tl.load(x + tokens[:, None] * hidden + inner[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        at = weights + cols[None, :] * hidden + inner[:, None]
        wanted = (cols < width)[None, :] & inside[:, None]
        gate = tl.dot(xs, tl.load(at, mask=wanted, other=0.0), gate, input_precision="ieee")
        up = tl.dot(xs, tl.load(at + width * hidden, mask=wanted, other=0.0), up, input_precision="ieee")
    out = (gate * tl.sigmoid(gate) * up).to(mid.dtype.element_ty)
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
    stride: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    block = tl.program_id(1)
    weights = slab + tl.load(blocks + 3 * block).to(tl.int64) * stride + 2 * width * hidden
    rows = tl.load(blocks + 3 * block + 1) + tl.arange(0, ROWS)
    live = rows < tl.load(blocks + 3 * block + 2)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, width, INNER):
        inner = start + tl.arange(0, INNER)
        inside = inner < width
        at = mid + rows.to(tl.int64)[:, None] * width + inner[None, :]
        xs = tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)
        at = weights + cols[None, :] * width + inner[:, None]
        total = tl.dot(
            xs, tl.load(at, mask=(cols < hidden)[None, :] & inside[:, None], other=0.0), total, input_precision="ieee"
        )
    share = tl.load(shares + rows, mask=live, other=0.0)
    call = tl.load(calls + rows, mask=live, other=0).to(tl.int64)
    at = out + call[:, None] * hidden + cols[None, :]
    tl.store(at, total * share[:, None], mask=live[:, None] & (cols < hidden)[None, :])


def block_shape(rows: int, item_bytes: int) -> dict[str, int]:
    """Returns the tile sizes of a program for blocks of up to `rows` calls of items of `item_bytes`."""
    return {"ROWS": rows, "COLS": BLOCK_COLS, "INNER": BLOCK_INNER_BYTES // item_bytes}


def experts(
    x: Any, slab: Any, out: Any, blocks: Any, calls: Any, shares: Any, sizes: tuple[int, int, int, int], rows: int
) -> None:
    """Writes rows `calls` of `out` [T * k, H]: the weighted outputs of the calls [m] that `blocks` [B, 3] covers.

    `x` [T, H] and `slab`, flat, are in the model's type; `sizes` are k, H, I and the items from slot to slot; `rows`, a
    power of two from 16 on, is the most calls of any block. All tensors are on one GPU.
    """
    import torch

    k, hidden, width, stride = sizes
    mid = torch.empty((len(calls), width), dtype=x.dtype, device=x.device)
    shape = block_shape(rows, x.element_size())
    grid = (triton.cdiv(width, BLOCK_COLS), len(blocks))
    gate_up[grid](x, slab, mid, blocks, calls, k, hidden, width, stride, **shape, **OPTIONS)
    grid = (triton.cdiv(hidden, BLOCK_COLS), len(blocks))
    down[grid](mid, slab, out, shares, blocks, calls, hidden, width, stride, **shape, **OPTIONS)
