"""Parses and formats sizes in bytes and rates in bytes per second."""

from __future__ import annotations

import math
import re

from edgemoe.errors import ConfigError

_UNITS = {"": 1.0, "B": 1.0}
for _power, _prefix in enumerate("kMGTP", start=1):
    _UNITS[f"{_prefix}B"] = _UNITS[f"{_prefix.upper()}B"] = 1000.0**_power
    _UNITS[f"{_prefix.upper()}iB"] = 1024.0**_power
    _UNITS[f"{_prefix}bit"] = _UNITS[f"{_prefix.upper()}bit"] = 1000.0**_power / 8

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Returns the bytes of "12GiB", "1.5 GB" or "4096". Raises ConfigError."""
    value = _parse(text)
    if value is None or "bit" in text:
        raise ConfigError(f'{text!r} is not a size; write bytes, or a unit as in "12GiB" or "1.5 GB"')
    return round(value)


def parse_rate(text: str) -> float:
    """Returns the bytes per second of "8GB/s" or "25Gbit/s", or of a plain number. Raises ConfigError."""
    value = _parse(text.strip().removesuffix("/s"))
    if value is None:
        raise ConfigError(f'{text!r} is not a rate; write bytes per second, or a unit as in "8GB/s" or "25Gbit/s"')
    return value


def _parse(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        return None
    value = float(match[1]) * _UNITS[match[2]]
    return value if math.isfinite(value) else None


def format_size(size_bytes: float) -> str:
    """Returns a size with a binary unit: "812 B", "1.5 GiB", "640 MiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """Returns a rate with a decimal unit: "8.0 GB/s"."""
    value = float(bytes_per_s)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}/s"
