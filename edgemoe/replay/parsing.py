"""Reads the values of `edgemoe replay`'s options. Each raises ArgumentTypeError with the expected form."""

from __future__ import annotations

import argparse
import math

from edgemoe.config.sizes import parse_rate, parse_size
from edgemoe.errors import ConfigError
from edgemoe.types.bounds import is_number

MOST_LAYERS = 1 << 10


def names(text: str) -> list[str]:
    """Returns the policies that are named, each once."""
    found = list(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError("name at least one policy")
    return found


def shares(text: str) -> list[float]:
    """Returns shares above 0."""
    found = [share(part) for part in text.split(",")]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError("a capacity is a share above 0, as in 0.25,0.5")
    return found


def share(text: str) -> float:
    """Returns a share between 0 and 1, both included."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return found


def start(text: str) -> float:
    """Returns a share from 0 to below 1, so that something comes after it."""
    found = share(text)
    if found == 1:
        raise argparse.ArgumentTypeError("nothing comes after 1: give a share below it")
    return found


def positive(text: str) -> float:
    """Returns a finite number that is not negative."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number


def count(text: str) -> int:
    """Returns a whole number above 0."""
    if not is_number(text, 18) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def size(text: str) -> int:
    """Returns the number of bytes that a size names."""
    try:
        found = int(parse_size(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found <= 0:
        raise argparse.ArgumentTypeError("a size is above 0 bytes")
    return found


def sizes(text: str) -> list[tuple[int, int]]:
    """Returns pairs of a number of layers and the bytes of one of their experts."""
    pairs = []
    for part in text.split(","):
        layers, times, each = part.strip().rpartition("x")
        pairs.append((count(layers) if times else 1, size(each)))
    if sum(layers for layers, _ in pairs) > MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r} states more than {MOST_LAYERS} layers")
    return pairs


def rate(text: str) -> float:
    """Returns bytes/s."""
    try:
        found = float(parse_rate(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found <= 0:
        raise argparse.ArgumentTypeError("a rate is above 0 bytes/s")
    return found
