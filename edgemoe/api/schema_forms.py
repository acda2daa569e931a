"""Reads JSON Schemas as other languages and APIs write them.

Go writes null for an empty list, PHP an empty list for an empty object, Gemini's clients types in capitals.
Drafts before 4 had `required` as true or false.
"""

from __future__ import annotations

from typing import Any

import msgspec

TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
ANY_TYPE = ("any", "")
TYPES_OF_LANGUAGES = {  # that models' and programs' own words for types mean
    **dict.fromkeys(("int", "int32", "int64", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("str", "text"), "string"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "struct"), "object"),
    **dict.fromkeys(("none", "nil"), "null"),
}
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # values: {name: schema}
OF_SCHEMAS = (  # values: a schema, or a list of them
    *("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else"),
)
OF_VALUES = ("const", "default")  # null is a value there
MAX_DEPTH = 64  # beyond which a schema is left as it is, to be refused


def object_schema(given: Any) -> dict[str, Any] | None:
    """Returns the schema of a function's parameters.

    Raises ValueError for any other value than an object or its JSON text.
    """
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given) if given.strip() else None
        except (msgspec.MsgspecError, RecursionError):
            raise ValueError("Expected `object | null`, got `str` that is not JSON") from None
    if given in (None, []):
        return None
    if not isinstance(given, dict):
        kind = "array" if isinstance(given, list) else type(given).__name__
        raise ValueError(f"Expected `object | null`, got `{kind}`")
    return dict(usual_schema(given))


def usual_schema(schema: Any, depth: int = 0) -> Any:
    """Returns a schema as the standard writes it."""
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [usual_schema(one, depth + 1) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None and key not in OF_VALUES:
            continue
        if key in OF_NAMES:
            named = value if isinstance(value, dict) else {} if value == [] else None
            value = value if named is None else {name: usual_schema(one, depth + 1) for name, one in named.items()}
        elif key in OF_SCHEMAS:
            value = usual_schema(value, depth + 1)
        elif key == "type":
            value = _types(value)
        if value is not None and not (key == "required" and isinstance(value, bool)):
            found[key] = value
        elif key in OF_VALUES:
            found[key] = None
    return found


def _types(given: Any) -> Any:
    """Returns the type or types of a schema; None where any will do."""
    if isinstance(given, list):
        found = [_types(one) for one in given]
        return None if None in found else found
    if not isinstance(given, str) or given in TYPES:
        return given
    lower = TYPES_OF_LANGUAGES.get(given.lower(), given.lower())
    return None if lower in ANY_TYPE else lower if lower in TYPES else given
