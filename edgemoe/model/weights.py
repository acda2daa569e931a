"""The dense weights: everything but the experts, read from one safetensors file and checked against the spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from edgemoe.errors import StoreError
from edgemoe.model.kv import DTYPES
from edgemoe.model.spec import ModelSpec, dense_shapes

Read = Callable[[str, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices in the model's type; norms in float32, in which they are applied."""

    norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) D, H]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: torch.Tensor  # [H, heads D]
    post_norm: torch.Tensor  # [H]
    gate: torch.Tensor  # [E, H]


@dataclass(frozen=True, slots=True)
class Weights:
    embed: torch.Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H], the embedding itself where they are tied


def load_weights(spec: ModelSpec, path: Path, device: torch.device) -> Weights:
    """Copies the weights into memory of their own. Raises StoreError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return _assemble(spec, _reader(spec, path, file, device))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: the dense weights cannot be read ({error}); pack the checkpoint again") from error


def _reader(spec: ModelSpec, path: Path, file: Any, device: torch.device) -> Read:
    shapes, present = dense_shapes(spec), set(file.keys())

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = next((spelling for spelling in spec.names.spellings(name) if spelling in present), None)
        if stored is None:
            raise StoreError(f"{path} lacks {name}; pack the checkpoint again")
        tensor = file.get_tensor(stored)
        if tuple(tensor.shape) != shapes[name]:
            raise StoreError(f"{path}: {stored} is {tuple(tensor.shape)}, but config.json says {shapes[name]}")
        return tensor.to(device=device, dtype=dtype, copy=True)  # type: ignore[no-any-return]

    return read


def _assemble(spec: ModelSpec, read: Read) -> Weights:
    dtype = DTYPES[spec.dtype]
    embed = read("model.embed_tokens.weight", dtype)
    return Weights(
        embed=embed,
        layers=tuple(_layer(spec, f"model.layers.{layer}", read) for layer in range(spec.layers)),
        norm=read("model.norm.weight", torch.float32),
        head=embed if spec.tied else read("lm_head.weight", dtype),
    )


def _layer(spec: ModelSpec, prefix: str, read: Read) -> LayerWeights:
    def norm(name: str) -> torch.Tensor:
        return read(f"{prefix}.{name}.weight", torch.float32)

    def matrix(name: str) -> torch.Tensor:
        return read(f"{prefix}.{name}.weight", DTYPES[spec.dtype])

    return LayerWeights(
        norm=norm("input_layernorm"),
        qkv=torch.cat([matrix(f"self_attn.{part}_proj") for part in "qkv"]),
        q_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        o=matrix("self_attn.o_proj"),
        post_norm=norm("post_attention_layernorm"),
        gate=matrix("mlp.gate"),
    )
