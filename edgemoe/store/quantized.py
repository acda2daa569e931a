"""Which quantised checkpoints can be read, and where they keep codes and scales. Imports no torch.

mxfp4               X_blocks [.., R, C / 32, 16] and X_scales [.., R, C / 32], U8 [OCP-MX]
fp8                 X and X_scale_inv, a scale for each block of weights
compressed-tensors  X_packed (int32, the first code lowest), or X as int8 or fp8, and X_scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.store.checkpoint import Tensor
from edgemoe.store.sources import EXPONENTS, PLAIN, Shape, Source

METHODS = ("mxfp4", "fp8", "compressed-tensors")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
UNUSED = ("weight_shape", "input_scale", "output_scale", "k_scale", "v_scale", "q_scale")  # of activations, of caches
KINDS = {"I8": "int8", "F8_E4M3": "fp8"}
SCALE_TYPES = ("F32", "BF16", "F16")


def quantisation(config: Mapping[str, Any]) -> Any:
    """Returns what a configuration says of how its weights are quantised; an empty table where it says nothing."""
    return config.get("quantization_config") or config.get("compression_config") or {}


def check_method(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where `quantization_config` tells of something that cannot be read, saying what.

    Raises CheckpointError where it has something else in the place of a table.
    """
    given = quantisation(config)
    _demand_table("quantization_config", given)
    if any(_is_of_mlx(each) for each in (config.get("quantization"), given)):
        raise UnsupportedModel(
            "this is a checkpoint of MLX, whose quantised weights cannot be read; fetch the one that it was made from "
            "(`edgemoe pull OWNER/NAME`)"
        )
    if not given:
        return
    for name in ("config_groups", "sparsity_config"):
        _demand_table(name, given.get(name) or {})
    for name, group in (given.get("config_groups") or {}).items():
        _demand_table(f"config_groups.{name}", group)
        _demand_table(f"config_groups.{name}.weights", group.get("weights") or {})
    method = str(given.get("quant_method"))[:80]
    if method not in METHODS:
        raise UnsupportedModel(f"weights quantised by {method} cannot be read; have {', '.join(METHODS)}, and none")
    if method == "compressed-tensors":
        for why in _compressed_faults(given):
            raise UnsupportedModel(f"compressed-tensors with {why} cannot be read")


def _is_of_mlx(given: object) -> bool:
    return isinstance(given, Mapping) and "quant_method" not in given and {"group_size", "bits"} <= set(given)


def _demand_table(name: str, found: object) -> None:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {name[:80]} must be a table, not {str(found)[:80]!r}")


def _compressed_faults(given: Mapping[str, Any]) -> list[str]:
    groups = given.get("config_groups") or {}
    faults = []
    for about in (given, *groups.values()):
        if (form := about.get("format")) is not None and form not in FORMATS:
            faults.append(f"the format {str(form)[:80]}")
    sparsity = given.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        faults.append(f"the sparse format {str(sparsity['format'])[:80]}")
    for group in groups.values():
        weights = group.get("weights") or {}
        if weights.get("symmetric") is False:
            faults.append("zero points (symmetric = false)")
        if weights.get("actorder") not in (None, False, "static", "weight"):
            faults.append(f"columns reordered by activations (actorder = {str(weights['actorder'])[:40]!r})")
    return faults


def find_source(left: Mapping[str, Tensor], name: str, shape: Shape, config: Mapping[str, Any]) -> Source:
    """Returns the tensor of this name, which is there.

    Raises CheckpointError and UnsupportedModel where it is of another shape or type.
    """
    if (blocks := left.get(f"{name}_blocks")) is not None:
        return _mxfp4(left, name, shape, blocks)
    if (packed := left.get(f"{name}_packed")) is not None:
        return _packed(left, name, shape, packed)
    tensor = left[name]
    if len(shape) == 1 and tensor.shape == (1, *shape):
        tensor = replace(tensor, shape=shape)
    _demand_shape(tensor, shape)
    if tensor.dtype in PLAIN:
        return Source(name, shape, tensor.dtype, tensor)
    scales = left.get(f"{name}_scale_inv") or left.get(f"{name}_scale")
    if tensor.dtype not in KINDS or scales is None:
        raise UnsupportedModel(
            f"{tensor.file}: tensor {tensor.name} is of type {tensor.dtype}"
            f"{'' if tensor.dtype not in KINDS else ', and has no scales'}; supported are {', '.join(PLAIN)}, and "
            f"{', '.join(KINDS)} with scales"
        )
    return _scaled(name, shape, KINDS[tensor.dtype], tensor, scales, _block_size(config))


