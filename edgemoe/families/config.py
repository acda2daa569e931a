"""Reads config.json, as transformers 4 and 5 write it, into a spec.

A variant that the decoder does not have is refused here, by name, so that nothing downstream needs to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.family import Family, FieldSources
from edgemoe.families.mechanisms import read_rope
from edgemoe.families.read import MOST_LAYERS, Config, choice, flag, integer, number, whole
from edgemoe.families.spec import AttentionHeads, BlockSpec, FeedForwardSpec, LayerAttention, ModelSpec, RouterSpec
from edgemoe.families.table import FAMILIES, REFUSED
from edgemoe.types.experts import DTYPE_BYTES, SILU

MAX_EXPERTS = 1 << 17  # of all layers together
MOST_STATE_BYTES = 1 << 34  # of one sequence


def _head_dim(config: Config) -> int:
    return integer(config, "hidden_size") // integer(config, "num_attention_heads")


def _window(config: Config) -> int:
    """Returns the tokens that a token sees, 0 where nothing bounds them."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return 0
    return integer(config, "sliding_window")


# The usual keys of configurations. A family lists only the keys that differ.
HEADS: FieldSources = {
    "count": whole("num_attention_heads"),
    "kv_count": whole("num_key_value_heads", default=whole("num_attention_heads")),
    "dim": whole("head_dim", default=_head_dim),
    "window": _window,
}
ROUTER: FieldSources = {
    "experts": whole("num_local_experts", "num_experts"),
    "top_k": whole("num_experts_per_tok"),
    "renormalise": flag("norm_topk_prob"),
}
FEED_FORWARD: FieldSources = {
    "width": whole("moe_intermediate_size"),
    "activation": choice("hidden_act", {"silu": SILU}, SILU),
}
BLOCK: FieldSources = {"eps": number("rms_norm_eps", default=1e-6), "tied": flag("tie_word_embeddings")}
EXTRA_LAYERS = whole(  # as publishers call them
    *("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers", "mtp_num_hidden_layers"),
    default=0,
)


def spec_from_config(config: Config) -> ModelSpec:
    """Returns the spec of a `config.json`. Raises UnsupportedModel, and CheckpointError for invalid values."""
    family = _family(config)
    config = _decoder_part(config, family)
    heads = family.mechanism(**_read(config, HEADS, family.heads))
    rope, context_tokens = read_rope(config, family.rope, heads.dim)
    if heads.window >= context_tokens:
        heads = replace(heads, window=0)  # the window is the whole context
    positions = rope if family.positions(config) else None
    spec = ModelSpec(
        family=family.name,
        architecture=family.architecture,
        vocab=integer(config, "vocab_size"),
        hidden=integer(config, "hidden_size"),
        dtype=_dtype(config),
        context_tokens=context_tokens,
        names=family.names,
        attention=family.layers(config, LayerAttention(heads, positions)),
        router=RouterSpec(**_read(config, ROUTER, family.router)),
        feed_forward=FeedForwardSpec(**_read(config, FEED_FORWARD, family.feed_forward)),
        block=BlockSpec(**_read(config, BLOCK, family.block)),
        extra_layers=EXTRA_LAYERS(config),
        layer_inputs=family.layer_inputs(config),
    )
    _check_sizes(spec)
    return spec


def decoder_config(config: Config) -> Config:
    """Returns the decoder's section of a `config.json`. Raises as `spec_from_config`."""
    return _decoder_part(config, _family(config))


def _read(config: Config, common: FieldSources, given: FieldSources) -> dict[str, Any]:
    return {field: value(config) if callable(value) else value for field, value in {**common, **given}.items()}


