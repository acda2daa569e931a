"""Converts bodies of POST /v1/responses to a Chat: one turn, nothing stored.

Nothing is kept between calls (`store` is always false), so that fields that refer to an earlier response are refused.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgemoe.api import schema
from edgemoe.api.schema import Chat, Origin, convert
from edgemoe.errors import InvalidRequest
from edgemoe.types.arrays import Json

NEEDS_STORE = ("previous_response_id", "conversation", "prompt")
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    regex: str | None = None


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None


class ResponsesBody(schema.RequestBody, frozen=True, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: schema.Limit | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None


def as_chat(body: ResponsesBody) -> tuple[Chat, Origin]:
    """Returns the equivalent chat request, and the origin of its fields. Raises InvalidRequest."""
    for field in NEEDS_STORE:
        if getattr(body, field) is not None:
            raise InvalidRequest(f"{field}: nothing is stored here; send the whole input", param=field)
    if body.background:
        raise InvalidRequest("background: nothing is stored here; ask for a stream", param="background")
    origin = Origin(FIELDS)
    messages = _messages(body.input, origin)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
        origin.messages.insert(0, "instructions")
    common = {field: getattr(body, field) for field in schema.RequestBody.__struct_fields__}
    chat = {
        **common,
        "n": 1,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool, at) for at, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    with origin.named():
        return convert(chat, Chat), origin


def _messages(given: str | list[dict[str, Any]], origin: Origin) -> list[Json]:
    if isinstance(given, str):
        origin.messages.append("input")
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    reasoning = ""  # of the assistant's message that follows
    for at, item in enumerate(given):
        origin.messages += [f"input[{at - 1}]"] * (len(messages) - len(origin.messages))
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
                reasoning = _with_reasoning(messages[-1], reasoning)
            case "function_call":
                call = {"id": item.get("call_id"), "function": {k: item.get(k) for k in ("name", "arguments")}}
                if reasoning or not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": None})
                    reasoning = _with_reasoning(messages[-1], reasoning)
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item.get("output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                reasoning += _reasoning(item)
            case other:
                raise InvalidRequest(f"input[{at}]: a {other!r} item cannot be read here", param=f"input[{at}].type")
    origin.messages += [f"input[{len(given) - 1}]"] * (len(messages) - len(origin.messages))
    return messages


def _reasoning(item: dict[str, Any]) -> str:
    parts = item.get("content")
    texts = (part.get("text") for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
    return "".join(text for text in texts if isinstance(text, str))


def _with_reasoning(message: Json, reasoning: str) -> str:
    """Adds the reasoning to a message of the assistant's. Returns what is left for the next one: nothing."""
    if reasoning and message["role"] == "assistant":
        message["reasoning_content"] = reasoning
    return ""


def _tool(tool: dict[str, Any], at: int) -> Json:
    if tool.get("type") != "function":
        raise InvalidRequest(f"tools[{at}]: only tools of type function can be called", param=f"tools[{at}].type")
    return {"function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice: only functions can be chosen", param="tool_choice")
    return {"function": {"name": choice.get("name")}}


def _response_format(form: TextFormat | None) -> Json | None:
    if form is None:
        return None
    wrapped = {"name": form.name, "schema": form.schema, "strict": form.strict}
    return {"type": form.type, "json_schema": wrapped, "regex": form.regex}


def new_id(kind: str) -> str:
    """Returns a new random id in OpenAI's form."""
    return f"{kind}_{secrets.token_hex(12)}"