def has_source(left: Mapping[str, Tensor], name: str) -> bool:
    """Returns whether the checkpoint has the tensor, in whatever form."""
    return any(f"{name}{end}" in left for end in ("", "_blocks", "_packed"))


def _demand_shape(tensor: Tensor, shape: Shape) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} should have the shape {list(shape)} by config.json, "
            f"but has {list(tensor.shape)}"
        )


def _mxfp4(left: Mapping[str, Tensor], name: str, shape: Shape, blocks: Tensor) -> Source:
    scales = left.get(f"{name}_scales")
    if scales is None:
        raise CheckpointError(f"{blocks.file}: tensor {name}_blocks is there, but not {name}_scales")
    _demand_shape(blocks, (*shape[:-1], -(-shape[-1] // 32), 16))
    _demand_shape(scales, (*shape[:-1], -(-shape[-1] // 32)))
    if blocks.dtype != "U8" or scales.dtype not in EXPONENTS:
        raise UnsupportedModel(f"{blocks.file}: tensor {name}_blocks is of types {blocks.dtype} and {scales.dtype}")
    return Source(name, shape, "mxfp4", blocks, scales, (1, 32))


def _packed(left: Mapping[str, Tensor], name: str, shape: Shape, packed: Tensor) -> Source:
    if f"{name}_zero_point" in left or f"{name}_g_idx" in left:
        raise UnsupportedModel(f"{packed.file}: {name} has zero points or reordered columns, which cannot be read")
    scales = left.get(f"{name}_scale")
    if scales is None or packed.dtype != "I32":
        raise CheckpointError(f"{packed.file}: tensor {packed.name} is of type {packed.dtype}, or has no {name}_scale")
    kinds = {-(-shape[-1] * bits // 32): kind for bits, kind in ((8, "uint8"), (4, "int4"))}
    kind = kinds.get(packed.shape[-1]) if packed.shape[:-1] == shape[:-1] else None
    if kind is None:
        raise CheckpointError(
            f"{packed.file}: {packed.name} of shape {list(packed.shape)} cannot hold {list(shape)} in 4 or 8 bits"
        )
    return _scaled(name, shape, kind, packed, scales, None)


def _scaled(name: str, shape: Shape, kind: str, codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Source:
    """Returns the source whose scales are one for all, for each row, for groups of a row, or for blocks."""
    if scales.dtype not in SCALE_TYPES:
        raise UnsupportedModel(f"{scales.file}: scales {scales.name} are of type {scales.dtype}")
    if len(shape) < 2:
        raise UnsupportedModel(f"{codes.file}: tensor {codes.name} is a vector in {kind}")
    rows, columns = shape[-2:]
    lead, found = shape[:-2], scales.shape[len(shape) - 2 :] if len(scales.shape) == len(shape) else scales.shape
    if found in ((), (1,), (1, 1)) and not lead:
        return Source(name, shape, kind, codes, scales, (rows, columns))
    if scales.shape[:-2] != lead or len(found) not in (1, 2):
        found = (0, 0)
    tall, wide = found if len(found) == 2 else (found[0], 1)
    if block is not None and (tall, wide) == (-(-rows // block[0]), -(-columns // block[1])):
        return Source(name, shape, kind, codes, scales, block)
    if tall == rows and wide and columns % wide == 0:
        return Source(name, shape, kind, codes, scales, (1, columns // wide))
    raise CheckpointError(
        f"{scales.file}: scales {scales.name} of shape {list(scales.shape)} do not fit weights of {list(shape)}"
    )


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns of a block with one scale, where the configuration says them."""
    given = quantisation(config)
    sizes = given.get("weight_block_size")
    for group in (given.get("config_groups") or {}).values():
        sizes = sizes or (group.get("weights") or {}).get("block_structure")
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    return None
