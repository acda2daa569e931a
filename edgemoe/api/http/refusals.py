"""Writes errors in the form that clients of each API expect."""

from __future__ import annotations

from edgemoe.errors import RequestError
from edgemoe.types.arrays import Json

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
