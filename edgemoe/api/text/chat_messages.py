"""Converts OpenAI's messages and tools to the form of chat templates: text as strings, arguments as objects."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from edgemoe.api.schema import Called, ChatMessage, ContentPart, Tool
from edgemoe.errors import InvalidRequest
from edgemoe.types.arrays import Json

TEXT_PARTS = ("text", "input_text", "output_text")


def for_template(messages: Sequence[ChatMessage]) -> list[Json]:
    """Returns the messages in the form of templates. Raises InvalidRequest for content that is not text."""
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def tools_for_template(tools: Sequence[Tool]) -> list[Json]:
    """Returns the tools in the form of templates. Raises InvalidRequest for a tool that is not a function."""
    for at, tool in enumerate(tools):
        if tool.type != "function":
            raise InvalidRequest(f"tools[{at}].type: only functions can be called", param=f"tools[{at}].type")
    return [dict(msgspec.to_builtins(tool)) for tool in tools]


def _message(message: ChatMessage, where: str) -> Json:
    role = "system" if message.role == "developer" else message.role
    value: Json = {"role": role, "content": _text(message.content, where)}
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        value["reasoning_content"] = reasoning
    for field in ("name", "tool_call_id"):
        if (given := getattr(message, field)) is not None:
            value[field] = given
    if message.tool_calls:
        value["tool_calls"] = [_call(call) for call in message.tool_calls]
    return value


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for at, part in enumerate(content):
        if part.type not in TEXT_PARTS or part.text is None:
            raise InvalidRequest(
                f"{where}.content[{at}]: this model reads text only, not {part.type!r}", param=f"{where}.content"
            )
    return "".join(part.text or "" for part in content)


def _call(call: Called) -> Json:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # no JSON: the template gets it as it is
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
    function = {"name": call.function.name, "arguments": arguments if arguments is not None else {}}
    return {"id": call.id, "type": "function", "function": function}
