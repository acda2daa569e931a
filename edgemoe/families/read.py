"""Reads values of a configuration, checked: what is not what it should be is refused by name.

`whole`, `number`, `flag` and `choice` make functions of a configuration, of which the table of families is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from edgemoe.errors import CheckpointError, UnsupportedModel

Config = Mapping[str, Any]
Read = Callable[[Config], Any]
N = TypeVar("N", int, float)
LEAST_REAL, MOST_REAL = 1e-30, 1e30


def integer(config: Config, *keys: str, default: int | None = None) -> int:
    return _number(config, keys, default, int)


def real(config: Config, *keys: str, default: float | None = None) -> float:
    return _number(config, keys, default, float)


def same(key: str, default: int | None = None) -> Read:
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


def whole(*keys: str, default: int | Read | None = None) -> Read:
    """Returns a reader of the first of `keys` that is set: a positive integer, or 0 where 0 is the default."""

    def read(config: Config) -> int:
        if default == 0 and _first(config, keys) in (None, 0):
            return 0
        stated: int | None = default(config) if callable(default) else default
        return _number(config, keys, stated, int)

    return read


def number(*keys: str, default: float | None = None) -> Read:
    """Returns a reader of the first of `keys` that is set: a positive number, or the default, whatever it is."""
    return lambda config: default if _first(config, keys) is None and default is not None else real(config, *keys)


def times(key: str, count: str, default: int) -> Read:
    """Returns a reader of a size times how often it is there."""
    return lambda config: 0 if config.get(count, default) == 0 else integer(config, key) * same(count, default)(config)


def inverse(key: str) -> Read:
    """Returns a reader of what a positive number divides by; 1 where it is not set."""
    return lambda config: 1.0 / real(config, key, default=1.0)


def flag(key: str, default: bool = False) -> Read:
    """Returns a reader of true or false."""
    return lambda config: choice(key, {True: True, False: False}, default)(config)


def choice(key: str, values: Mapping[Any, Any], default: Any) -> Read:
    """Returns a reader of one of a few values: what `values` has for it, or `default` where it is not set."""

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
    """The first of `keys` that is set, a positive number."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key, default) if config.get(key) is not None else default
    if value is None:
        raise CheckpointError(f"config.json lacks {' or '.join(keys)}")
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not LEAST_REAL <= value <= MOST_REAL:
        raise CheckpointError(f"config.json: {key} must be a positive number, not {str(value)[:80]!r}")
    return kind(value)
