"""Cases times ways: all of them in the slow run, and in the gate each case in one way, by turns."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def by_turns(ways: Iterable[Any], cases: Iterable[Any], slow: Container[Any] = ()) -> list[Any]:
    """Returns every (way, case) for `parametrize`. The gate runs one way for each case; the others are slow.

    A case that is a tuple gives several values. With as many cases in a row as ways, the next row begins one way later.
    Cases with a value in `slow` are in the slow run alone.
    """
    ways = tuple(ways)
    count, made = len(ways), []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        is_slow = any(value in slow for value in values)
        for turn, way in enumerate(ways):
            is_turn = (number + number // count) % count == turn
            marks = () if is_turn and not is_slow else pytest.mark.slow
            made.append(pytest.param(way, *values, marks=marks))
    return made
