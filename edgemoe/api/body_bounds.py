"""Counts the parts of a body in its JSON text, before anything is decoded: decoding holds the interpreter."""

from __future__ import annotations

import re
from collections.abc import Mapping

from edgemoe.errors import InvalidRequest

MAX_PARTS = 100_000  # lists, objects and fields of one body, ignored ones included
MAX_VALUES = 20_000  # objects, lists, texts, numbers of one schema, and names in it
WITH_SCHEMA = ("response_format", "structured_outputs", "json_schema", "guided_json", "format", "text", "output_config")
SLICE_BYTES = 128 << 10  # of a body that are looked at while other threads wait
_ESCAPE = re.compile(rb"\\*+.?", re.DOTALL)


def check_parts(body: bytes) -> None:
    """Raises InvalidRequest where a body has so many lists, objects and fields that reading it would hold up others."""
    if len(body) <= MAX_PARTS:
        return
    parts, begin, in_text = 0, 0, False
    while begin < len(body):
        end = begin + SLICE_BYTES
        if body[end - 1 : end] == b"\\" and (escape := _ESCAPE.match(body, end)):
            end = escape.end()
        between = body[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        rest = b"".join(between[in_text::2])
        parts += sum(map(rest.count, (b"[", b"{", b":")))
        if parts > MAX_PARTS:
            why = f"the body has more than {MAX_PARTS} lists, objects and fields"
            raise InvalidRequest(why, code="body_too_complex")
        begin, in_text = end, in_text != (len(between) % 2 == 0)


def check_values(fields: Mapping[str, bytes]) -> None:
    """Raises InvalidRequest for a format whose schema has too many values: decoding them would hold up others."""
    for name in WITH_SCHEMA:
        raw = fields.get(name, b"null")
        if len(raw) > MAX_VALUES and _count_values(raw) > MAX_VALUES:
            raise InvalidRequest(f"{name} has more than {MAX_VALUES} values", param=name, code="invalid_grammar")


def _count_values(raw: bytes) -> int:
    """Returns how many values a JSON text has: one for each comma, and one for each object or list with members."""
    rest = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    rest = rest.translate(None, b" \t\r\n")
    full = sum(map(rest.count, (b"{", b"["))) - rest.count(b"{}") - rest.count(b"[]")
    return 1 + rest.count(b",") + full
