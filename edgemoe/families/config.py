"""Reads config.json, as transformers 4 and 5 write it, into a spec.

A variant that the decoder does not have is refused here, by name, so that nothing downstream needs to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config_values import integer, real
from edgemoe.families.rope_config import read_rope
from edgemoe.families.spec import ModelSpec
from edgemoe.families.table import FAMILIES, Family
from edgemoe.types.experts import DTYPE_BYTES

MAX_EXPERTS = 1 << 17  # of all layers together
MOST = {  # of anything that is to come; what is larger is nonsense
    "vocab": 1 << 24,
    "hidden": 1 << 20,
    "layers": 1 << 12,
    "heads": 1 << 14,
    "head_dim": 1 << 14,
    "expert_width": 1 << 22,
    "experts": 1 << 16,
    "context_tokens": 1 << 31,
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a `config.json`. Raises UnsupportedModel, and CheckpointError for nonsense."""
    family = _family(config)
    _refuse_variants(config, family)
    hidden = integer(config, "hidden_size")
    heads = integer(config, "num_attention_heads")
    norm_topk = config.get("norm_topk_prob", False) if family.norm_topk is None else family.norm_topk
    rope, context_tokens = read_rope(config, family)
    spec = ModelSpec(
        family=family.name,
        architecture=family.architecture,
        vocab=integer(config, "vocab_size"),
        hidden=hidden,
        layers=integer(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=integer(config, "num_key_value_heads", default=heads),
        head_dim=integer(config, "head_dim", default=hidden // heads),
        expert_width=integer(config, family.width_key),
        experts=integer(config, "num_local_experts", "num_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        norm_topk=bool(norm_topk),
        rms_eps=real(config, "rms_norm_eps", default=family.default_eps),
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
        dtype=_dtype(config),
        context_tokens=context_tokens,
    )
    _check_sizes(spec)
    return spec


def _family(config: Mapping[str, Any]) -> Family:
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise CheckpointError(f"config.json: architectures must be a list, not {named!r}")
    for family in FAMILIES.values():
        if family.architecture in named or (not named and config.get("model_type") == family.name):
            return family
    found = ", ".join(map(str, named)) or config.get("model_type") or "none named in config.json"
    raise UnsupportedModel(f"architecture not supported: {found}; supported are {', '.join(sorted(FAMILIES))}")


def _refuse_variants(config: Mapping[str, Any], family: Family) -> None:
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    unsupported = {
        "attention_bias": config.get("attention_bias", False),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "mlp_only_layers": config.get("mlp_only_layers") or False,
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "sliding_window": windowed and integer(config, "sliding_window") < integer(config, "max_position_embeddings"),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, refused in unsupported.items():
        if refused:
            raise UnsupportedModel(
                f"{family.architecture} with {key} = {config.get(key)!r} is not supported; "
                f"supported are {', '.join(sorted(FAMILIES))} with dense attention, SiLU, an expert layer in every "
                "block"
            )


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"weights of type {dtype} are not supported; have {', '.join(DTYPE_BYTES)}")
    return dtype


def _check_sizes(spec: ModelSpec) -> None:
    for name, most in MOST.items():
        if getattr(spec, name) > most:
            raise CheckpointError(f"config.json: {name} = {getattr(spec, name)} is impossible; {most} is the most")
    for fault, what in (
        (spec.layers * spec.experts > MAX_EXPERTS, f"more than {MAX_EXPERTS} experts are impossible"),
        (spec.heads % spec.kv_heads, "num_attention_heads must be a multiple of num_key_value_heads"),
        (spec.head_dim % 2, "head_dim must be even"),
        (spec.hidden % 2 or spec.expert_width % 2, "hidden_size and the experts' width must be even"),
        (spec.top_k > spec.experts, "num_experts_per_tok must be at most the number of experts"),
    ):
        if fault:
            raise CheckpointError(f"config.json: {what}")
