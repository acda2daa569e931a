"""Writes error objects in each API's form, server-sent events, and lines of JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from edgemoe.errors import RequestError
from edgemoe.types.json_object import Json

DONE = b"data: [DONE]\n\n"
# line ends to clients that split a stream as Python splits a text; JSON may hold them within strings only
LINE_ENDS = tuple((mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029")
_encode = msgspec.json.Encoder().encode
ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: RequestError) -> Json:
    """Returns OpenAI's error object."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_error(error: RequestError) -> Json:
    """Returns Anthropic's error object, with the field at fault in its message."""
    message = str(error) if not error.param or error.param in str(error) else f"{error.param}: {error}"
    kind = ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_error(error: RequestError) -> Json:
    """Returns Ollama's error object, which is a message alone."""
    return {"error": str(error)}


def event(value: Any, name: str = "") -> bytes:
    """Returns one server-sent event with `value` as JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", _on_one_line(value), b"\n\n"))


def json_line(value: Any) -> bytes:
    """Returns `value` as a line of a stream of JSON objects."""
    return _on_one_line(value) + b"\n"


def _on_one_line(value: Any) -> bytes:
    body = _encode(value)
    for mark, escaped in LINE_ENDS:
        body = body.replace(mark, escaped)
    return body
