"""Reads which layers see a window of the context only: gpt-oss [GPT-OSS] and Gemma 4 [Gemma-4]."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.read import FULL, SLIDING, Config, integer, layer_count, read_rope, real, stated_kinds
from edgemoe.families.spec import Attention
from edgemoe.types.bounds import is_number
from edgemoe.types.experts import Activation

GEMMA_PERIOD = 6  # the last of so many layers sees all
GEMMA_WIDE = 512  # elements of its heads
GEMMA_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GEMMA_LACKS = {  # what other Gemmas have, and the values that say that this one has not
    "enable_moe_block": (True,),
    "hidden_size_per_layer_input": (0, None),
    "num_kv_shared_layers": (0, None),
    "use_double_wide_mlp": (False, None),
    "use_bidirectional_attention": (None, "vision"),  # between the tokens of an image, which are refused
}


def alternating(config: Config, attention: Attention) -> tuple[Attention, ...]:
    """Gives every other layer a window, the first one among them, where nothing else is said."""
    full = replace(attention, heads=replace(attention.heads, window=0))
    return tuple(full if kind == FULL else attention for kind in _kinds(config, period=2))


def gemma(config: Config, attention: Attention) -> tuple[Attention, ...]:
    """Gives full layers their own heads and rotary embedding. Raises UnsupportedModel for other Gemmas."""
    for key, known in GEMMA_LACKS.items():
        if config.get(key) not in known:
            raise UnsupportedModel(f"config.json: {key} = {str(config.get(key))[:80]!r} is not supported")
    kinds = _kinds(config, GEMMA_PERIOD)
    if kinds[-1] != FULL:
        raise CheckpointError(f"config.json: layer_types must end in {FULL!r}")
    made = {kind: _gemma_layer(config, attention, kind) for kind in (SLIDING, FULL)}
    own = config.get("per_layer_config")
    if own is None:
        return tuple(made[kind] for kind in kinds)
    if not isinstance(own, Mapping) or not all(is_number(str(each)) for each in own):
        raise CheckpointError(f"config.json: per_layer_config must be a table by layer, not {str(own)[:80]!r}")
    numbered = {int(layer): each for layer, each in own.items()}  # written with as many digits as the last one
    return tuple(_overridden(made[kind], numbered.get(layer, {})) for layer, kind in enumerate(kinds))


def clamped_swiglu(config: Config) -> Activation:
    """Returns gpt-oss's activation."""
    alpha, limit = real(config, "swiglu_alpha", default=1.702), real(config, "swiglu_limit", default=7.0)
    return Activation("clamped_swiglu", alpha, limit)


def root_of_hidden(config: Config) -> float:
    """Returns the factor of Gemma's embedding: a number of the weights' type, as the model was trained with."""
    root = integer(config, "hidden_size") ** 0.5
    if str(config.get("dtype") or config.get("torch_dtype")).endswith("float32"):
        return float(root)
    bits: int = struct.unpack("<I", struct.pack("<f", root))[0]
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    factor: float = struct.unpack("<f", struct.pack("<I", rounded))[0]
    return factor


def _kinds(config: Config, period: int) -> list[str]:
    """Returns each layer's kind: what is said, or all SLIDING but every `period`-th."""
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    if kinds is None:
        return [SLIDING if (layer + 1) % period else FULL for layer in range(layer_count(config))]
    return kinds


def _gemma_layer(config: Config, attention: Attention, kind: str) -> Attention:
    heads, ropes = attention.heads, config.get("rope_parameters") or GEMMA_ROPE
    if not isinstance(ropes, Mapping) or not all(isinstance(ropes.get(each), Mapping) for each in (SLIDING, FULL)):
        raise CheckpointError(f"config.json: rope_parameters must have a table for {SLIDING!r} and one for {FULL!r}")
    if kind == FULL:
        usual = GEMMA_WIDE if config.get("per_layer_config") is None else heads.dim
        heads = replace(heads, window=0, dim=integer(config, "global_head_dim", default=usual))
        if config.get("attention_k_eq_v"):
            kv_count = integer(config, "num_global_key_value_heads", default=heads.kv_count)
            heads = replace(heads, kv_count=kv_count, v_is_k=True)
    rope, _ = read_rope({**config, "rope_parameters": ropes[kind], "rope_scaling": None}, {}, heads.dim)
    return Attention(heads, rope)


def _overridden(attention: Attention, own: Any) -> Attention:
    """Returns what a layer attends with where transformers 5 has written down what is its own."""
    if not isinstance(own, Mapping):
        raise CheckpointError(f"config.json: per_layer_config must have tables, not {str(own)[:80]!r}")
    if not own:
        return attention
    heads, rope = attention.heads, attention.rope
    dim = integer(own, "head_dim", default=heads.dim)
    kv_count = integer(own, "num_key_value_heads", default=heads.kv_count)
    if rope is not None and rope.dims == heads.dim:
        rope = replace(rope, dims=dim)
    return Attention(replace(heads, dim=dim, kv_count=kv_count), rope)
