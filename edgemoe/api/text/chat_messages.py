"""Converts OpenAI's messages and tools to the form of chat templates: text as strings, arguments as objects.

Where the templates of a dialect differ from that, its `HistoryForm` says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from edgemoe.api.dialects.dialect import HistoryForm
from edgemoe.api.schema import Called, ChatMessage, ContentPart, Tool
from edgemoe.errors import InvalidRequest
from edgemoe.types.arrays import Json

AS_OPENAI = HistoryForm()
TEXT_PARTS = ("text", "input_text", "output_text")


def for_template(messages: Sequence[ChatMessage], history: HistoryForm = AS_OPENAI) -> list[Json]:
    """Returns the messages in the form of templates. Raises InvalidRequest for content that is not text."""
    converted = [_message(message, f"messages[{at}]", history) for at, message in enumerate(messages)]
    if history.one_call_a_message:
        converted = list(_one_call_each(converted))
    return list(_with_results(converted)) if history.results_in_call else converted


def tools_for_template(tools: Sequence[Tool], history: HistoryForm = AS_OPENAI) -> list[Json]:
    """Returns the tools in the form of templates. Raises InvalidRequest for a tool that is not a function."""
    for at, tool in enumerate(tools):
        if tool.type != "function":
            raise InvalidRequest(f"tools[{at}].type: only functions can be called", param=f"tools[{at}].type")
    converted = [dict(msgspec.to_builtins(tool)) for tool in tools]
    for one in converted if history.describes_tools else ():
        one["function"].setdefault("description", "")
    return converted


def _message(message: ChatMessage, where: str, history: HistoryForm) -> Json:
    role = "system" if message.role == "developer" else message.role
    value: Json = {"role": role, "content": _text(message.content, where)}
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        value[history.reasoning] = reasoning
    for field in ("name", "tool_call_id"):
        if (given := getattr(message, field)) is not None:
            value[field] = given
    if message.tool_calls:
        value["tool_calls"] = [_call(call, history.arguments_as_text) for call in message.tool_calls]
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


def _call(call: Called, as_text: bool) -> Json:
    arguments: Any = call.function.arguments
    if as_text:
        arguments = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    else:
        arguments = _decoded(arguments) if isinstance(arguments, str) else arguments or {}
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _decoded(text: str) -> Any:
    """Returns the JSON value in `text`, {} where it is empty, and `text` itself where it is no JSON."""
    try:
        return msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.MsgspecError, RecursionError):
        return text


def _one_call_each(messages: list[Json]) -> Iterator[Json]:
    """Yields the messages, with a message of its own for each call, which its result follows.

    Such templates have one place for what is said before a call: text goes there behind the reasoning.
    """
    moved: set[int] = set()
    for number, message in enumerate(messages, start=1):
        calls = message.get("tool_calls", ())
        following = takewhile(lambda one: one["role"] == "tool", messages[number:] if calls else ())
        results = {one.get("tool_call_id"): one for one in following}  # ids may begin anew with each turn
        if calls and message["content"] and message.get("thinking"):
            message |= {"thinking": f"{message['thinking']}\n\n{message['content']}", "content": ""}
        for at, call in enumerate(calls):
            yield {**(message if at == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]}
            if len(calls) > 1 and (result := results.get(call["id"])) is not None and id(result) not in moved:
                moved.add(id(result))
                yield result
        if not calls and id(message) not in moved:
            yield message


def _with_results(messages: list[Json]) -> Iterator[Json]:
    """Yields the messages, the results of tools within the message that called them."""
    caller: Json | None = None
    for message in messages:
        if message["role"] != "tool" or caller is None:
            caller = {**message} if message.get("tool_calls") else None
            yield caller or message
            continue
        called = {call["id"]: call["function"]["name"] for call in caller["tool_calls"]}
        name = called.get(message.get("tool_call_id")) or message.get("name") or "unknown"
        response = _decoded(message["content"]) if message["content"].strip() else ""
        given = response if isinstance(response, dict) else message["content"]
        caller.setdefault("tool_responses", []).append({"name": name, "response": given})
