"""Makes a dialect of the response template that a tokenizer ships, where its marks are plain texts [Response-Template].

Of such a template the fields `reasoning_content` (or `thinking`) and `tool_calls` are read, the latter where a call is
one JSON object between two marks.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from edgemoe.api.dialects.call_forms import ObjectCall
from edgemoe.api.dialects.dialect import Dialect
from edgemoe.types.arrays import Json

MAX_MARK = 64  # characters
WHOLE = "{content}"
PART = re.compile(r"\{content\.(\w{1,64})\}")


class ResponseField(msgspec.Struct, frozen=True):
    """A field of a response template. What is not read here is left out."""

    open: Any = None
    close: Any = None
    content: Any = "text"
    transform: Any = None


class ResponseTemplate(msgspec.Struct, frozen=True):
    """The fields of an answer."""

    fields: dict[str, ResponseField] = {}


def dialect_from(template: Json, otherwise: Dialect) -> Dialect:
    """Returns the dialect of a response template, with the marks of `otherwise` where it has none that can be read."""
    try:
        fields = msgspec.convert(template, ResponseTemplate).fields
    except msgspec.ValidationError:
        return otherwise
    think = _marks(fields.get("reasoning_content") or fields.get("thinking")) or otherwise.think
    called = fields.get("tool_calls")
    call = _call(called) if called is not None else None
    return Dialect("response-template", signs=(), call=call or otherwise.call, think=think)


def _marks(field: ResponseField | None) -> tuple[str, str] | None:
    texts = (field.open, field.close) if field is not None else ()
    if not texts or not all(isinstance(one, str) and 0 < len(one) <= MAX_MARK for one in texts):
        return None
    return str(texts[0]), str(texts[1])


def _call(field: ResponseField) -> ObjectCall | None:
    marks = _marks(field)
    if marks is None or field.content != "json":
        return None
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if function == WHOLE:
        return ObjectCall(*marks)
    if not isinstance(function, dict):
        return None
    keys = [PART.fullmatch(str(function.get(key))) for key in ("name", "arguments")]
    if keys[0] is None or keys[1] is None:
        return None
    return ObjectCall(*marks, name=keys[0][1], arguments=(keys[1][1],))
