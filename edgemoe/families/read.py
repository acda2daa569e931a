"""Reads values of a configuration and checks them; an error names the key.

`whole`, `number`, `flag` and `choice` build functions of a configuration, of which the table of families consists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.spec import LayerAttention, RopeSpec

Config = Mapping[str, Any]
ConfigReader = Callable[[Config], Any]
N = TypeVar("N", int, float)
LEAST_REAL, MOST_REAL = 1e-30, 1e30


def integer(config: Config, *keys: str, default: int | None = None) -> int:
    return _number(config, keys, default, int)


def real(config: Config, *keys: str, default: float | None = None) -> float:
    return _number(config, keys, default, float)


def same(key: str, default: int | None = None) -> ConfigReader:
    """Returns a reader of a positive integer that may be listed for each layer, if it is the same for all."""

    def read(config: Config) -> int:
        listed = config.get(key)
        if not isinstance(listed, list) or not listed:
            return integer(config, key, default=default)
        if any(each != listed[0] for each in listed):
            raise UnsupportedModel(
                f"config.json: {key} = {str(listed)[:80]} is not supported: it differs between layers"
            )
        return integer({key: listed[0]}, key)

    return read


def whole(*keys: str, default: int | ConfigReader | None = None) -> ConfigReader:
    """Returns a reader of the first of `keys` that is set: a positive integer, or 0 where 0 is the default."""

    def read(config: Config) -> int:
        if default == 0 and _first(config, keys) in (None, 0):
            return 0
        stated: int | None = default(config) if callable(default) else default
        return _number(config, keys, stated, int)

    return read


def number(*keys: str, default: float | None = None) -> ConfigReader:
    """Returns a reader of the first of `keys` that is set, a positive number; otherwise of the default."""
    return lambda config: default if _first(config, keys) is None and default is not None else real(config, *keys)


def times(key: str, count: str, default: int) -> ConfigReader:
    """Returns a reader of a size times how often it is there."""
    return lambda config: 0 if config.get(count, default) == 0 else integer(config, key) * same(count, default)(config)


def inverse(key: str) -> ConfigReader:
    """Returns a reader of the inverse of a positive number; 1 if it is not set."""
    return lambda config: 1.0 / real(config, key, default=1.0)


def flag(key: str, default: bool = False) -> ConfigReader:
    """Returns a reader of true or false."""
    return lambda config: choice(key, {True: True, False: False}, default)(config)


def choice(key: str, values: Mapping[Any, Any], default: Any) -> ConfigReader:
    """Returns a reader that maps a key by `values`; `default` if it is not set."""

    def read(config: Config) -> Any:
        value = config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool | int | str) or value not in values:
            known = ", ".join(repr(each) for each in values)
            raise UnsupportedModel(f"config.json: {key} = {str(value)[:80]!r} is not supported; supported are {known}")
        return values[value]

    return read


def _first(config: Config, keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _number(config: Config, keys: tuple[str, ...], default: N | None, kind: type[N]) -> N:
    """Returns the first of `keys` that is set, a positive number."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key, default) if config.get(key) is not None else default
    if value is None:
        raise CheckpointError(f"config.json lacks {' or '.join(keys)}")
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not LEAST_REAL <= value <= MOST_REAL:
        raise CheckpointError(f"config.json: {key} must be a positive number, not {str(value)[:80]!r}")
    return kind(value)


THETA = 1e4
KINDS = ("default", "linear", "proportional", "yarn")


def read_rope(config: Config, family: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, int]:
    """Returns the rotary embedding and the length of context that it reaches, in tokens.

    `family` has the defaults of the configuration: `theta`, and the `partial` share of a head that turns.
    """
    context_tokens = integer(config, "max_position_embeddings")
    given = rope_table(config)
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


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MOST_LAYERS = 1 << 12


def layer_count(config: Config) -> int:
    layers = integer(config, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers = {layers} is impossible; {MOST_LAYERS} is the most")
    return layers


def stated_kinds(config: Config, key: str, known: tuple[str, str]) -> list[str] | None:
    """Returns the kind of each layer that `key` lists, one of two; None if it is not set. Raises CheckpointError."""
    layers, kinds = layer_count(config), config.get(key)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(f"config.json: {key} must name {layers} layers, not {str(kinds)[:80]}")
    if unknown := [str(kind)[:80] for kind in kinds if kind not in known]:
        raise UnsupportedModel(f"config.json: {key} has {unknown[0]!r}; supported are {' and '.join(known)}")
    return kinds


def same_attention(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    return (attention,) * layer_count(config)


def first_dense(config: Config, usual: int = 0) -> frozenset[int]:
    """Returns the first `first_k_dense_replace` layers; all others have experts."""
    choice("moe_layer_freq", {1: 1}, 1)(config)
    return frozenset(range(min(whole("first_k_dense_replace", default=usual)(config), layer_count(config))))


def typed_layers(config: Config) -> frozenset[int]:
    """Returns the layers that `mlp_layer_types` calls dense, where it is there, else the first ones: one or as said."""
    if (kinds := stated_kinds(config, "mlp_layer_types", ("dense", "sparse"))) is None:
        return first_dense(config, usual=1)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def shared_width(config: Config) -> int:
    """Returns the width of the experts that all tokens share, side by side."""
    width: int = whole("moe_intermediate_size")(config) * whole("n_shared_experts", default=0)(config)
    return width


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


def outside_interval(config: Config) -> frozenset[int]:
    """Returns all but every `moe_layer_interval`-th of the layers from `moe_layer_start_index` to the end index."""
    layers, step = layer_count(config), integer(config, "moe_layer_interval", default=1)
    start, end = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    for index in (start, end):
        if isinstance(index, bool) or not isinstance(index, int):
            raise CheckpointError(f"config.json: the layers with experts are {str((start, end))[:80]}, no two numbers")
    end = layers - 1 if end == -1 else end
    return frozenset(layer for layer in range(layers) if (layer + 1) % step or not start <= layer <= end)


def sparse_steps(config: Config) -> frozenset[int]:
    """Returns the dense layers: all but every `decoder_sparse_step`-th one, and the layers of `mlp_only_layers`."""
    step = integer(config, "decoder_sparse_step", default=1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, not {str(named)[:80]!r}")
    return frozenset(layer for layer in range(layer_count(config)) if layer in named or (layer + 1) % step)
