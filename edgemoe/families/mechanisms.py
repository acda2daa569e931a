"""The attention mechanisms of families, rotary embedding, and how configurations write them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.read import (
    FULL,
    SLIDING,
    Config,
    ConfigReader,
    choice,
    integer,
    layer_count,
    real,
    stated_kinds,
    whole,
)
from edgemoe.families.spec import AttentionHeads, KVRow, LayerAttention, LayerInputs, ModelSpec, RopeSpec, Tensors
from edgemoe.types.bounds import is_number
from edgemoe.types.experts import Activation

MOST_WIDTH = 1 << 14
MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class LatentHeads(AttentionHeads):
    """The heads of one layer. A token's keys and values are projected from `rank` latent and `dim` rotated numbers.

    `dim` is the part of a head's key that rotary embedding turns: the same for all heads.
    """

    mechanism: ClassVar[str] = "latent"

    query_rank: int = 0  # 0: queries are made of the hidden state at once
    rank: int = 0
    plain: int = 0  # of a head's key, the part without rotary embedding
    value: int = 0  # of a head's value
    growth: float = 0.0  # queries are multiplied by 1 + growth * ln(1 + position // growth_tokens)
    growth_tokens: int = 0

    @property
    def key(self) -> int:
        """The width of a head's key."""
        return self.plain + self.dim

    @property
    def kv(self) -> KVRow:
        return KVRow(1, self.rank + self.dim, self.rank, values_in_keys=True)

    def tensors(self, hidden: int) -> Tensors:
        queries = self.count * self.key
        if self.query_rank:
            yield "self_attn.q_a_proj.weight", (self.query_rank, hidden)
            yield "self_attn.q_a_layernorm.weight", (self.query_rank,)
            yield "self_attn.q_b_proj.weight", (queries, self.query_rank)
        else:
            yield "self_attn.q_proj.weight", (queries, hidden)
        yield "self_attn.kv_a_proj_with_mqa.weight", (self.rank + self.dim, hidden)
        yield "self_attn.kv_a_layernorm.weight", (self.rank,)
        yield "self_attn.kv_b_proj.weight", (self.count * (self.plain + self.value), self.rank)
        yield "self_attn.o_proj.weight", (hidden, self.count * self.value)


GROWTH = "llama_4_scaling_beta"


def planned_tokens(spec: ModelSpec) -> int:
    """Returns the longest context of steps that compiled plans compute on the CPU; 0 where they compute all."""
    heads = [each.heads for each in spec.attention]
    limits = {each.chosen or (each.growth_tokens if isinstance(each, LatentHeads) else 0) for each in heads}
    return min(limits - {0}, default=0)


def width(key: str, default: int | None = None) -> ConfigReader:
    """Returns a reader of a width: even, and not beyond reason."""
    read = whole(key, default=default)

    def checked(config: Config) -> int:
        value: int = read(config)
        if value % 2 or value > MOST_WIDTH:
            raise CheckpointError(f"config.json: {key} must be even and at most {MOST_WIDTH}, not {value}")
        return value

    return checked


def _value(config: Config) -> int:
    """Returns the width of a value, which lies in a line as wide as a key."""
    value, key = (
        integer(config, "v_head_dim"),
        integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim"),
    )
    if value > key:
        raise UnsupportedModel(f"config.json: v_head_dim = {value} is not supported: at most that of keys, {key}")
    return value


