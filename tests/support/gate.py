"""Parameters of which the gate runs some, and a slow run all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def in_gate(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Returns all values as parameters of a test, those outside `chosen` marked slow."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]
