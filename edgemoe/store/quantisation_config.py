"""Reads how a checkpoint is quantised from its configuration, and refuses ways that cannot be read by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel

METHODS = ("mxfp4", "fp8", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round")
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)
ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")  # of modelopt
PACKINGS = {  # of auto-round -> whether zero points of GPTQ's layout are stored one less
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq"), True),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel", "auto_round:auto_round"), False),
}
SECTIONS = (
    "text_config",
    "language_config",
    "llm_config",
    "thinker_config",
)  # may hold the model's settings
MLX_ARCHITECTURES = (  # whose tensors MLX only stacks
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM"),
    *("Glm4MoeForCausalLM", "Dots1ForCausalLM"),
)


def quantisation(config: Mapping[str, Any]) -> Any:
    """Returns a configuration's table of its quantisation; an empty one if it has none."""
    for table in (config, *(config.get(section) for section in SECTIONS)):
        if isinstance(table, Mapping) and (
            found := table.get("quantization_config") or table.get("compression_config")
        ):
            return found
    return {}


def check_method(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel, with the reason, for a quantisation that cannot be read.

    Raises CheckpointError if `quantization_config` is no table.
    """
    given = quantisation(config)
    _demand_table("quantization_config", given)
    if about := mlx_quantisation(config):
        _check_mlx(config, about)
        return
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
    faults = {"compressed-tensors": _compressed_faults, "modelopt": _modelopt_faults, "awq": _awq_faults}
    faults |= {"gptq": _gptq_faults, "auto-round": _auto_round_faults}
    for why in faults.get(method, lambda _: [])(given):
        raise UnsupportedModel(f"{method} with {why} cannot be read")


def mlx_quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the table of MLX's quantisation in a configuration; an empty one where it has none."""
    for given in (config.get("quantization"), quantisation(config)):
        if isinstance(given, Mapping) and "quant_method" not in given and {"group_size", "bits"} <= set(given):
            return given
    return {}


def _check_mlx(config: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where weights of MLX cannot be read."""
    names = config.get("architectures")
    architecture = str(names[0] if isinstance(names, list) and names else "")[:80]
    mode = str(about.get("mode", "affine"))[:40]
    if mode == "affine" and architecture in MLX_ARCHITECTURES:
        return
    why = f"of {architecture}" if mode == "affine" else f"in the mode {mode}"
    raise UnsupportedModel(
        f"this is a checkpoint of MLX {why}, whose weights cannot be read; have mode affine of "
        f"{', '.join(MLX_ARCHITECTURES)}. Fetch the one that it was made from (`edgemoe pull OWNER/NAME`)"
    )


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
        if weights.get("actorder") not in (None, False, "static", "weight", "group", "dynamic"):
            faults.append(f"columns reordered in a way that is not known ({str(weights['actorder'])[:40]!r})")
    return faults


def zeros_are_less(config: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint in GPTQ's layout has zero points that are stored one less than they are."""
    given = quantisation(config)
    if given.get("quant_method") == "auto-round":
        return PACKINGS.get(given.get("packing_format", "auto_round:auto_gptq"), True)
    return bool(given.get("checkpoint_format", "gptq") != "gptq_v2")


def is_reordered(config: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint has groups of columns that do not lie side by side, by its configuration."""
    given = quantisation(config)
    orders = [(group.get("weights") or {}).get("actorder") for group in (given.get("config_groups") or {}).values()]
    return bool(given.get("desc_act")) or any(order in ("group", "dynamic") for order in orders)


def is_asymmetric(config: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint of compressed-tensors has zero points in all groups, by its configuration."""
    groups = (quantisation(config).get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    return bool(weights) and all(each.get("type") == "int" and each.get("symmetric") is False for each in weights)


def _modelopt_faults(given: Mapping[str, Any]) -> list[str]:
    algorithm = given.get("quant_algo")
    return [] if algorithm in (None, *ALGORITHMS) else [f"the algorithm {str(algorithm)[:80]}"]


def _awq_faults(given: Mapping[str, Any]) -> list[str]:
    version = str(given.get("version", "gemm")).lower()
    return (
        []
        if version == "gemm" and given.get("bits", 4) == 4
        else [f"{given.get('bits')} bits of version {version[:40]}"]
    )


def _gptq_faults(given: Mapping[str, Any]) -> list[str]:
    form = given.get("checkpoint_format", "gptq")
    return [] if form in ("gptq", "gptq_v2") else [f"the format {str(form)[:80]}"]


def _auto_round_faults(given: Mapping[str, Any]) -> list[str]:
    form = given.get("packing_format", "auto_round:auto_gptq")
    return [] if form in PACKINGS else [f"the packing {str(form)[:80]}"]