def _family(config: Config) -> Family:
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"config.json: architectures must be a list of names, not {str(named)[:80]}")
    for family in FAMILIES.values():
        if family.architecture in named or (not named and config.get("model_type") == family.name):
            if _has_experts(config):
                return family
            break
    found = ", ".join(map(str, named)) or config.get("model_type") or "none named in config.json"
    why = next((f": {REFUSED[name]}" for name in named if name in REFUSED), "")
    have = ", ".join(sorted(FAMILIES))
    if not why and not _has_experts(config):
        why = " is a dense model: it has no experts, and edgemoe serves Mixture-of-Experts models"
        raise UnsupportedModel(f"{str(found)[:200]}{why}; supported are {have}")
    raise UnsupportedModel(f"architecture not supported: {str(found)[:200]}{why}; supported are {have}")


def _has_experts(config: Config) -> bool:
    """Returns whether a configuration, or a section of it, counts experts, or says too little to tell."""
    sections = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    sized = any("hidden_size" in part for part in sections)
    return not sized or any("expert" in str(key) for part in sections for key in part)


def _decoder_part(config: Config, family: Family) -> Config:
    """Returns the configuration of the decoder alone. Keys that it lacks are taken from the whole model's.

    A dtype of the whole model overrides the decoder's, because a store writes its own dtype there.
    """
    part = config.get(family.section) if family.section else {}
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json: {family.section} must be a table, not {str(part)[:80]!r}")
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {**config, **part, **({"dtype": dtype} if dtype else {})}


def _dtype(config: Config) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"weights of type {dtype} are not supported; have {', '.join(DTYPE_BYTES)}")
    return dtype


def _check_sizes(spec: ModelSpec) -> None:
    router, feed_forward = spec.router, spec.feed_forward
    for heads in {attention.heads for attention in spec.attention}:
        _check_heads(heads)
    for name, value, most in (  # far above any model; larger values are errors
        ("vocab_size", spec.vocab, 1 << 24),
        ("hidden_size", spec.hidden, 1 << 20),
        ("the experts' width", feed_forward.width, 1 << 22),
        ("the dense layers' width", feed_forward.dense_width, 1 << 22),
        ("the shared experts' width", feed_forward.shared_width, 1 << 22),
        ("the experts' latent width", feed_forward.latent, 1 << 20),
        ("the number of experts", router.experts, 1 << 15),
        ("the number of layers for predicting several tokens", spec.extra_layers, MOST_LAYERS),
        ("max_position_embeddings", spec.context_tokens, 1 << 31),
    ):
        _bound(name, value, most)
    dense, group = feed_forward.dense_layers, router.experts // router.groups
    closed = router.top_groups < router.groups
    for fault, what in (
        (spec.layers * router.experts > MAX_EXPERTS, f"more than {MAX_EXPERTS} experts are impossible"),
        (spec.hidden % 2 or feed_forward.width % 2, "hidden_size and the experts' width must be even"),
        (feed_forward.latent % 2, "the experts' latent width must be even"),
        (router.top_k > router.experts, "num_experts_per_tok must be at most the number of experts"),
        (not spec.expert_layers, "no layer has experts"),
        (dense and not feed_forward.dense_width, "it has dense layers, but not their width"),
        (router.experts % router.groups, "the number of experts must be a multiple of the number of groups"),
        (spec.state_bytes > MOST_STATE_BYTES, f"states of more than {MOST_STATE_BYTES} bytes are impossible"),
        (router.top_groups > router.groups, "more groups of experts are chosen than there are"),
        (router.top_k > router.top_groups * group, "num_experts_per_tok is more than the chosen groups have"),
        (closed and router.group_score == "top2" and group < 2, "groups are chosen by two experts, and have one"),
    ):
        if fault:
            raise CheckpointError(f"config.json: {what}")


def _check_heads(heads: AttentionHeads) -> None:
    _bound("num_attention_heads", heads.count, 1 << 14)
    _bound("head_dim", heads.dim, 1 << 14)
    if heads.count % heads.kv_count:
        raise CheckpointError("config.json: num_attention_heads must be a multiple of num_key_value_heads")
    if heads.dim % 2:
        raise CheckpointError("config.json: head_dim must be even")


def _bound(name: str, value: int, most: int) -> None:
    if value > most:
        raise CheckpointError(f"config.json: {name} = {value} is impossible; {most} is the most")
