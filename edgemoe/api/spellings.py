"""Reads values as clients spell them: numbers, true and false as texts, whole numbers as floats, empty ones as absent.

docs/api.md lists the spellings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from edgemoe.api.peer_formats import NULL, Fields, encoded


def read_spellings(fields: Fields, kind: type[msgspec.Struct]) -> None:
    """Replaces the values of a body for a `kind` by the ones that they spell."""
    for name, empty in empty_values(kind).items():
        if fields.get(name) in empty:
            fields[name] = NULL
    for name in scalar_fields(kind) & fields.keys():
        fields[name] = bare_scalar(fields[name])
    for name in truth_fields(kind) & fields.keys():
        fields[name] = bare_truth(fields[name])
    for name in whole_fields(kind) & fields.keys():
        fields[name] = _whole(fields[name])


TEXT, LIST, OBJECT = b'""', b"[]", b"{}"


@cache
def empty_values(kind: type[msgspec.Struct]) -> Mapping[str, frozenset[bytes]]:
    """Returns the empty values that mean an absent field, for each field of a kind of body that may be absent.

    Forms send an empty text for a field that is not filled in. PHP and Lua have one empty table for lists and objects.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {name: frozenset(_meaningless(hints[name])) for name in _fields_of(kind, _may_be_absent)}


def _may_be_absent(described: inspect.Type) -> bool:
    types = described.types if isinstance(described, inspect.UnionType) else ()
    return any(isinstance(one, inspect.NoneType) for one in types)


def _meaningless(hint: Any) -> Iterator[bytes]:
    """Yields the empty values that a field of this type cannot have."""
    has_text, has_list, has_object = (_is_of(hint, raw) for raw in (TEXT, LIST, OBJECT))
    if not has_text:
        yield TEXT
    if has_list != has_object:
        yield LIST if has_object else OBJECT


def _is_of(hint: Any, raw: bytes) -> bool:
    """Returns whether a type has values of this one's JSON type, even if not this one."""
    try:
        msgspec.json.decode(raw, type=hint)
    except msgspec.ValidationError as error:
        return ", got `" not in str(error)
    return True


@cache
def whole_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the fields of a kind of body that hold whole numbers, or lists of them."""
    return _fields_of(kind, _is_whole)


def _fields_of(kind: type[msgspec.Struct], is_wanted: Callable[[inspect.Type], bool]) -> frozenset[str]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return frozenset(field.name for field in described.fields if is_wanted(field.type))


def _is_whole(described: inspect.Type) -> bool:
    if isinstance(described, inspect.UnionType):
        return any(map(_is_whole, described.types)) and not any(
            isinstance(one, inspect.FloatType) for one in described.types
        )
    if isinstance(described, inspect.ListType):
        return _is_whole(described.item_type)
    return isinstance(described, inspect.IntType)


def _whole(raw: bytes) -> bytes:
    """Returns a number, or lists of numbers, with floats such as 6.0 as whole numbers."""
    if raw[:1] == b'"' or not any(mark in raw for mark in (b".", b"e", b"E")):
        return raw
    return encoded(_without_floats(msgspec.json.decode(raw)))


def _without_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_floats(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def scalar_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the fields of a kind of body that hold one number, or true or false."""
    return _fields_of(kind, _is_scalar)


@cache
def truth_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the fields of a kind of body that hold true or false."""
    return _fields_of(kind, partial(_is_scalar, kinds=inspect.BoolType))


def _is_scalar(described: inspect.Type, kinds: Any = inspect.IntType | inspect.FloatType | inspect.BoolType) -> bool:
    if isinstance(described, inspect.UnionType):
        return all(isinstance(one, inspect.NoneType) or _is_scalar(one, kinds) for one in described.types)
    return isinstance(described, kinds)


def bare_scalar(raw: bytes) -> bytes:
    """Returns a value without the quotes that some clients put around numbers, true and false."""
    bare = raw[1:-1].lower() if raw[:1] == b'"' and len(raw) <= MAX_SCALAR_BYTES else b""
    return bare if SCALAR.fullmatch(bare) else raw


def bare_truth(raw: bytes) -> bytes:
    """Returns true or false for the words that other servers read so, and any other value as it is."""
    word = (raw[1:-1] if raw[:1] == b'"' else raw)[:MAX_SCALAR_BYTES].decode(errors="replace").lower()
    return b"true" if word in TRUE else b"false" if word in FALSE else raw


TRUE, FALSE = ("1", "1.0", "t", "y", "on", "yes", "true"), ("0", "0.0", "f", "n", "off", "no", "false")  # pydantic's
MAX_SCALAR_BYTES = 32
SCALAR = re.compile(rb"-?(?:0|[1-9]\d*)(?:\.\d+)?|true|false")
