"""Checkpoints as others quantise them, made from plain ones, and the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from edgemoe.encodings.rows import E2M1

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[str, torch.Tensor, Tensors], torch.Tensor]  # stores a weight's parts, returns their decoded values
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
    """Quantises with one scale for each row, as compressed-tensors' "channel"."""
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
    """Quantises to codes of 4 or 8 bits in int32, the first lowest, with a scale for each group of a row."""

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
    """Quantises a stack [E, R, C] as gpt-oss: blocks [E, R, C / 32, 16], the first code in the lower half."""
    grouped = weight.view(*weight.shape[:-1], -1, 32)
    exponents = grouped.abs().amax(-1).clamp_min(2.0**-100).log2().floor().to(torch.int32) - 2
    table = torch.from_numpy(E2M1)
    scaled = torch.ldexp(grouped, -exponents[..., None])
    codes = (scaled[..., None] - table).abs().argmin(-1)
    stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    return torch.ldexp(table[codes], exponents[..., None]).view(weight.shape)


def words_of(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs whole numbers [n, m] into words of 32 bits, int32 [n, m bits / 32], the lowest bits first."""
    every = (numbers.to(torch.int64)[:, :, None] >> torch.arange(bits)) & 1
    words = (every.reshape(len(numbers), -1, 32) << torch.arange(32)).sum(2)
    return (words - (words >> 31 << 32)).to(torch.int32)


def _levels(weight: torch.Tensor, bits: int, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes [R, C] from 0 up, scales [R, G] and zero points [R, G] of columns in groups [C]."""
    count = int(group.max()) + 1
    low = torch.stack([weight[:, group == each].amin(1) for each in range(count)], 1).clamp(max=-1e-6)
    high = torch.stack([weight[:, group == each].amax(1) for each in range(count)], 1).clamp(min=1e-6)
    scales = ((high - low) / (2**bits - 1)).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    codes = (weight / scales.float()[:, group] + zeros[:, group]).round().clamp(0, 2**bits - 1)
    return codes, scales, zeros


def _meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, group]) * scales.float()[:, group]


def gptq(bits: int, size: int, *, less: int = 1, reordered: bool = False) -> Quantise:
    """Quantises as GPTQ's packers: words along columns, zero points one less, groups by activations if reordered."""

    def how(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
        group = torch.arange(weight.shape[1]) // size
        if reordered:
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(len(stored)))]
        codes, scales, zeros = _levels(weight, bits, group)
        base = name.removesuffix(".weight")
        stored[f"{base}.qweight"] = words_of(codes, bits).T.contiguous()
        stored[f"{base}.qzeros"] = words_of((zeros - less).T, bits)
        stored[f"{base}.scales"] = scales.T.contiguous()
        if reordered:
            stored[f"{base}.g_idx"] = group.to(torch.int32)
        return _meant(codes, scales, zeros, group)

    return how


def awq(size: int) -> Quantise:
    """Quantises as AWQ's gemm version: [C, R / 8], the even ones of 8 first."""

    def interleaved(numbers: torch.Tensor) -> torch.Tensor:
        eights = numbers.view(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words_of(eights.reshape(numbers.shape), 4)

    def how(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
        group = torch.arange(weight.shape[1]) // size
        codes, scales, zeros = _levels(weight, 4, group)
        base = name.removesuffix(".weight")
        stored[f"{base}.qweight"] = interleaved(codes.T.contiguous())
        stored[f"{base}.qzeros"] = interleaved(zeros.T.contiguous())
        stored[f"{base}.scales"] = scales.T.contiguous()
        return _meant(codes, scales, zeros, group)

    return how


def with_zeros(bits: int, size: int, *, reordered: bool = False) -> Quantise:
    """Quantises to asymmetric groups, as compressed-tensors."""

    def how(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
        group = torch.arange(weight.shape[1]) // size
        if reordered:
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(len(stored)))]
            stored[f"{name}_g_idx"] = group.to(torch.int32)
        codes, scales, zeros = _levels(weight, bits, group)
        stored[f"{name}_packed"] = words_of(codes, bits)
        stored[f"{name}_scale"] = scales
        stored[f"{name}_zero_point"] = words_of(zeros.T, bits).T.contiguous()
        stored[f"{name}_shape"] = torch.tensor(weight.shape)
        return _meant(codes, scales, zeros, group)

    return how


def nvfp4(name: str, weight: torch.Tensor, stored: Tensors, *, of_modelopt: bool = True) -> torch.Tensor:
    """Quantises with a scale in E4M3 for sixteen columns, and one float32 for all."""
    whole = weight.abs().max() / (6 * 448)
    grouped = weight.view(len(weight), -1, 16)
    scales = (grouped.abs().amax(2) / 6 / whole).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    factors = scales.float() * whole
    codes = (grouped / factors[:, :, None]).unsqueeze(-1).sub(torch.from_numpy(E2M1)).abs().argmin(-1)
    flat = codes.view(weight.shape)
    halves = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
    stored[f"{name}_scale"] = scales
    stored[name if of_modelopt else f"{name}_packed"] = halves
    stored[f"{name}_scale_2" if of_modelopt else f"{name}_global_scale"] = whole if of_modelopt else 1 / whole
    return (torch.from_numpy(E2M1)[codes] * factors[:, :, None]).view(weight.shape)


def mxfp4_packed(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
    """Quantises to MXFP4 as compressed-tensors packs a matrix."""
    parts: Tensors = {}
    meant = mxfp4(name, weight, parts)
    stored[f"{name}_packed"] = parts[f"{name}_blocks"].view(len(weight), -1)
    stored[f"{name}_scale"] = parts[f"{name}_scales"]
    return meant
