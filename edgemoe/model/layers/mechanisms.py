"""What computes a layer's attention, by the mechanism that its record names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from edgemoe.model.attention import StepContext
from edgemoe.model.dense_weights import LayerPlace
from edgemoe.model.layers.delta_net import DeltaNet
from edgemoe.model.layers.dense_attention import DenseAttention
from edgemoe.model.layers.latent_attention import LatentAttention


class Mechanism(Protocol):
    """Computes one layer's attention, or what stands in its place."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype; fills the cache."""


MECHANISMS: dict[str, Callable[[LayerPlace], Mechanism]] = {
    "delta": DeltaNet,
    "dense": DenseAttention,
    "latent": LatentAttention,
}
