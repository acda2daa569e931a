"""Random experts in each encoding in a slab, calls of them, and how far a kernel's outputs are off."""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.encodings.codec import pack
from edgemoe.kernels.cpu.expert_math import ExpertSlab, one_by_one
from edgemoe.kernels.cpu.experts_decode import ExpertLayout
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import TokenGroups


def slab_of(geometry: ExpertGeometry, rng: np.random.Generator) -> torch.Tensor:
    """Makes random experts in a slab, uint8 [E, stride]."""
    experts = geometry.experts
    shapes = ((geometry.gate_up_shape, geometry.encoding(0)), (geometry.down_shape, geometry.down_encoding(0)))
    parts = [
        pack(rng.normal(0, 0.1, (experts * rows, n)).astype(np.float32), encoding) for (rows, n), encoding in shapes
    ]
    if geometry.biases:
        biases = rng.normal(size=(experts, geometry.first_rows + geometry.hidden)).astype(np.float32)
        parts.append(biases.view(np.uint8))
    slab = np.concatenate([part.reshape(experts, -1) for part in parts], axis=1)
    return torch.from_numpy(np.pad(slab, ((0, 0), (0, geometry.stride_bytes(0) - slab.shape[1]))))


def work(geometry: ExpertGeometry, tokens: int, rng: np.random.Generator) -> tuple[TokenGroups, torch.Tensor]:
    """Makes calls of random experts, and their hidden states [T, H]."""
    ids = np.argsort(rng.random((tokens, geometry.experts)), axis=1)[:, : geometry.top_k]
    x = rng.normal(size=(tokens, geometry.hidden)).astype(np.float32)
    dtype = torch.bfloat16 if geometry.bf16 else torch.float32
    return TokenGroups.of(ids, rng.random(ids.shape).astype(np.float32)), torch.from_numpy(x).to(dtype)


def far(geometry: ExpertGeometry, slab: torch.Tensor, group: TokenGroups, x: torch.Tensor, out: torch.Tensor) -> float:
    """Returns the largest difference from torch's products of decoded weights, over the largest value."""
    view, want = ExpertSlab(slab, ExpertLayout.of(geometry, 0), geometry.bf16), torch.zeros(*x.shape)
    one_by_one(view, group.experts, group.offsets, group.tokens, group.weights, x, want)
    return float((out.view(len(x), geometry.top_k, -1).sum(1) - want).abs().max() / want.abs().max())
