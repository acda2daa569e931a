"""Reads in what layers differ: what they attend with, and which have one dense network in place of experts."""

from __future__ import annotations

from dataclasses import replace

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.read import Config, choice, integer, whole
from edgemoe.families.spec import Attention

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MOST_LAYERS = 1 << 12


def layer_count(config: Config) -> int:
    layers = integer(config, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers = {layers} is impossible; {MOST_LAYERS} is the most")
    return layers


def stated_kinds(config: Config, key: str, known: tuple[str, str]) -> list[str] | None:
    """Returns what `key` calls each layer, one of two kinds; None where it says nothing. Raises CheckpointError."""
    layers, kinds = layer_count(config), config.get(key)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(f"config.json: {key} must name {layers} layers, not {str(kinds)[:80]}")
    if unknown := [str(kind)[:80] for kind in kinds if kind not in known]:
        raise UnsupportedModel(f"config.json: {key} has {unknown[0]!r}; supported are {' and '.join(known)}")
    return kinds


def alike(config: Config, attention: Attention) -> tuple[Attention, ...]:
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


def by_type(config: Config, attention: Attention) -> tuple[Attention, ...]:
    """Gives the window to the layers whose type says so: of older configurations, those from `max_window_layers` on."""
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    if kinds is None:
        layers = layer_count(config)
        first = integer(config, "max_window_layers", default=layers)
        kinds = [FULL] * min(first, layers) + [SLIDING] * (layers - first)
    return _by_kind(kinds, attention)


def by_type_below(config: Config, attention: Attention) -> tuple[Attention, ...]:
    """As `by_type`, but that older configurations mean every other layer below `max_window_layers`, the first too."""
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    if kinds is None:
        layers, end = layer_count(config), integer(config, "max_window_layers", default=28)
        kinds = [FULL if layer % 2 or layer >= end else SLIDING for layer in range(layers)]
    return _by_kind(kinds, attention)


def _by_kind(kinds: list[str], attention: Attention) -> tuple[Attention, ...]:
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
    """Returns all but every `decoder_sparse_step`-th layer, and what `mlp_only_layers` names."""
    step = integer(config, "decoder_sparse_step", default=1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, not {str(named)[:80]!r}")
    return frozenset(layer for layer in range(layer_count(config)) if layer in named or (layer + 1) % step)
