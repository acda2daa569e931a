"""Reads in what layers differ: what they attend with, and which have one dense network in place of experts."""

from __future__ import annotations

from edgemoe.errors import CheckpointError
from edgemoe.families.read import Config, integer
from edgemoe.families.records import Attention

MOST_LAYERS = 1 << 12


def layer_count(config: Config) -> int:
    layers = integer(config, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers = {layers} is impossible; {MOST_LAYERS} is the most")
    return layers


def alike(config: Config, attention: Attention) -> tuple[Attention, ...]:
    return (attention,) * layer_count(config)


def sparse_steps(config: Config) -> frozenset[int]:
    """Returns all but every `decoder_sparse_step`-th layer, and what `mlp_only_layers` names."""
    step = integer(config, "decoder_sparse_step", default=1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, not {str(named)[:80]!r}")
    return frozenset(layer for layer in range(layer_count(config)) if layer in named or (layer + 1) % step)
