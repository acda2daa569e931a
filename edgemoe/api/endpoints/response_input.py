"""Reads the input items of POST /v1/responses as the messages of a chat.

Items that only report actions of OpenAI's servers are left out. Calls that a client ran are kept, of any kind.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from edgemoe.api.custom_tools import CUSTOM_INPUT
from edgemoe.api.endpoints.content_parts import text_of_field, text_of_parts, text_of_result
from edgemoe.api.endpoints.response_tools import SEARCH, ToolOffer
from edgemoe.api.field_names import FieldNames
from edgemoe.errors import InvalidRequest
from edgemoe.types.json_object import Json

SEALED = "edgemoe:"  # begins an `encrypted_content` that this server has written: the reasoning in base64
RUN_BY_CLIENT = ("local_shell_call", "shell_call", "apply_patch_call", "mcp_call")
ABOUT_ITEM = frozenset({"type", "id", "call_id", "status", "caller", "output", "error", "approval_request_id"})
NEED_STORE = (
    "item_reference",
    "compaction_trigger",
)  # items for which this server has no store


def seal(reasoning: str) -> str:
    """Returns an `encrypted_content` that gives the reasoning back. It is readable: the client has the text anyway."""
    return SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(content: Any) -> str:
    """Returns the reasoning in an `encrypted_content`; "" where another server has written it."""
    if not isinstance(content, str) or not content.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""


class ItemReader:
    """Collects the messages of a list of input items, and the tools that items add to the offer."""

    def __init__(self, offer: ToolOffer, fields: FieldNames) -> None:
        self.messages: list[Json] = []
        self._offer = offer
        self._fields = fields
        self._reasoning = ""  # of the assistant's message that follows

    def read(self, items: Sequence[Json]) -> None:
        """Reads all items. Raises InvalidRequest with the path of an item that this server cannot honour."""
        users = (at for at, item in enumerate(items) if item.get("role") == "user" and _kind(item) == "message")
        latest = max(users, default=-1)
        for at, item in enumerate(items):
            self._item(item, f"input[{at}]", at == latest)
            self._fields.messages += [f"input[{at}]"] * (len(self.messages) - len(self._fields.messages))

    def _item(self, item: Json, where: str, latest: bool) -> None:
        match _kind(item):
            case "message":
                content = _content(item.get("content"), f"{where}.content" if latest else "")
                self._add({"role": item.get("role"), "content": content})
            case "agent_message":
                text = text_of_field(item, "content")
                if text:
                    self._add({"role": "user", "content": f"Message from {item.get('author') or 'an agent'}:\n{text}"})
            case "function_call":
                name = self._offer.name(item.get("name"), item.get("namespace"))
                self._call(item, name, item.get("arguments"))
            case "custom_tool_call":
                name = self._offer.name(item.get("name"), item.get("namespace"))
                self._call(item, name, {CUSTOM_INPUT: item.get("input")})
            case "tool_search_call" if item.get("execution") == "client":
                self._call(item, self._offer.name(SEARCH), item.get("arguments"))
            case "tool_search_output" if item.get("execution") == "client":
                self._add_tools(item, where)
                self._result(item, self._found(item))
            case "additional_tools":
                self._add_tools(item, where)
            case kind if kind in RUN_BY_CLIENT:
                arguments = {key: value for key, value in item.items() if key not in ABOUT_ITEM}
                self._call(item, kind.removesuffix("_call"), arguments)
                if kind == "mcp_call":
                    self._result(item, item.get("error") or item.get("output"))
            case kind if kind.removesuffix("_output") in (*RUN_BY_CLIENT, "function_call", "custom_tool_call"):
                self._result(item, item.get("output"))
            case "reasoning":
                content, sealed = text_of_field(item, "content"), unseal(item.get("encrypted_content"))
                self._reasoning += content or sealed or text_of_field(item, "summary")
            case kind if kind in NEED_STORE:
                raise InvalidRequest(f"{where}: nothing is stored here for {kind!r}", param=f"{where}.type")

    def _add(self, message: Json) -> None:
        self.messages.append(message)
        if self._reasoning and message["role"] == "assistant":
            message["reasoning_content"] = self._reasoning
        self._reasoning = ""

    def _call(self, item: Json, name: Any, arguments: Any) -> None:
        if self._reasoning or not (self.messages and self.messages[-1]["role"] == "assistant"):
            self._add({"role": "assistant", "content": None})
        call = {"id": item.get("call_id") or item.get("id"), "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _result(self, item: Json, output: Any) -> None:
        id = item.get("call_id") or item.get("id")
        self.messages.append({"role": "tool", "tool_call_id": id, "content": text_of_result(output)})

    def _add_tools(self, item: Json, where: str) -> None:
        if isinstance(tools := item.get("tools"), list):
            self._offer.add(tools, f"{where}.tools")

    def _found(self, item: Json) -> str:
        tools = [tool for tool in item.get("tools") or () if isinstance(tool, dict)]
        names: list[Any] = []
        for tool in tools:
            inner = tool.get("tools") if tool.get("type") == "namespace" else None
            names += [
                self._offer.name(one.get("name"), tool.get("name")) for one in inner or () if isinstance(one, dict)
            ]
            names += [] if isinstance(inner, list) else [self._offer.name(tool.get("name"))]
        return msgspec.json.encode({"tools": names}).decode()


def _kind(item: Json) -> str:
    return str(item.get("type") or "message")


def _content(content: Any, refused_at: str) -> Any:
    """Returns a message's content as text. Content that is no list is left to the check of the message."""
    return text_of_parts(content, refused_at, refused_at) if isinstance(content, list) else content
