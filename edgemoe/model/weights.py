"""The dense weights: everything but the experts, read from one safetensors file and checked against the spec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from edgemoe.errors import StoreError
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.model.kv import DTYPES
from edgemoe.model.memory import zeros

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's dense weights: matrices in the model's dtype, norms in float32."""

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
    """Copies the weights from the file at `path` to `device`. Raises StoreError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return _assemble(spec, _Reader(spec, path, file, device))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: the dense weights cannot be read ({error}); pack the checkpoint again") from error


class _Reader:
    """Copies tensors of a file into one allocation, one after the other."""

    def __init__(self, spec: ModelSpec, path: Path, file: Any, device: torch.device) -> None:
        self._names, self._dtype = spec.names, DTYPES[spec.dtype]
        self._path, self._file, self._shapes, self._present = path, file, dense_shapes(spec), set(file.keys())
        elements = sum(math.prod(shape) * (2 if _is_norm(name) else 1) for name, shape in self._shapes.items())
        room = elements * spec.dtype_bytes + ALIGNMENT * len(self._shapes)
        self._memory = zeros([room], torch.uint8, device)
        self._taken = 0

    def __call__(self, *names: str) -> torch.Tensor:
        """Returns the tensors of these names, concatenated by rows; norms in float32. Raises StoreError."""
        stored = [self._stored(name) for name in names]
        dtype = torch.float32 if _is_norm(names[0]) else self._dtype
        result = self._take([sum(len(part) for part in stored), *stored[0].shape[1:]], dtype)
        for part, rows in zip(stored, torch.split(result, [len(part) for part in stored]), strict=True):
            rows.copy_(part)
        return result

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        start = self._taken
        size = math.prod(shape) * dtype.itemsize
        self._taken += -(-size // ALIGNMENT) * ALIGNMENT
        return self._memory[start : start + size].view(dtype).view(tuple(shape))

    def _stored(self, name: str) -> torch.Tensor:
        spelling = next((each for each in self._names.spellings(name) if each in self._present), None)
        if spelling is None:
            raise StoreError(f"{self._path} lacks {name}; pack the checkpoint again")
        tensor: torch.Tensor = self._file.get_tensor(spelling)
        if tuple(tensor.shape) != self._shapes[name]:
            raise StoreError(
                f"{self._path}: {spelling} is {tuple(tensor.shape)}, but config.json says {self._shapes[name]}"
            )
        return tensor


def _is_norm(name: str) -> bool:
    return "norm" in name


def _assemble(spec: ModelSpec, read: _Reader) -> Weights:
    embed = read("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=tuple(_layer(spec, f"model.layers.{layer}", read) for layer in range(spec.layers)),
        norm=read("model.norm.weight"),
        head=embed if spec.tied else read("lm_head.weight"),
    )


def _layer(spec: ModelSpec, prefix: str, read: _Reader) -> LayerWeights:
    return LayerWeights(
        norm=read(f"{prefix}.input_layernorm.weight"),
        qkv=read(*(f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv")),
        q_norm=read(f"{prefix}.self_attn.q_norm.weight") if spec.qk_norm else None,
        k_norm=read(f"{prefix}.self_attn.k_norm.weight") if spec.qk_norm else None,
        o=read(f"{prefix}.self_attn.o_proj.weight"),
        post_norm=read(f"{prefix}.post_attention_layernorm.weight"),
        gate=read(f"{prefix}.mlp.gate.weight"),
    )
