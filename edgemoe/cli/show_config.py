"""Runs `edgemoe config`: prints every setting in force, as TOML, with its origin."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgemoe.cli.service_command import templates
from edgemoe.config.loading import flatten, load, nearest
from edgemoe.config.sizes import format_rate, format_size
from edgemoe.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Prints the settings, or one of them, or with --example the commented example file. Raises ConfigError."""
    if args.example:
        print((templates() / "edgemoe.toml").read_text(encoding="utf-8"), end="")
        return 0
    loaded = load(Path(args.config) if args.config else None, args.set)
    everything = flatten(loaded.settings)
    if args.key:
        print(_one(everything, args.key))
        return 0
    values = {key: value for key, value in everything.items() if not args.changed or loaded.origins[key] != "default"}
    if args.json:
        rows = {key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()}
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(as_toml(values, loaded.origins)))
    return 0


def _one(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        raise ConfigError(f"unknown setting {key!r}{nearest(key)}")
    return values[key] if isinstance(values[key], str) else json.dumps(values[key])


def as_toml(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of an equivalent settings file, with each value's origin as a comment."""
    section = ""
    width = max((len(_assignment(key, value)) for key, value in values.items()), default=0)
    for key, value in values.items():
        prefix = key.rpartition(".")[0]
        if prefix != section:
            yield ("" if not section else "\n") + _header(prefix)
            section = prefix
        yield f"{_assignment(key, value):{width}}  # {_readable(key, value)}{origins[key]}"


def _header(prefix: str) -> str:
    section, _, name = prefix.partition(".")
    if section == "device":
        return "[[device]]"
    return f'[models."{name}"]' if section == "models" else f"[{prefix}]"


def _assignment(key: str, value: Any) -> str:
    return f"{key.rpartition('.')[2]} = {json.dumps(value, ensure_ascii=False)}"


def _readable(key: str, value: Any) -> str:
    if value and key.endswith("_bytes"):
        return f"{format_size(value)}, "
    return f"{format_rate(value)}, " if value and key.endswith("_bytes_per_s") else ""
