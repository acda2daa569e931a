"""Prepares clients' JSON Schemas for llguidance: closes objects, and drops unknown annotations.

An object that lists `properties` takes no others, unless `additionalProperties` or `patternProperties` says so. Models
invent keys without end otherwise. Unknown formats are annotations [JSON-Schema, 7.2.3].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgemoe.api.dialects.argument_types import resolved
from edgemoe.api.schema_forms import TYPES

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # values: {name: schema}
OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
OF_ONE = ("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties")
ALTERNATIVES = ("anyOf", "oneOf")
IN_PLACE = (*ALTERNATIVES, "allOf", "$ref")
LOOSE = ("pattern", "patternProperties")  # regular expressions may be of a kind that llguidance lacks
COUNTS = ("minProperties", "maxProperties")
_DRAFT = re.compile(r"https?://json-schema\.org/")
MAX_PARTS = 256  # schemas that are looked at to collect the names of one object


def prepared(schema: Any, *, exact: bool = False, patterns: bool = True, any_types: bool = False) -> Any:
    """Returns a schema, which is within bounds, in the form to compile.

    Unless `exact`, counts of properties that llguidance cannot follow are left out, and patterns too where these are
    not wanted. With `any_types` a type of an unknown name allows any value.
    """
    return _Preparation(schema, exact, patterns, any_types).schema(schema, closes=True)


def has_patterns(schema: Any) -> bool:
    """Returns whether a schema, or a value within it, has a key that holds regular expressions."""
    if isinstance(schema, dict):
        return any(key in schema for key in LOOSE) or any(map(has_patterns, schema.values()))
    return isinstance(schema, list) and any(map(has_patterns, schema))


def _are_types(given: Any) -> bool:
    """Returns whether every type has a name of the standard."""
    return all(isinstance(one, str) and one in TYPES for one in (given if isinstance(given, list) else [given]))


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the schemas that apply to the same value, each list of alternatives as one."""
    every = schema.get("allOf")
    return [
        *(every if isinstance(every, list) else ()),
        *({key: schema[key]} for key in (*ALTERNATIVES, "$ref") if key in schema),
    ]


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Returns whether an object's properties are listed in several places."""
    return len(_parts(schema)) + ("properties" in schema) > 1


def _allow_null(schema: dict[str, Any]) -> None:
    """Adds null to the types and values of a schema."""
    declared, listed = schema.get("type"), schema.get("enum")
    if isinstance(declared, str | list):
        types = [declared] if isinstance(declared, str) else declared
        schema["type"] = types if "null" in types else [*types, "null"]
    if isinstance(listed, list) and None not in listed:
        schema["enum"] = [*listed, None]


class _Preparation:
    """Prepares the parts of one schema."""

    def __init__(self, root: Any, exact: bool, patterns: bool, any_types: bool) -> None:
        self._root, self._exact, self._patterns, self._any_types = root, exact, patterns, any_types
        self._combined_targets: set[int] = set()  # by id; open, because the object that combines them is closed
        self._find_combined(root)

    def schema(self, schema: Any, closes: bool) -> Any:
        """Returns one schema prepared. Unless it `closes`, the schema around it lists its names."""
        if not isinstance(schema, dict):
            return schema
        closes = closes and id(schema) not in self._combined_targets
        combined = _is_combined(schema)
        done = {key: self._member(key, value, closes and not combined) for key, value in schema.items()}
        self._drop(done)
        names = self._names(schema) if closes and (combined or "properties" in schema) else None
        if names is not None:
            done["properties"] = dict.fromkeys(names, True) | done.get("properties", {})
            done["additionalProperties"] = False
        return done

    def _member(self, key: str, value: Any, branch_closes: bool) -> Any:
        closes = branch_closes if key in IN_PLACE else True
        if key in OF_NAMES and isinstance(value, dict):
            return {name: self.schema(one, closes) for name, one in value.items()}
        if key in OF_LISTS and isinstance(value, list):
            return [self.schema(one, closes) for one in value]
        return self.schema(value, closes) if key in OF_ONE else value

    def _drop(self, schema: dict[str, Any]) -> None:
        schema.pop("x-guidance", None)
        if schema.get("nullable") is True:  # OpenAPI's
            _allow_null(schema)
        if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
            del schema["format"]
        if isinstance(schema.get("$schema"), str) and not _DRAFT.match(schema["$schema"]):
            del schema["$schema"]  # another dialect's name is an annotation
        if self._exact:
            return
        if self._any_types and "type" in schema and not _are_types(schema["type"]):
            del schema["type"]
        listed, needed = schema.get("properties"), schema.get("required")
        if isinstance(listed, dict) and not (isinstance(needed, list) and set(listed) <= set(map(str, needed))):
            for key in COUNTS:
                schema.pop(key, None)
        for key in () if self._patterns else LOOSE:
            schema.pop(key, None)

    def _names(self, schema: Mapping[str, Any]) -> list[str] | None:
        """Returns the names that an object may have; None where there may be others."""
        found: dict[str, None] = {}
        waiting: list[Any] = [schema]
        seen = 0
        while waiting:
            one, seen = waiting.pop(), seen + 1
            if not isinstance(one, Mapping):
                continue
            listed, needed = one.get("properties", {}), one.get("required")
            if seen > MAX_PARTS or "additionalProperties" in one or "patternProperties" in one:
                return None
            if not isinstance(listed, Mapping):
                return None  # llguidance refuses it
            found |= dict.fromkeys(listed)
            found |= dict.fromkeys(str(name) for name in needed) if isinstance(needed, list) else {}
            for key in ("allOf", *ALTERNATIVES):
                waiting += one[key] if isinstance(one.get(key), list) else []
            depending = one.get("dependentSchemas")
            waiting += [one.get("then"), one.get("else"), *(depending.values() if isinstance(depending, dict) else ())]
            if "$ref" in one:
                waiting.append(resolved({"$ref": one["$ref"]}, self._root) or {"additionalProperties": True})
        return list(found)

    def _find_combined(self, root: Any) -> None:
        """Notes the targets of references that stand beside other lists of properties."""
        waiting: list[tuple[Any, bool]] = [(root, False)]  # a schema, and whether it is a part of a combined one
        while waiting:
            one, combined = waiting.pop()
            if isinstance(one, list):
                waiting += [(each, combined) for each in one]
            if not isinstance(one, dict):
                continue
            inside = combined or _is_combined(one)
            if inside and isinstance(one.get("$ref"), str):
                self._mark(one)
            waiting += [(value, inside and key in IN_PLACE) for key, value in one.items()]

    def _mark(self, reference: Mapping[str, Any]) -> None:
        """Notes the target of a reference, and the targets of references in its place."""
        target: Any = self._root
        for key in filter(None, str(reference["$ref"]).removeprefix("#").split("/")):
            target = target.get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict) or id(target) in self._combined_targets or target is self._root:
            return
        self._combined_targets.add(id(target))
        waiting: list[Any] = [target]
        while waiting:
            one = waiting.pop()
            if isinstance(one, list):
                waiting += one
            elif isinstance(one, dict):
                if isinstance(one.get("$ref"), str):
                    self._mark(one)
                waiting += [one[key] for key in ("allOf", *ALTERNATIVES) if key in one]
