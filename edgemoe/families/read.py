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
