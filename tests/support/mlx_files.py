"""Checkpoints as MLX converts them, and the weights that they stand for [MLX, affine quantisation]."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MATRICES = ("_proj.weight", "embed_tokens.weight", "lm_head.weight", "shared_expert_gate.weight")
PLAIN_GATES = ("glm4_moe", "dots1")  # whose gates MLX does not quantise
OWN_STACKS = ("dots1",)  # whose stacks keep the word `experts`


@dataclass(frozen=True)
class MlxFormat:
    """The size of codes and groups, and the type of scales and biases."""

    bits: int = 4
    group: int = 64
    dtype: torch.dtype = torch.bfloat16


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes [..., n] as MLX does: 8 codes in 3 or 5 bytes, 4 codes in 3 bytes, else as many as a byte has."""
    together, size = {3: (8, 3), 5: (8, 5), 6: (4, 3)}.get(bits, (8 // bits, 1))
    groups = codes.to(torch.int64).unflatten(-1, (-1, together))
    numbers = (groups << (bits * torch.arange(together))).sum(-1)
    stream = (numbers[..., None] >> (8 * torch.arange(size)) & 255).flatten(-2)
    return stream.to(torch.uint8).contiguous().view(torch.uint32)


def quantised(weight: torch.Tensor, form: MlxFormat) -> tuple[Tensors, torch.Tensor]:
    """Returns the parts of a matrix, or of a stack, and the weights that these stand for, float32."""
    groups = weight.float().unflatten(-1, (-1, form.group))
    low, high, most = groups.amin(-1), groups.amax(-1), 2**form.bits - 1
    is_low = low.abs() > high.abs()
    scale = ((high - low) / most).clamp_min(1e-7)
    scale, edge = torch.where(is_low, scale, -scale), torch.where(is_low, low, high)
    first = (edge / scale).round()
    scale = torch.where(first != 0, edge / first, scale).to(form.dtype)
    bias = torch.where(first == 0, torch.zeros(()), edge).to(form.dtype)
    codes = ((groups - bias.float()[..., None]) / scale.float()[..., None]).round().clamp(0, most)
    meant = codes * scale.float()[..., None] + bias.float()[..., None]
    return {"weight": packed(codes.flatten(-2), form.bits), "scales": scale, "biases": bias}, meant.flatten(-2)


def convert(directory: Path, form: MlxFormat, family: str = "qwen3_moe", **about: Any) -> Tensors:
    """Turns a checkpoint with one tensor for each expert's matrix into MLX's; returns all weights that it means."""
    stored, meant, stacks = Tensors(), Tensors(), defaultdict[str, dict[str, torch.Tensor]](dict)
    for name, weight in load_file(directory / "model.safetensors").items():
        if found := EXPERT.fullmatch(name):
            base, _, part = found.groups()
            word = "experts" if family in OWN_STACKS else "switch_mlp"
            stacks[f"{base}.{word}.{RENAMED.get(part, part)}.weight"][name] = weight
        elif name.endswith(MATRICES) or (name.endswith(".gate.weight") and family not in PLAIN_GATES):
            parts, meant[name] = quantised(weight, form)
            stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        else:
            stored[name] = meant[name] = weight
    for name, experts in stacks.items():
        order = sorted(experts, key=lambda each: int(EXPERT.fullmatch(each)[2]))  # type: ignore[index]
        parts, values = quantised(torch.stack([experts[each] for each in order]), form)
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        meant |= dict(zip(order, values, strict=True))
    save_file(stored, directory / "model.safetensors", {"format": "mlx"})
    config = json.loads((directory / "config.json").read_text())
    table = {"group_size": form.group, "bits": form.bits, **about}
    both = {"quantization": table, "quantization_config": table}
    (directory / "config.json").write_text(json.dumps({**config, **both}))
    return {name: weight.contiguous() for name, weight in meant.items()}
