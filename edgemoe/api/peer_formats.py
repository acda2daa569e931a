"""Reads formats of answers by other servers' names: schemas, regular expressions, choices and grammars."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from edgemoe.errors import InvalidRequest

Fields = dict[str, bytes]  # a body's fields, as JSON
NULL = b"null"
MAX_SMALL_BYTES = 4096  # of a value that is looked at twice


def decoded(raw: bytes) -> Any:
    """Returns a value; None for one that is long, so that a list of a million is not read twice."""
    return msgspec.json.decode(raw) if len(raw) <= MAX_SMALL_BYTES else None


def encoded(value: Any) -> bytes:
    """Returns a value as JSON."""
    return msgspec.json.encode(value)


def _schema(value: Any) -> Any:
    """Returns a format of a schema, which may be JSON text."""
    if isinstance(value, str):
        with suppress(msgspec.MsgspecError):
            value = msgspec.json.decode(value)
    if not isinstance(value, dict | bool):
        raise ValueError("is no JSON Schema")
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _one_of(value: Any) -> Any:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError("is no list of texts")
    return {"type": "choice", "choice": value}


def _text_of(kind: str) -> Callable[[Any], Any]:
    def form(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError("is no text")
        return {"type": kind, kind: value}

    return form


def _ollamas(value: Any) -> Any:
    return {"type": "json_object"} if value == "json" else _schema(value)


FORMATS: dict[str, Callable[[Any], Any]] = {
    "guided_json": _schema,
    "json_schema": _schema,
    "guided_regex": _text_of("regex"),
    "regex": _text_of("regex"),
    "guided_choice": _one_of,
    "guided_grammar": _text_of("grammar"),
    "grammar": _text_of("grammar"),
    "grammar_string": _text_of("grammar"),
    "ebnf": _text_of("grammar"),
    "format": _ollamas,
}
STRUCTURED_OUTPUTS: dict[str, Callable[[Any], Any]] = {  # vLLM's object of one of these
    "json": _schema,
    "regex": _text_of("regex"),
    "choice": _one_of,
    "grammar": _text_of("grammar"),
    "json_object": lambda _: {"type": "json_object"},
}
WITHOUT_FORMAT = (b"null", b'""', b"false")


def read_format(fields: Fields, own: frozenset[str]) -> str:
    """Writes the format that the client names otherwise to `response_format`. Returns that name; "" for none.

    Raises InvalidRequest.
    """
    asked = {
        name: (fields[name], form)
        for name, form in FORMATS.items()
        if name not in own and fields.get(name, NULL) not in WITHOUT_FORMAT
    }
    if "structured_outputs" in fields and "structured_outputs" not in own:
        asked |= _structured_outputs(fields["structured_outputs"])
    if not asked:
        return ""
    name, *others = asked
    if not _is_free(fields.get("response_format", NULL)):
        others.append("response_format")
    if others:
        raise InvalidRequest(f"{name} and {others[0]} each ask for a format; give one", param=name)
    raw, form = asked[name]
    try:
        fields["response_format"] = encoded(form(msgspec.json.decode(raw)))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: {error}", param=name, code="invalid_type") from None
    return name


def _structured_outputs(raw: bytes) -> dict[str, tuple[bytes, Callable[[Any], Any]]]:
    try:
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None) or {}
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"structured_outputs: {error}", param="structured_outputs", code="invalid_type") from None
    given = {key: bytes(value) for key, value in members.items() if bytes(value) not in WITHOUT_FORMAT}
    if "structural_tag" in given:
        message = "structured_outputs.structural_tag is not supported by this server; leave it out"
        raise InvalidRequest(message, param="structured_outputs", code="unsupported_parameter")
    return {f"structured_outputs.{key}": (given[key], form) for key, form in STRUCTURED_OUTPUTS.items() if key in given}


def _is_free(raw: bytes) -> bool:
    """Returns whether a `response_format` asks for no format."""
    form = decoded(raw)
    return len(raw) <= MAX_SMALL_BYTES and (form is None or (isinstance(form, dict) and form.get("type") == "text"))
