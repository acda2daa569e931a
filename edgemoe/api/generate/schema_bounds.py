"""Bounds of JSON schemas and regular expressions that constrain an answer, checked before a grammar is made of them.

They say what is wrong and where. What is within them and still takes too long is refused by its trial.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, DecimalException
from typing import Any

from edgemoe.errors import InvalidRequest

MAX_VALUES = 20_000  # objects, lists, texts, numbers of one schema, and names in it
MAX_DEPTH = 64
MAX_MULTIPLE = 1_000_000  # multipleOf, read without its decimal point
MAX_LEAST = 1_000_000  # minLength and the like
MAX_MOST = 2**31 - 1  # maxLength and the like
MAX_PATTERN_CHARS = 16 << 10
MAX_REPETITIONS = 100_000  # of counted repetitions within each other: (a{100}){1000}
MAX_MEMBERS = {
    "enum": 10_000,
    "anyOf": 1_000,
    "oneOf": 1_000,
    "allOf": 200,
    "prefixItems": 1_000,
    "type": 16,
    "required": 2_000,
    "properties": 2_000,
    "patternProperties": 100,
    "$defs": 2_000,
    "definitions": 2_000,
}
LEAST = ("minLength", "minItems", "minProperties", "minContains")
MOST = ("maxLength", "maxItems", "maxProperties", "maxContains")

_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])[^\]\\]*(?:\\.[^\]\\]*)*\]|\{(\d*)(?:,(\d*))?\}|.", re.DOTALL)


def check_schema(schema: Any, where: str) -> None:
    """Raises InvalidRequest where a schema, which is at `where` in the body, is out of bounds."""
    for values, (value, path, depth) in enumerate(_walk(schema, where), start=1):
        if values > MAX_VALUES:
            raise _beyond(where, f"has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _beyond(path[:256], f"is nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            _check_keywords(value, path)


def check_pattern(pattern: str, where: str) -> None:
    """Raises InvalidRequest where a regular expression is out of bounds."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _beyond(where, f"has {len(pattern)} characters, more than the {MAX_PATTERN_CHARS} allowed")
    if (most := repetitions(pattern)) > MAX_REPETITIONS:
        raise _beyond(where, f"repeats a part {most} times, more than the {MAX_REPETITIONS} allowed")


def repetitions(pattern: str) -> int:
    """Returns how often the most repeated part of a regular expression may occur by counted repetitions."""
    groups = [1]  # the most within each open group
    last = 1  # of the part that a repetition would follow
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            groups.append(1)
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
        elif text[0] == "{" and (piece[1] or piece[2]):
            last *= max(1, *(int(bound[:12]) for bound in piece.groups() if bound))
        else:
            last = 1
        groups[-1] = max(groups[-1], last)
    return max(groups)


def _walk(schema: Any, where: str) -> Iterator[tuple[Any, str, int]]:
    """Yields every value within, with its path and depth; a list's or an object's before those in it."""
    stack: list[tuple[Any, str, int]] = [(schema, where, 0)]
    while stack:
        value, path, depth = stack.pop()
        yield value, path, depth
        if isinstance(value, dict):
            stack.extend((each, f"{path}.{str(key)[:64]}", depth + 1) for key, each in value.items())
        elif isinstance(value, list):
            stack.extend((each, f"{path}[{at}]", depth + 1) for at, each in enumerate(value))


def _check_keywords(schema: Mapping[str, Any], path: str) -> None:
    for keyword, most in MAX_MEMBERS.items():
        members = schema.get(keyword)
        if isinstance(members, list | dict) and len(members) > most:
            raise _beyond(f"{path}.{keyword}", f"has {len(members)} members, more than the {most} allowed")
    for keywords, most in ((LEAST, MAX_LEAST), (MOST, MAX_MOST)):
        for keyword in keywords:
            value = schema.get(keyword)
            if isinstance(value, int | float) and value > most:
                raise _beyond(f"{path}.{keyword}", f"is more than the {most} allowed")
    if (multiple := schema.get("multipleOf")) is not None:
        _check_multiple(multiple, f"{path}.multipleOf")
    if isinstance(pattern := schema.get("pattern"), str):
        check_pattern(pattern, f"{path}.pattern")
    if isinstance(patterns := schema.get("patternProperties"), dict):
        for at, pattern in enumerate(patterns):
            check_pattern(pattern, f"{path}.patternProperties[{at}]")


def _check_multiple(multiple: Any, where: str) -> None:
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return  # which is refused as what it is
    try:
        digits = int("".join(map(str, Decimal(repr(multiple)).normalize().as_tuple().digits)))
        whole = int(multiple) if multiple >= 1 else 0
    except (DecimalException, ValueError, OverflowError):
        raise _beyond(where, "is not a number that can be counted in") from None
    if max(digits, whole) > MAX_MULTIPLE:
        raise _beyond(where, f"has more digits than {MAX_MULTIPLE}, the largest multiple allowed, point left out")


def _beyond(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {why}", param=where, code="invalid_grammar")
