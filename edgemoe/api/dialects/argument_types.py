"""Finds the JSON types that a function's schema allows for an argument, and turns the argument's text into JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from edgemoe.api.dialects.growing_text import quoted
from edgemoe.types.json_object import Json

TEXT = frozenset({"string"})
MAX_NESTED = 16  # references that are followed one after the other
MAX_SCHEMAS = 64  # that are looked at to find a type
WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates in Python print them
OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def resolved(schema: Any, root: Any) -> Json:
    """Returns `schema`, or the target of its `$ref` within `root`; {} where that is no object."""
    for _ in range(MAX_NESTED):
        if not isinstance(schema, Mapping) or not isinstance(path := schema.get("$ref"), str):
            break
        schema = root if path.startswith("#") else None
        for key in filter(None, path[1:].split("/")):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return dict(schema) if isinstance(schema, Mapping) else {}


def properties(parameters: Any) -> dict[str, Any]:
    """Returns the schemas of a function's parameters by name."""
    found = resolved(parameters, parameters).get("properties")
    return dict(found) if isinstance(found, Mapping) else {}


def required(parameters: Any) -> frozenset[str]:
    """Returns the names of the parameters that must be given."""
    listed = resolved(parameters, parameters).get("required")
    return frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else frozenset()


def kinds(schema: Any, root: Any) -> frozenset[str]:
    """Returns the JSON types that a value may have; empty where the schema does not say."""
    found: set[str] = set()
    schemas = deque([schema])
    for _ in range(MAX_SCHEMAS):
        if not schemas:
            break
        one = resolved(schemas.popleft(), root)
        found |= _own_kinds(one)
        for union in ("anyOf", "oneOf", "allOf"):
            schemas.extend(one[union][:MAX_SCHEMAS] if isinstance(one.get(union), list) else ())
    return frozenset(found)


def _own_kinds(schema: Json) -> set[str]:
    declared = schema.get("type")
    if declared is not None:
        return {one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)}
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {kind_of(value) for value in listed} if isinstance(listed, list) else set()


def kind_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    return "null" if value is None else OF_VALUES[type(value)]


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Returns `text` as JSON: unchanged if it is a JSON value of an allowed type, else as a string."""
    if allowed <= TEXT:
        return quoted(text)
    word = text.strip()
    word = WORDS.get(word, word)
    try:
        value = msgspec.json.decode(word)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return quoted(text)
    kind = kind_of(value)
    if kind in allowed or (kind == "integer" and "number" in allowed):
        return word
    if kind == "number" and "integer" in allowed and value.is_integer():
        return str(int(value))
    return quoted(text)
