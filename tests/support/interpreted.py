"""Runs the GPU's kernels in Triton's interpreter, on the CPU; prints how far they are off as JSON.

A program of its own: whether Triton compiles or interprets is settled when it is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch.nn.functional import silu
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from edgemoe.encodings.codec import pack
from edgemoe.experts.compute.dispatch import Group
from edgemoe.experts.compute.gpu_calls import block_rows, blocks_of
from edgemoe.kernels.cpu.encoded.layout import ExpertLayout
from edgemoe.kernels.cpu.expert_math import ExpertSlab, one_by_one
from edgemoe.kernels.gpu import encoded as gpu_encoded
from edgemoe.kernels.gpu import experts as gpu_experts
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import Activation

SHAPES = ((72, 40, 5, 2, 1), (256, 192, 8, 4, 5), (130, 33, 3, 3, 40), (64, 32, 1, 1, 70))  # H, I, E, k, T


def expected(
    x: torch.Tensor, slab: torch.Tensor, slots: np.ndarray, group: Group, sizes: tuple[int, int]
) -> torch.Tensor:  # type: ignore[type-arg]
    """The weighted output of every call, each on its own, rounded where the kernels round."""
    hidden, width = sizes
    out = torch.zeros(len(group.calls), hidden, dtype=torch.float64)
    for i, slot in enumerate(slots.tolist()):
        gate, up, down = slab[slot, : 3 * hidden * width].double().view(3, width * hidden)
        for call in range(group.offsets[i], group.offsets[i + 1]):
            row = x[group.tokens[call]].double()
            mid = silu(gate.view(width, hidden) @ row) * (up.view(width, hidden) @ row)
            out[group.calls[call]] = down.view(hidden, width) @ mid.to(x.dtype).double() * float(group.weights[call])
    return out


def error(dtype: torch.dtype, hidden: int, width: int, experts: int, k: int, tokens: int) -> float:
    """The largest difference, over the largest value."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    stride = -(-3 * hidden * width * dtype.itemsize // 4096) * 4096 // dtype.itemsize
    slab = (torch.randn(experts + 2, stride) * 0.1).to(dtype)
    x = torch.randn(tokens, hidden).to(dtype)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
    group = Group.of(ids, rng.random((tokens, k)).astype(np.float32))
    slots = rng.permutation(experts + 2)[: len(group.experts)]
    rows = block_rows(int(np.diff(group.offsets).max()))
    out = torch.full((tokens * k, hidden), float("nan"))
    gpu_experts.experts(
        x,
        slab.view(-1),
        out,
        torch.from_numpy(blocks_of(slots, group.offsets, rows)),
        torch.from_numpy(group.calls.astype(np.int32)),
        torch.from_numpy(group.weights),
        (k, hidden, width, stride),
        rows,
    )
    want = expected(x, slab, slots, group, (hidden, width))
    return float((out.double() - want).abs().max() / want.abs().max())


def encoded_error(layout: ExpertLayout, experts: int, k: int, tokens: int) -> float:
    """The largest difference from torch's products of decoded weights, over the largest value."""
    rng, sizes = np.random.default_rng(0), (layout.hidden, layout.width)
    shapes = ((2 * layout.width, layout.hidden), (layout.hidden, layout.width))
    parts = [pack(rng.normal(0, 0.1, (experts * rows, n)).astype(np.float32), layout.encoding) for rows, n in shapes]
    slab = np.concatenate([part.reshape(experts, -1) for part in parts], axis=1)
    if layout.biases:
        biases = rng.normal(size=(experts, 2 * layout.width + layout.hidden)).astype(np.float32)
        slab = np.concatenate([slab, biases.view(np.uint8)], axis=1)
    slab = np.pad(slab, ((0, 0), (0, -slab.shape[1] % 4096)))
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
    group = Group.of(ids, rng.random((tokens, k)).astype(np.float32))
    rows, x = block_rows(int(np.diff(group.offsets).max())), torch.randn(tokens, layout.hidden)
    out = torch.full((tokens * k, layout.hidden), float("nan"))
    gpu_encoded.encoded_experts(
        x,
        torch.from_numpy(slab).view(-1),
        out,
        torch.from_numpy(blocks_of(group.experts, group.offsets, rows)),
        torch.from_numpy(group.calls.astype(np.int32)),
        torch.from_numpy(group.weights),
        gpu_encoded.encoded_sizes(*sizes, layout.encoding, layout.activation, layout.biases, layout.int8_activations)
        | {"k": k, "stride": slab.shape[1]},
        rows,
    )
    view, want = ExpertSlab(torch.from_numpy(slab), layout, False), torch.zeros(tokens, layout.hidden)
    one_by_one(view, group.experts, group.offsets, group.tokens, group.weights, x, want)
    return float((out.view(tokens, k, -1).sum(1) - want).abs().max() / want.abs().max())


def encoded_errors(name: str, int8: bool = False) -> list[float]:
    layouts = [
        ExpertLayout(64, 96, ENCODINGS[name], int8),
        ExpertLayout(608, 160, ENCODINGS[name], int8, Activation("clamped_swiglu", 1.702, 7.0), True),
        ExpertLayout(512, 32, ENCODINGS[name], int8, Activation("gelu_tanh")),
    ]
    return [encoded_error(layout, 3, 2, 3) for layout in layouts]


def widened(dot: Callable[..., object]) -> Callable[..., object]:
    """The interpreter's dot product, which would take bfloat16's bits for integers."""

    def product(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> object:
        return dot(
            builder, *(builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest
        )

    return product


if __name__ == "__main__":
    InterpreterBuilder.create_dot = widened(InterpreterBuilder.create_dot)
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    errors = {name: [error(dtype, *shape) for shape in SHAPES] for name, dtype in types.items()}
    errors |= {name: encoded_errors(name) for name in gpu_encoded.KINDS}
    print(json.dumps(errors | {"int8 activations": encoded_errors("int8", int8=True)}))
