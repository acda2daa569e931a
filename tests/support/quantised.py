"""Checkpoints as others quantise them, made from plain ones, and the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from edgemoe.encodings.codec import E2M1

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[str, torch.Tensor, Tensors], torch.Tensor]  # stores a weight's parts, returns what they mean
FP8_BLOCK = 16


def quantise(directory: Path, how: Quantise, about: dict[str, Any], chosen: Callable[[str], bool]) -> Tensors:
    """Replaces the chosen weights of a checkpoint; returns all weights that it stands for now."""
    file, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    stored: Tensors = {}
    meant: Tensors = {}
    for name, weight in load_file(file).items():
        if chosen(name):
            meant[name] = how(name, weight.float(), stored)
        else:
            stored[name] = meant[name] = weight
    save_file(stored, file, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    return meant


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def is_expert(name: str) -> bool:
    return ".experts." in name


def block_fp8(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
    """Scales in blocks of FP8_BLOCK rows and columns of 128, as DeepSeek-V3 has them in blocks of 128 by 128."""
    rows, columns = weight.shape
    tall = -(-rows // FP8_BLOCK)
    padded = torch.zeros(tall * FP8_BLOCK, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    largest = padded.view(tall, FP8_BLOCK, -1, 128).abs().amax((1, 3))
    scales = (largest / 448).clamp_min(1e-12)
    spread = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    stored[name], stored[f"{name}_scale_inv"] = codes, scales
    return codes.float() * spread


ABOUT_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, 128]}


def row_fp8(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
    """One scale for each row, as compressed-tensors' "channel"."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = (weight / scales.float()).to(torch.float8_e4m3fn)
    stored[name], stored[f"{name}_scale"] = codes, scales
    return codes.float() * scales.float()


def row_int8(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
    scales = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight / scales.float()).round().clamp(-127, 127).to(torch.int8)
    codes[0, 0] = -128
    stored[name], stored[f"{name}_scale"] = codes, scales
    return codes.float() * scales.float()


def packed(bits: int, group: int) -> Quantise:
    """Codes of 4 or 8 bits in int32, the first lowest, a scale for each group of a row."""

    def how(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
        most = 2 ** (bits - 1) - 1
        grouped = weight.view(len(weight), -1, group)
        scales = (grouped.abs().amax(2) / most).to(torch.bfloat16)
        codes = (grouped / scales.float()[:, :, None]).round().clamp(-most, most)
        codes[0, 0, 0] = -most - 1
        unsigned = (codes.view(weight.shape).to(torch.int64) + most + 1).view(len(weight), -1, 32 // bits)
        words = (unsigned << (torch.arange(32 // bits) * bits)).sum(2)
        prefix = name.removesuffix("weight")
        stored[f"{prefix}weight_packed"] = (words - (words >> 31 << 32)).to(torch.int32)
        stored[f"{prefix}weight_scale"] = scales
        stored[f"{prefix}weight_shape"] = torch.tensor(weight.shape)
        return (codes * scales.float()[:, :, None]).view(weight.shape)

    return how


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"symmetric": True, **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def mxfp4(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
    """A stack [E, R, C] as gpt-oss has it: blocks [E, R, C / 32, 16], the first code in the lower half."""
    grouped = weight.view(*weight.shape[:-1], -1, 32)
    exponents = grouped.abs().amax(-1).clamp_min(2.0**-100).log2().floor().to(torch.int32) - 2
    table = torch.from_numpy(E2M1)
    scaled = torch.ldexp(grouped, -exponents[..., None])
    codes = (scaled[..., None] - table).abs().argmin(-1)
    stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    return torch.ldexp(table[codes], exponents[..., None]).view(weight.shape)
