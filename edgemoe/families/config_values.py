"""Numbers of a configuration, checked: what is not a positive number is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from edgemoe.errors import CheckpointError

N = TypeVar("N", int, float)
LEAST_REAL, MOST_REAL = 1e-30, 1e30


def integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    return _number(config, keys, default, int)


def real(config: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    return _number(config, keys, default, float)


def _number(config: Mapping[str, Any], keys: tuple[str, ...], default: N | None, kind: type[N]) -> N:
    """The first of `keys` that is set, a positive number."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key, default) if config.get(key) is not None else default
    if value is None:
        raise CheckpointError(f"config.json lacks {' or '.join(keys)}")
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not LEAST_REAL <= value <= MOST_REAL:
        raise CheckpointError(f"config.json: {key} must be a positive number, not {str(value)[:80]!r}")
    return kind(value)
