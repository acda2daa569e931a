"""Counts lists, objects and fields of bodies in slices, across whose ends texts lie."""

from __future__ import annotations

import random

import msgspec
import pytest

from edgemoe.api import body_bounds
from edgemoe.errors import InvalidRequest

LETTERS = ('"', "\\", "[", "{", ":", "a", "é", "\n")


def drawn(rng: random.Random) -> tuple[bytes, int]:
    """Returns a body and the number of its lists, objects and fields."""
    parts = 0

    def value(depth: int) -> object:
        nonlocal parts
        kind = rng.randrange(3) if depth else 2
        if kind == 0:
            parts += 1
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 1:
            names = {text() for _ in range(rng.randrange(4))}
            parts += 1 + len(names)
            return {name: value(depth - 1) for name in names}
        return rng.choice([text(), 7, None])

    def text() -> str:
        return "".join(rng.choices(LETTERS, k=rng.randrange(12)))

    return msgspec.json.encode(value(5)), parts


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64])
def test_parts_are_counted_alike_in_slices_of_any_size(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    rng = random.Random(slice_bytes)
    monkeypatch.setattr(body_bounds, "SLICE_BYTES", slice_bytes)
    for _ in range(300):
        body, parts = drawn(rng)
        if parts == 0:
            continue
        monkeypatch.setattr(body_bounds, "MAX_PARTS", parts)
        body_bounds.check_parts(body)
        monkeypatch.setattr(body_bounds, "MAX_PARTS", parts - 1)
        with pytest.raises(InvalidRequest):
            body_bounds.check_parts(body)
