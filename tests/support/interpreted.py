"""Runs the GPU's kernels in Triton's interpreter, on the CPU; prints how far they are off as JSON.

The words are the encodings of experts. int4 runs in all sizes and with all activations, the others in one by turns.
A program of its own: whether Triton compiles or interprets is settled when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from edgemoe.experts.compute.cuda import GpuExpertKernels, block_rows, blocks_of
from edgemoe.kernels.gpu import expert_blocks as gpu_experts
from edgemoe.kernels.gpu import expert_tiles
from edgemoe.kernels.gpu.weights import KINDS
from edgemoe.types.experts import SILU, Activation, ExpertGeometry
from edgemoe.types.size_classes import SlabLayout
from support.interpreter import prepare_interpreter
from support.packed_experts import far, slab_of, work

SHAPES = ((72, 40, 5, 2, 1), (256, 192, 8, 4, 5), (130, 33, 3, 3, 40), (64, 32, 1, 1, 70))  # H, I, E, k, T


def error(geometry: ExpertGeometry, tokens: int) -> float:
    """Returns the error of the kernels if expert e lies in slot e."""
    rng = np.random.default_rng(0)
    slab, (group, x) = slab_of(geometry, rng), work(geometry, tokens, rng)
    rows = block_rows(int(np.diff(group.offsets).max()))
    out = torch.full((tokens * geometry.top_k, geometry.hidden), float("nan"))
    gpu_experts.experts(
        x,
        slab.view(-1),
        out,
        torch.from_numpy(blocks_of(group.experts, group.offsets, rows)),
        torch.from_numpy(group.calls.astype(np.int32)),
        torch.from_numpy(group.weights),
        gpu_experts.constants(geometry, 0, geometry.stride_bytes(0)),
        gpu_experts.block_shape(geometry, 0, rows),
    )
    return far(geometry, slab, group, x, out)


def tile_error(geometry: ExpertGeometry, tokens: int) -> float:
    """Returns the error of the kernels for many tokens if expert e lies in slot e; one block more is empty."""
    rng = np.random.default_rng(0)
    slab, (group, x) = slab_of(geometry, rng), work(geometry, tokens, rng)
    out = torch.full((tokens * geometry.top_k, geometry.hidden), float("nan"))
    blocks = np.concatenate([blocks_of(group.experts, group.offsets, 16), np.zeros((1, 3), np.int32)])
    expert_tiles.experts_in_tiles(
        x,
        slab.view(-1),
        out,
        torch.from_numpy(blocks),
        torch.from_numpy(group.calls.astype(np.int32)),
        torch.from_numpy(group.weights),
        gpu_experts.constants(geometry, 0, geometry.stride_bytes(0)),
        expert_tiles.tile_shape(geometry, 0, 16),
    )
    return far(geometry, slab, group, x, out)


def tile_errors(encoding: str, dtype: str) -> list[float]:
    """Returns the errors of the kernels for many tokens, where they can compute experts of the encoding."""
    swiglu, relu2 = Activation("clamped_swiglu", 1.702, 7.0), Activation("relu2")
    made = ((608, 64, swiglu, True), (768, 256, SILU, False), (128, 192, relu2, True))
    all_sizes = [ExpertGeometry(1, 3, 2, h, i, dtype, act, biases, (encoding,)) for h, i, act, biases in made]
    fitting = [geometry for geometry in all_sizes if expert_tiles.fits(geometry, 0)]
    return [tile_error(geometry, 20) for geometry in (fitting if encoding == "int4" else fitting[:1])]


def error_without_tiles() -> float:
    """Returns the error of the device's own calls, many of each expert, where no tile can be compiled."""
    geometry, rng = ExpertGeometry(1, 2, 1, 64, 32, "bfloat16", encodings=("int4",)), np.random.default_rng(0)
    layout = SlabLayout.within(geometry.all_bytes, geometry)
    assert layout is not None
    kept, expert_tiles.experts_in_tiles = expert_tiles.experts_in_tiles, refuse
    slab = slab_of(geometry, rng)
    kernels = GpuExpertKernels(slab.view(-1), layout, geometry)
    expert_tiles.experts_in_tiles = kept
    group, x = work(geometry, 70, rng)
    out = torch.full((70, geometry.hidden), float("nan"))
    kernels.add(0, group.experts, group, x, out)
    return far(geometry, slab, group, x, out)


def refuse(*_: object) -> None:
    raise RuntimeError("out of resources")


def errors_of(dtype: str) -> list[float]:
    """Returns the errors with unencoded experts, in the sizes of SHAPES."""
    return [error(ExpertGeometry(1, e, k, h, i, dtype), tokens) for h, i, e, k, tokens in SHAPES]


def errors_of_kinds(number: int, encoding: str) -> list[float]:
    """Returns the errors with each activation, and with biases, for int4; for others with one by turns."""
    swiglu, gelu = Activation("clamped_swiglu", 1.702, 7.0), Activation("gelu_tanh")
    made = ((64, 96, SILU, False), (608, 64, swiglu, True), (96, 64, Activation("relu2"), True), (512, 32, gelu, False))
    made = made if encoding == "int4" else made[number % len(made) :][:1]
    return [
        error(ExpertGeometry(1, 3, 2, h, i, "float32", activation, biases, (encoding,)), 3)
        for h, i, activation, biases in made
    ]


def errors_of_layers(encodings: tuple[str, ...]) -> list[float]:
    """Returns the errors of layers in these encodings, whose experts share a slab, by the device's own calls."""
    geometry = ExpertGeometry(len(encodings), 4, 2, 64, 32, "float32", encodings=encodings)
    layout, rng, errors = SlabLayout.within(geometry.all_bytes, geometry), np.random.default_rng(0), []
    assert layout is not None
    slab = torch.empty(layout.size_bytes, dtype=torch.uint8)
    calls = GpuExpertKernels(slab, layout, geometry)
    for layer, size_class in enumerate(layout.classes.layer_class):
        one = replace(geometry, layers=1, encodings=encodings[layer : layer + 1])
        experts, group, x = slab_of(one, rng), *work(one, 5, rng)
        slots = rng.permutation(layout.slots(size_class))[: len(group.experts)] + layout.first(size_class)
        slab.fill_(255)  # NaN wherever nobody calls
        for expert, slot in zip(group.experts, slots, strict=True):
            start, size_bytes = layout.place(int(slot))
            slab[start : start + size_bytes] = experts[expert]
        out = torch.full((5 * one.top_k, one.hidden), float("nan"))
        calls.add(layer, slots, group, x, out)
        errors.append(far(one, experts, group, x, out))
    return errors


if __name__ == "__main__":
    gpu_experts.BLOCK_COLS = 128  # few programs, which are interpreted one after the other
    prepare_interpreter()
    errors = {name: errors_of_kinds(number, name) for number, name in enumerate(KINDS) if name in sys.argv}
    errors |= {"float32": errors["float32"] + errors_of("float32"), "rounded": errors_of("bfloat16")}
    errors |= {f"{name} in tiles": tile_errors(name, "float32") for name in KINDS if name in sys.argv}
    errors["tiles rounded"] = tile_errors("int4", "bfloat16")
    torch.cuda.device = lambda _: nullcontext()  # type: ignore[assignment, misc]
    errors["without tiles"] = [error_without_tiles()]
    errors["layers"] = errors_of_layers(("int4", "float32", "bfloat16", "fp8"))
    print(json.dumps(errors))
