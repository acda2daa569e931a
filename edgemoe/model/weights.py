"""The dense weights: everything but the experts, read from one safetensors file and checked against the spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from edgemoe.errors import StoreError
from edgemoe.families.spec import ModelSpec
from edgemoe.model.layers.blocks import DecoderLayer, make_layer
from edgemoe.model.layers.gate import Gate
from edgemoe.model.layers.norm import Norm
from edgemoe.model.layers.reader import LayerPlace, WeightReader


@dataclass(frozen=True, slots=True)
class Weights:
    embed: torch.Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: torch.Tensor  # [V, H], the embedding itself where they are tied

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Returns the gates of the layers that have experts."""
        return tuple(layer.gate for layer in self.layers if layer.gate is not None)


def load_weights(spec: ModelSpec, path: Path, device: torch.device) -> Weights:
    """Copies the weights from the file at `path` to `device`. Raises StoreError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return _assemble(spec, WeightReader(spec, path, file, device))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: the dense weights cannot be read ({error}); pack the checkpoint again") from error


def _assemble(spec: ModelSpec, read: WeightReader) -> Weights:
    embed = read("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=tuple(make_layer(LayerPlace(spec, layer, read)) for layer in range(spec.layers)),
        norm=Norm(read("model.norm.weight"), spec.block.eps),
        head=embed if spec.block.tied else read("lm_head.weight"),
    )
