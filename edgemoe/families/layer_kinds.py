"""Reads which layers see a window, and which embed positions, where the two go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgemoe.errors import CheckpointError
from edgemoe.families.mechanisms import Layers, read_rope
from edgemoe.families.read import (
    FULL,
    SLIDING,
    Config,
    integer,
    layer_count,
    numbers_of_layers,
    real,
    stated_kinds,
    typed_layers,
)
from edgemoe.families.spec import LayerAttention


def windows_rotated(period_key: str, period: int) -> Layers:
    """Returns a reader of layers with windows and positions, between layers that have neither.

    Every `period`-th layer has neither where no list says which.
    """

    def read(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
        kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
        if kinds is None:
            every = integer(config, period_key, default=period)
            kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(layer_count(config))]
        return _without_positions(kinds, attention)

    return read


def granite_layers(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Gives windows to all but every fourth layer, the first one among these, where no list says which.

    `layer_rope_theta` has the base of each layer's rotary embedding; with 0 it has none.
    """
    layers = layer_count(config)
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    if kinds is None:
        kinds = [SLIDING if layer % 4 else FULL for layer in range(layers)]
    thetas = config.get("layer_rope_theta")
    if thetas is not None and (not isinstance(thetas, list) or len(thetas) != layers):
        raise CheckpointError(f"config.json: layer_rope_theta must have {layers} numbers, not {str(thetas)[:80]}")
    made = []
    for layer, kind in enumerate(kinds):
        rope = attention.rope
        if thetas is not None and rope is not None:
            no_rope = thetas[layer] == 0
            rope = (
                None if no_rope else replace(rope, theta=real({"layer_rope_theta": thetas[layer]}, "layer_rope_theta"))
            )
        window = 0 if kind == FULL else attention.heads.window
        made.append(LayerAttention(replace(attention.heads, window=window), rope))
    return tuple(made)


def exaone_layers(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Reads layers as `windows_rotated` does; all embed positions where the model has no windows."""
    if config.get("sliding_window") is None:
        return (attention,) * layer_count(config)
    return windows_rotated("sliding_window_pattern", 4)(config, attention)


def cohere_layers(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Reads layers as `windows_rotated` does; the dense layers at the front have a period of their own.

    With a period of 1 they see all tokens and embed positions.
    """
    kinds = stated_kinds(config, "layer_types", (FULL, SLIDING))
    dense = typed_layers(config, usual=0)
    front = integer(config, "prefix_dense_sliding_window_pattern", default=1)
    if kinds is None:
        period = integer(config, "sliding_window_pattern", default=4)
        places = [(layer, front) for layer in range(len(dense))]
        places += [(layer, period) for layer in range(layer_count(config) - len(dense))]
        kinds = [SLIDING if (place + 1) % every else FULL for place, every in places]
    layers = _without_positions(kinds, attention)
    if front > 1:
        return layers
    return tuple(replace(each, rope=attention.rope) if n in dense else each for n, each in enumerate(layers))


def _without_positions(kinds: list[str], attention: LayerAttention) -> tuple[LayerAttention, ...]:
    full = LayerAttention(replace(attention.heads, window=0), None)
    return tuple(attention if kind == SLIDING else full for kind in kinds)


def rope_by_kind(usual: Mapping[str, Mapping[str, Any]]) -> Layers:
    """Returns a reader of layers with windows and without, each kind with its own rotary embedding.

    `usual` are the embeddings where the configuration has none. Layers may have their own number of heads.
    """

    def read(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
        kinds = stated_kinds(config, "layer_types", (FULL, SLIDING)) or [FULL] * layer_count(config)
        given = config.get("rope_parameters") or usual
        if not isinstance(given, Mapping) or not all(isinstance(given.get(kind), Mapping) for kind in set(kinds)):
            raise CheckpointError("config.json: rope_parameters must have a table for each kind of layer_types")
        made = {}
        for kind in set(kinds):
            own = {**config, "rope_parameters": given[kind], "rope_scaling": None, "partial_rotary_factor": None}
            window = 0 if kind == FULL else attention.heads.window
            rope, _ = read_rope(own, {}, attention.heads.dim)
            made[kind] = LayerAttention(replace(attention.heads, window=window), rope)
        counts = numbers_of_layers(config, "num_attention_heads_per_layer")
        if counts is None:
            return tuple(made[kind] for kind in kinds)
        return tuple(
            replace(made[kind], heads=replace(made[kind].heads, count=count))
            for kind, count in zip(kinds, counts, strict=True)
        )

    return read
