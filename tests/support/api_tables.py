"""The tables of docs/api.md, as tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCUMENT = (Path(__file__).parents[2] / "docs/api.md").read_text()
SPAN = re.compile(r"`([^`]+)`")


def rows(head: str) -> list[list[str]]:
    """Returns the cells of each row of the one table with this head."""
    _, found, rest = DOCUMENT.partition(f"\n| {head} |\n")
    assert found, head
    assert f"\n| {head} |\n" not in rest
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def spans(cell: str) -> list[str]:
    """Returns the code spans of a cell."""
    return SPAN.findall(cell)


def fields(span: str, **values: Any) -> dict[str, Any]:
    """Returns the fields that a code span writes, with these values in place of the words in capitals."""
    for name, value in values.items():
        span = re.sub(rf"\b{name}\b", lambda _, value=value: json.dumps(value), span)  # type: ignore[misc]
    return dict(json.loads(f"{{{span}}}"))
