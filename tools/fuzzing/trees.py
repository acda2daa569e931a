"""Hostile JSON, well formed: a good tree with some of its parts replaced, repeated or moved."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

DEEP, ENDLESS = "@deep@", "@endless@"  # placeholders for texts that no encoder writes
ODDITIES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 4095, 4096, 2**31, 2**32, 2**53 + 1, 2**60, 2**60 + 1, 2**62),
    *(2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-308, math.inf, -math.inf, math.nan),
    *("", "x", "0", "-1", "0" * 32, "..", "../../etc/passwd", "/dev/zero", "a\0b", "\ud7ff", "x" * 256, "x" * 70_000),
    *([], {}, [[]], [0], {"": None}, {"a": {"b": []}}, DEEP, ENDLESS),
)
DEPTH, DIGITS = 100_000, 5000


def spoil(tree: Any, rng: random.Random) -> Any:
    """Returns a copy with one to three changes."""
    spoilt = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = _anywhere(spoilt, rng)
        if path:
            _change(path[-1][0], path[-1][1], rng)
    return spoilt


def text_of(tree: Any, rng: random.Random) -> bytes:
    """Encodes the tree as JSON, one time in twenty with a repeated key."""
    text = json.dumps(tree)
    text = text.replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).replace(f'"{ENDLESS}"', "9" * DIGITS)
    if rng.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + "," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _anywhere(tree: Any, rng: random.Random) -> list[tuple[Any, Any]]:
    """Draws a path of (container, key) from the root to any value."""
    path: list[tuple[Any, Any]] = []
    while isinstance(tree, dict | list) and tree and not (path and rng.random() < 0.15):
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        path.append((tree, key))
        tree = tree[key]
    return path


def _change(container: Any, key: Any, rng: random.Random) -> None:
    old = container[key]
    ways = ["replace", "replace", "remove"]
    if isinstance(old, int | float) and not isinstance(old, bool):
        ways += ["nudge"] * 4
    if isinstance(container, list):
        ways += ["repeat", "swap"]
    match rng.choice(ways):
        case "replace":
            container[key] = copy.deepcopy(rng.choice(ODDITIES))
        case "remove":
            del container[key]
        case "nudge":
            container[key] = rng.choice((old + 1, old - 1, -old, old * 2, old + 4096, old - 4096, old * 10**6))
        case "repeat":
            container[key:key] = [copy.deepcopy(old) for _ in range(rng.choice((1, 2, 500)))]
        case "swap":
            other = rng.randrange(len(container))
            container[key], container[other] = container[other], container[key]
