"""Reads values of a configuration and checks them; an error names the key.

`whole`, `number`, `flag` and `choice` build functions of a configuration, of which the table of families consists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from edgemoe.errors import CheckpointError, UnsupportedModel

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
    return lambda config: (
        default if default is not None and _first(config, keys) is None else real(config, *keys, default=default)
    )


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


def always(config: Config) -> bool:
    """Returns True for every configuration."""
    return True


def _first(config: Config, keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _number(config: Config, keys: tuple[str, ...], default: N | None, kind: type[N]) -> N:
    """Returns the first of `keys` that is set, a positive number.

    Raises CheckpointError where several are set that differ, if there is no default.
    """
    stated = [key for key in keys if config.get(key) is not None]
    if other := [key for key in stated if default is None and config[key] != config[stated[0]]]:
        both = f"{stated[0]} = {str(config[stated[0]])[:40]} and {other[0]} = {str(config[other[0]])[:40]}"
        raise CheckpointError(f"config.json: {both} contradict each other; leave the wrong one out")
    key = stated[0] if stated else keys[0]
    value = config.get(key, default) if config.get(key) is not None else default
    if value is None:
        raise CheckpointError(f"config.json lacks {' or '.join(keys)}")
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not LEAST_REAL <= value <= MOST_REAL:
        raise CheckpointError(f"config.json: {key} must be a positive number, not {str(value)[:80]!r}")
    return kind(value)


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


def first_layers(key: str, usual: int) -> ConfigReader:
    """Returns a reader of the first layers; `key` has their number."""
    return lambda config: frozenset(
        range(min(0 if config.get(key) == 0 else integer(config, key, default=usual), layer_count(config)))
    )


def capped(key: str) -> ConfigReader:
    """Returns a reader of a bound, 0.0 where there is none."""
    return lambda config: 0.0 if not config.get(key) else real(config, key)


def unless(key: str, read: ConfigReader) -> ConfigReader:
    """Returns `read`, which refuses models in which `key` is set."""

    def checked(config: Config) -> Any:
        choice(key, {False: False}, False)(config)
        return read(config)

    return checked


def share_of_both(config: Config) -> float:
    """Returns the factor of routed and of shared experts: a half each where their mean counts."""
    strategies = {"average": 0.5, "sum": 1.0}
    share: float = choice("shared_expert_combination_strategy", strategies, 0.5)(config)
    return share if config.get("num_shared_experts") else 1.0


def first_dense(config: Config, usual: int = 0) -> frozenset[int]:
    """Returns the first `first_k_dense_replace` layers; all others have experts."""
    choice("moe_layer_freq", {1: 1}, 1)(config)
    return frozenset(range(min(whole("first_k_dense_replace", default=usual)(config), layer_count(config))))


def numbers_of_layers(config: Config, key: str) -> list[int] | None:
    """Returns the positive integer of each layer that `key` lists; None if it is not set. Raises CheckpointError."""
    layers, listed = layer_count(config), config.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != layers:
        raise CheckpointError(f"config.json: {key} must have {layers} numbers, not {str(listed)[:80]}")
    return [integer({key: each}, key) for each in listed]


def typed_layers(config: Config, usual: int = 1) -> frozenset[int]:
    """Returns the layers that `mlp_layer_types` calls dense, else the first ones: `usual`, or as said."""
    if (kinds := stated_kinds(config, "mlp_layer_types", ("dense", "sparse"))) is None:
        return first_dense(config, usual)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def shared_width(config: Config) -> int:
    """Returns the width of the experts that all tokens share, side by side."""
    width: int = whole("moe_intermediate_size")(config) * whole("n_shared_experts", default=0)(config)
    return width


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
