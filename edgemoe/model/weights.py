"""The dense weights: everything but the experts, read from one safetensors file and checked against the spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from edgemoe.errors import StoreError
from edgemoe.families.records import Block
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.dense_weights import LayerPlace, Matrix, Norm, WeightReader
from edgemoe.model.feed_forward import Gate
from edgemoe.model.layers.blocks import DecoderLayer, make_layer


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Matrix  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Matrix  # [V, H], the embedding itself where they are tied

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Returns the gates of the layers that have experts."""
        return tuple(layer.gate for layer in self.layers if layer.gate is not None)

    def logits(self, last: torch.Tensor, block: Block) -> torch.Tensor:
        """Returns the logits [R, V] of normalised hidden states [R, H], float32, bounded as the block's record says."""
        logits = self.head(last).float()
        if block.logits != 1.0:
            logits = logits * block.logits
        return torch.tanh(logits / block.soft_cap) * block.soft_cap if block.soft_cap else logits


def load_weights(
    spec: ModelSpec,
    path: Path,
    device: torch.device,
    kernels: Kernels | None,
    progress: Callable[[float], object] = lambda _: None,
) -> Weights:
    """Copies the weights from the file at `path` to `device`; `kernels` multiply single tokens. Raises StoreError.

    `progress` is called with the share of layers that are loaded.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return _assemble(spec, WeightReader(spec, path, file, device, kernels), progress)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: the dense weights cannot be read ({error}); pack the checkpoint again") from error


def _assemble(spec: ModelSpec, read: WeightReader, progress: Callable[[float], object]) -> Weights:
    embed = read.matrix("model.embed_tokens.weight")
    layers = []
    for layer in range(spec.layers):
        progress(layer / spec.layers)
        layers.append(make_layer(LayerPlace(spec, layer, read)))
    return Weights(
        embed=embed,
        layers=tuple(layers),
        norm=read.norm("model.norm.weight"),
        head=embed if spec.block.tied else read.matrix("lm_head.weight"),
    )
