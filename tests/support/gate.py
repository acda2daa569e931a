"""Parameters of which the gate runs some, and a slow run all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from edgemoe.types.encoding import AFFINE, IQ4_NL, Q4_K, Q6_K, Z4_128

RARE_ENCODINGS = [
    each.name for each in AFFINE if each not in (Q4_K, Q6_K, IQ4_NL, Z4_128)
]  # read by the same code as others


def in_gate(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Returns all values as parameters of a test, those outside `chosen` marked slow."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]
