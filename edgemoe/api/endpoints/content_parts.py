"""Reads content parts of OpenAI's Responses and Anthropic's Messages as text.

A part that the model cannot read is refused in the user's last turn. Elsewhere a note replaces it, so that a
conversation with a screenshot goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgemoe.errors import InvalidRequest
from edgemoe.types.json_object import Json

# kind of part -> the field that has its text
TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
# parts that only their own server can read, or that report its actions
FOREIGN = frozenset(
    {
        "encrypted_content",
        "redacted_thinking",
        "fallback",
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_listing",
        "tool_addition",
        "tool_removal",
        "tool_reference",
    }
)


def text_of_parts(parts: Sequence[Any], refused_at: str = "", param: str = "") -> str:
    """Returns the text of content parts, with notes for parts that the model cannot read.

    Raises InvalidRequest for these if `refused_at` is given, their path in the client's body.
    """
    return "".join(
        text_of_part(part, refused_at and f"{refused_at}[{at}]", param or refused_at) for at, part in enumerate(parts)
    )


def text_of_part(part: Any, refused_at: str = "", param: str = "") -> str:
    """Returns the text of one part, as text_of_parts does."""
    text = _readable(part)
    if text is not None:
        return text
    kind = (str(part.get("type")) if isinstance(part, dict) else type(part).__name__)[:40]
    if refused_at:
        message = f"{refused_at}: this model reads text only, not {kind!r}"
        raise InvalidRequest(message, param=param or refused_at, code="invalid_value")
    return f"[{kind.removeprefix('input_')} left out: this model reads text only]"


def _readable(part: Any) -> str | None:
    """Returns the text of one part, "" where it is another server's, None where the model cannot read it."""
    if not isinstance(part, dict):
        return part if isinstance(part, str) else None
    kind = str(part.get("type", "text"))
    if kind in TEXT_FIELDS:
        text = part.get(TEXT_FIELDS[kind])
        return text if isinstance(text, str) else ""
    if kind in FOREIGN or kind.endswith("_tool_result"):
        return ""
    source = part.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        return _within(source.get("data") or source.get("content"))
    return _within(part.get("content")) if kind in ("search_result", "compaction") else None


def _within(content: Any) -> str:
    """Returns the text within a part: a string, or parts that are text themselves."""
    texts = content if isinstance(content, list) else [content]
    found = (part.get("text") if isinstance(part, dict) else part for part in texts)
    return "".join(text for text in found if isinstance(text, str))


def text_of_result(output: Any) -> str:
    """Returns the output of a tool as text: a string, content parts, or any other JSON value."""
    if output is None or isinstance(output, str):
        return output or ""
    if isinstance(output, list):
        return "\n".join(filter(None, map(text_of_part, output)))
    if isinstance(output, dict) and isinstance(output.get("content"), str):
        return str(output["content"])
    return msgspec.json.encode(output).decode()


def text_of_field(value: Json, field: str) -> str:
    """Returns the text of the content parts in a field, "" where there are none."""
    parts = value.get(field)
    return text_of_parts(parts) if isinstance(parts, list) else ""