def _scale(config: Config) -> float:
    """Returns the factor of scores. YaRN's `mscale_all_dim` enters it squared."""
    scale = float((integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim")) ** -0.5)
    given = rope_table(config)
    if (given.get("rope_type") or given.get("type") or "default") != "default" and given.get("mscale_all_dim"):
        factor = real(given, "factor")
        scale *= (1.0 if factor <= 1.0 else 0.1 * real(given, "mscale_all_dim") * math.log(factor) + 1.0) ** 2
    return scale


def growth(config: Config) -> float:
    """Returns Llama-4's factor of the logarithm by which queries grow with the position; 0: they do not."""
    return real(rope_table(config), GROWTH) if rope_table(config).get(GROWTH) else 0.0


def growth_tokens(config: Config) -> int:
    """Returns after how many tokens queries grow."""
    return integer(rope_table(config), "original_max_position_embeddings") if growth(config) else 0


LATENT = {  # how configurations write the record
    "kv_count": whole("num_attention_heads"),
    "dim": whole("qk_rope_head_dim"),
    "query_rank": width("q_lora_rank", default=0),
    "rank": width("kv_lora_rank"),
    "plain": width("qk_nope_head_dim"),
    "value": _value,
    "scale": _scale,
    "qkv_bias": choice("attention_bias", {False: False}, False),
}


Layers = Callable[[Config, LayerAttention], tuple[LayerAttention, ...]]
GEMMA_PERIOD = 6  # layers; the last one of each period sees all tokens
GEMMA_WIDE = 512  # elements of its heads
GEMMA_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GEMMA_LACKS = {  # features of other Gemmas, and the values with which a model is without them
    "enable_moe_block": (True,),
    "num_kv_shared_layers": (0, None),
    "use_double_wide_mlp": (False, None),
    "use_bidirectional_attention": (None, "vision"),  # between the tokens of an image, which are refused
}


def alternating(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Gives every other layer a window, the first one among them, where nothing else is said."""
    full = replace(attention, heads=replace(attention.heads, window=0))
    return tuple(full if kind == FULL else attention for kind in _window_kinds(config, period=2))


def gemma(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Gives full layers their own heads and rotary embedding. Raises UnsupportedModel for other Gemmas."""
    for key, known in GEMMA_LACKS.items():
        if config.get(key) not in known:
            raise UnsupportedModel(f"config.json: {key} = {str(config.get(key))[:80]!r} is not supported")
    kinds = _window_kinds(config, GEMMA_PERIOD)
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


def gemma_inputs(config: Config) -> LayerInputs | None:
    """Returns Gemma's per-layer embeddings, or None where the model has none. Raises CheckpointError."""
    if not config.get("hidden_size_per_layer_input"):
        return None
    width = integer(config, "hidden_size_per_layer_input")
    if width > MOST_WIDTH:
        raise CheckpointError(f"config.json: hidden_size_per_layer_input must be at most {MOST_WIDTH}, not {width}")
    tokens, vocab = (integer(config, name) for name in ("vocab_size_per_layer_input", "vocab_size"))
    if not vocab <= tokens <= MOST_TOKENS:
        most = f"from vocab_size, {vocab}, to {MOST_TOKENS}"
        raise CheckpointError(f"config.json: vocab_size_per_layer_input must be {most}, not {tokens}")
    return LayerInputs(tokens, width, _root(config, width))


def root_of_hidden(config: Config) -> float:
    """Returns the factor of Gemma's embedding: a number of the weights' type, as the model was trained with."""
    return _root(config, integer(config, "hidden_size"))


def _root(config: Config, width: int) -> float:
    """Returns the root of a width in the weights' type."""
    root = width**0.5
    if str(config.get("dtype") or config.get("torch_dtype")).endswith("float32"):
        return float(root)
    bits: int = struct.unpack("<I", struct.pack("<f", root))[0]
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    factor: float = struct.unpack("<f", struct.pack("<I", rounded))[0]
    return factor


def _window_kinds(config: Config, period: int) -> list[str]:
    """Returns each layer's kind: as the configuration states, or all SLIDING but every `period`-th."""
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    if kinds is None:
        return [SLIDING if (layer + 1) % period else FULL for layer in range(layer_count(config))]
    return kinds


def _gemma_layer(config: Config, attention: LayerAttention, kind: str) -> LayerAttention:
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
    return LayerAttention(heads, rope)


def _overridden(attention: LayerAttention, own: Any) -> LayerAttention:
    """Returns a layer's attention with the overrides of transformers 5's `per_layer_config`."""
    if not isinstance(own, Mapping):
        raise CheckpointError(f"config.json: per_layer_config must have tables, not {str(own)[:80]!r}")
    if not own:
        return attention
    heads, rope = attention.heads, attention.rope
    dim = integer(own, "head_dim", default=heads.dim)
    kv_count = integer(own, "num_key_value_heads", default=heads.kv_count)
    if rope is not None and rope.dims == heads.dim:
        rope = replace(rope, dims=dim)
    return LayerAttention(replace(heads, dim=dim, kv_count=kv_count), rope)


THETA = 1e4
KINDS = ("default", "linear", "proportional", "yarn")


def read_rope(config: Config, family: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, int]:
    """Returns the rotary embedding and the length of context that it reaches, in tokens.

    `family` has the defaults of the configuration: `theta`, and the `partial` share of a head that turns. With `apart`
    all of `head_dim` turns; with `grows` the family has `growth`.
    """
    context_tokens = integer(config, "max_position_embeddings")
    given = rope_table(config)
    if given.get(GROWTH) and not family.get("grows"):
        raise UnsupportedModel(f"config.json: {GROWTH} = {str(given[GROWTH])[:80]} is not read for this architecture")
    theta = real(given, "rope_theta", default=real(config, "rope_theta", default=family.get("theta", THETA)))
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "dynamic" and given.get("alpha") is not None and head_dim > 2:  # it does not depend on the context
        kind, theta = "default", theta * real(given, "alpha") ** (head_dim / (head_dim - 2))
    if kind not in KINDS:
        raise UnsupportedModel(f"rotary embedding {dict(given)!r} is not supported; have {', '.join(KINDS)}")
    if kind == "proportional":
        share, factor = real(given, "partial_rotary_factor", default=1.0), real(given, "factor", default=1.0)
        return RopeSpec(theta, head_dim, kind=kind, factor=factor, share=share), context_tokens
    plain = RopeSpec(theta, _dims(config, given, family, head_dim), _switch(family, "interleaved", config))
    if kind == "default":
        return plain, context_tokens
    if theta <= 1.0:
        raise CheckpointError(f"config.json: rope_theta = {theta} is impossible for {kind}; it is more than 1")
    original = integer(config, "original_max_position_embeddings", default=_original_tokens(given, context_tokens))
    if kind == "yarn" and given.get("factor") is None:
        factor = context_tokens / original
    else:
        factor = real(given, "factor")
    if kind == "linear":
        return replace(plain, kind=kind, factor=factor), context_tokens
    rope = replace(
        plain,
        kind=kind,
        factor=factor,
        original_tokens=original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=real(given, "beta_fast", default=32.0),
        beta_slow=real(given, "beta_slow", default=1.0),
        truncate=bool(given.get("truncate", True)),
    )
    return rope, max(context_tokens, int(original * factor))


def rope_table(config: Config) -> Mapping[str, Any]:
    """Returns the section of a configuration about its rotary embedding. Raises CheckpointError."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    says_more = isinstance(newer, Mapping) and isinstance(older, Mapping) and newer == {**newer, **older}
    if newer and older and newer != older and not says_more:
        raise CheckpointError(
            f"config.json: rope_parameters = {str(newer)[:80]} and rope_scaling = {str(older)[:80]} differ; "
            "write all into rope_parameters and leave rope_scaling out"
        )
    given = newer or older or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope parameters must be a table, not {str(given)[:80]}")
    return given


def _dims(config: Config, given: Config, family: Mapping[str, Any], head_dim: int) -> int:
    """Returns how many dimensions of a head turn: an even number, all of them where nothing says otherwise."""
    if family.get("apart"):
        return head_dim
    stated = real(config, "partial_rotary_factor", default=family.get("partial", 1.0))
    if config.get("rotary_dim") is not None:
        stated = integer(config, "rotary_dim") / head_dim
    dims = int(head_dim * real(given, "partial_rotary_factor", default=stated))
    if dims % 2 or not 0 < dims <= head_dim:
        raise CheckpointError(f"config.json: partial_rotary_factor turns {dims} of {head_dim} dimensions of a head")
    return dims


def _switch(family: Mapping[str, Any], field: str, config: Config) -> bool:
    """Returns a switch of the family: a constant, or a function of the configuration."""
    value = family.get(field, False)
    return bool(value(config) if callable(value) else value)


def _original_tokens(given: Config, context_tokens: int) -> int:
    return integer(given, "original_max_position_embeddings", default=context_tokens)


def _yarn_attention_factor(given: Config, factor: float) -> float:
    """Returns YaRN's attention factor: as stated, or from `factor` [YaRN, 3.4], with DeepSeek's mscale pair."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return real(given, "attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(real(given, "mscale")) / scale(real(given, "mscale_all_dim"))
    return scale(1.0)


def same_attention(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    return (attention,) * layer_count(config)


def by_type(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Gives the window to the layers whose type says so: of older configurations, those from `max_window_layers` on."""
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    if kinds is None:
        layers = layer_count(config)
        first = integer(config, "max_window_layers", default=layers)
        kinds = [FULL] * min(first, layers) + [SLIDING] * (layers - first)
    return _by_kind(kinds, attention)


def by_type_below(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Reads layers as `by_type` does; without a list, even layers below `max_window_layers` see all tokens."""
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    if kinds is None:
        layers, end = layer_count(config), integer(config, "max_window_layers", default=28)
        kinds = [FULL if layer % 2 or layer >= end else SLIDING for layer in range(layers)]
    return _by_kind(kinds, attention)


def _by_kind(kinds: list[str], attention: LayerAttention) -> tuple[LayerAttention, ...]:
    full = replace(attention, heads=replace(attention.heads, window=0))
    return tuple(full if kind == FULL else attention for kind in kinds)
