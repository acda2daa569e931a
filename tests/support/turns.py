"""Cases times ways: all of them in the slow run, and in the gate each case in one way, by turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_turns(ways: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns every (way, case) for `parametrize`. The gate runs one way for each case; the others are slow.

    A case that is a tuple gives several values. With as many cases in a row as ways, the next row begins one way later.
    """
    ways = tuple(ways)
    count, made = len(ways), []
    for number, case in enumerate(cases):
        for turn, way in enumerate(ways):
            marks = () if (number + number // count) % count == turn else pytest.mark.slow
            made.append(pytest.param(way, *(case if isinstance(case, tuple) else (case,)), marks=marks))
    return made
