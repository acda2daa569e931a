"""Every kind of tool, item, part and field of Responses and Messages is treated as in the tables of docs/api.md."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types.beta as beta
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_content_param import ResponseInputContentParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam

from edgemoe.api.endpoints import anthropic as messages
from edgemoe.api.endpoints import responses
from edgemoe.api.endpoints.chat_completions import offered_tools, render
from edgemoe.api.schema import Chat, convert, read
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest

PAGE = Path(__file__).parents[2] / "docs/api.md"
ROW = re.compile(r"^\| (Responses|Messages), (tool|item|part|block|field) \| (.*) \| (.*) \|$", re.M)
MARK = "cormorant"  # in each part; parts that are read or offered have it in the prompt
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": MARK}}}
USER = {"role": "user", "content": "hello"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}

# the fields of a part beside its type
OF_TOOLS: dict[str, Any] = {
    "function": {"name": "f", "parameters": SCHEMA},
    "custom": {"name": "f", "description": MARK, "input_schema": SCHEMA},
    "namespace": {"name": "crm", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    "tool_search of the client": {"execution": "client", "parameters": SCHEMA},
}
TEXT = {"text": MARK}
OF_ITEMS: dict[str, Any] = {
    "message": {"role": "user", "content": [{"type": "input_text", **TEXT}]},
    "agent_message": {"author": "/root", "recipient": "/a", "content": [{"type": "input_text", **TEXT}]},
    "function_call": {"call_id": "c", "name": MARK, "arguments": "{}"},
    "function_call_output": {"call_id": "c", "output": [{"type": "input_text", **TEXT}]},
    "custom_tool_call": {"call_id": "c", "name": "f", "input": MARK},
    "custom_tool_call_output": {"call_id": "c", "output": MARK},
    "local_shell_call": {"call_id": "c", "action": {"type": "exec", "command": [MARK]}},
    "shell_call": {"call_id": "c", "action": {"commands": [MARK]}},
    "apply_patch_call": {"call_id": "c", "operation": {"type": "delete_file", "path": MARK}},
    "mcp_call": {"id": "c", "name": "f", "server_label": "s", "arguments": "{}", "output": MARK},
    "tool_search_call": {"call_id": "c", "execution": "client", "arguments": {"query": MARK}},
    "tool_search_output": {"call_id": "c", "execution": "client", "tools": [{"type": "function", "name": MARK}]},
    "additional_tools": {"role": "developer", "tools": [{"type": "function", "name": MARK}]},
    "reasoning": {"summary": [], "content": [{"type": "reasoning_text", **TEXT}]},
}
OF_PARTS: dict[str, Any] = {
    "refusal": {"refusal": MARK},
    "thinking": {"thinking": MARK, "signature": ""},
    "tool_use": {"id": "c", "name": "f", "input": {"a": MARK}},
    "tool_result": {"tool_use_id": "c", "content": [{"type": "text", **TEXT}]},
    "search_result": {"title": "t", "source": "s", "content": [{"type": "text", **TEXT}]},
    "compaction": {"content": MARK},
    "document": {"source": {"type": "base64", "data": MARK}},
    "document of text": {"source": {"type": "text", "data": MARK}},
}
THINKS = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}


def listed() -> Iterator[Any]:
    """Yields the API, place, kind and effect of all that the page lists, and of an unknown kind for each place."""
    for api, place, kinds, effect in ROW.findall(PAGE.read_text()):
        for kind in re.findall(r"`([\w.]+)`", kinds):
            if kind in ("execution", "anthropic", "beta"):
                continue
            client = " of the client" if kind == "tool_search" and "execution" in kinds else ""
            yield api, place, kind + (" of text" if f"`{kind}` of text" in kinds else client), effect
        if "any other" in kinds:
            yield api, place, "surprise", effect


LISTED = list(listed())
EFFECTS = {(api, place, kind): effect for api, place, kind, effect in LISTED}


def leaves(kind: Any) -> Iterator[Any]:
    """Yields the types of a union."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Annotated:
        yield from leaves(arguments[0])
    elif typing.get_origin(kind) is typing.Union:
        for one in arguments:
            yield from leaves(one)
    else:
        yield kind


def types_of(union: Any) -> set[str]:
    """Returns the values of `type` that the official client declares for a union of parts."""
    found: set[str] = set()
    for one in leaves(union):
        found |= set(re.findall(r"'(\w+)'", str(typing.get_type_hints(one).get("type"))))
    return found


DECLARED = [
    *(("Responses", "tool", kind) for kind in types_of(ToolParam)),
    *(("Responses", "item", kind) for kind in types_of(ResponseInputItemParam)),
    *(("Responses", "part", kind) for kind in types_of(ResponseInputContentParam)),
    *(("Messages", "tool", kind) for kind in types_of(beta.BetaToolUnionParam)),
    *(
        ("Messages", "block", re.findall(r"\['(\w+)'\]", str(one.__annotations__["type"]))[0])
        for one in leaves(beta.BetaContentBlockParam)
        if one.__name__.endswith("Param")
    ),
    *(("Responses", "field", name) for name in ResponseCreateParamsBase.__annotations__),
    *(("Messages", "field", name) for name in MessageCreateParamsBase.__annotations__),
]
READ = {"Responses": responses.ResponsesBody, "Messages": messages.MessagesBody}


def effect_of(api: str, place: str, kind: str) -> str:
    """Returns the page's words on a kind: of its own row, else of the row for any other."""
    if place == "block" and kind.endswith("_tool_result"):
        kind = "web_search_tool_result"
    return EFFECTS.get((api, place, kind)) or EFFECTS[api, place, "surprise"]


def body_with(api: str, place: str, kind: str, earlier: bool) -> dict[str, Any]:
    """Makes a body with one part of the kind; an `earlier` one stands in a turn before the user's last."""
    name = kind.partition(" ")[0]
    part = {"type": name, "name": MARK, **TEXT, "content": MARK, "output": MARK}
    own: dict[str, Any] = {"input": [USER]} if api == "Responses" else {"messages": [USER], "max_tokens": 9}
    turns = own["input" if api == "Responses" else "messages"]
    match place:
        case "tool":
            own["tools"] = [{"type": name, **OF_TOOLS.get(kind, {"name": MARK})}]
        case "item":
            of_call = {"type": name, "call_id": "c", "output": MARK} if name.endswith("_output") else part
            behind = [{"role": "assistant", "content": "so"}] if kind == "reasoning" else []
            turns[:] = [CALLED, {"type": name, **OF_ITEMS.get(kind, of_call)}, *behind, USER]
        case "part" | "block":
            role = "assistant" if kind in ("thinking", "tool_use", "refusal") else "user"
            turns.insert(0, {"role": role, "content": [{"type": name, **OF_PARTS.get(kind, TEXT)}]})
            turns += [] if earlier or role == "assistant" else [turns.pop(0)]
        case "field":
            own[kind.partition(".")[0]] = own.get(kind, {kind.partition(".")[2]: "x"} if "." in kind else None)
    return own


def prompt_of(api: str, body: dict[str, Any], text_model: TextModel) -> str:
    chat: Chat
    chat, *_ = (responses if api == "Responses" else messages).as_chat(convert(body, READ[api]))
    tools, _ = offered_tools(chat)
    shown = "".join(str(one.reasoning_content or "") for one in chat.messages)  # which this template leaves out
    return render(chat, tools, text_model) + shown


@pytest.mark.parametrize(
    ("api", "place", "kind", "effect"),
    [
        *(one for one in LISTED if one[1] != "field"),
        *((*one, effect_of(*one)) for one in sorted(DECLARED) if one not in EFFECTS and one[1] != "field"),
    ],
)
@pytest.mark.parametrize("earlier", [True, False])
def test_parts_are_handled_as_documented(
    text_model: TextModel, api: str, place: str, kind: str, effect: str, earlier: bool
) -> None:
    body = body_with(api, place, kind, earlier)
    if effect.startswith("refused") and not (earlier and "elsewhere" in effect):
        with pytest.raises(InvalidRequest):
            prompt_of(api, body, text_model)
        return
    prompt = prompt_of(api, body, text_model)
    assert "hello" in prompt
    assert (MARK in prompt) == (effect.startswith(("offered", "read", "its functions are offered"))), prompt
    assert ("left out" in prompt) == ("elsewhere a note" in effect)
    if place == "tool" and effect.startswith("left out"):
        chosen = {"type": "tool", "name": MARK} if api == "Messages" else {"type": kind}
        with pytest.raises(InvalidRequest, match="tool_choice"):
            prompt_of(api, body | {"tool_choice": chosen}, text_model)


VALUES: tuple[Any, ...] = (None, True, "x", 1, {}, {"type": "x"}, [], ["x"])


UNREAD = {(api, kind) for api, place, kind, effect in LISTED if place == "field" and effect == "unread"}
UNREAD |= {  # fields of a client that is newer than the page are as any other
    (api, name)
    for api, place, name in DECLARED
    if place == "field" and name not in READ[api].__struct_fields__ and (api, place, name) not in EFFECTS
}


@pytest.mark.parametrize(("api", "kind"), sorted(UNREAD))
def test_an_unread_field_may_have_any_value(text_model: TextModel, api: str, kind: str) -> None:
    plain = prompt_of(api, body_with(api, "field", "surprise", True), text_model)
    name, _, within = kind.partition(".")
    for value in VALUES:
        body = body_with(api, "field", kind, True) | {name: {within: value} if within else value}
        assert prompt_of(api, body, text_model) == plain, value


@pytest.mark.parametrize("kind", THINKS)
def test_every_kind_of_thinking_is_read(kind: str) -> None:
    body = {"messages": [USER], "max_tokens": 9, "thinking": {"type": kind, "display": "omitted"}}
    chat, _ = messages.as_chat(read(json.dumps(body).encode(), messages.MessagesBody))
    assert chat.chat_template_kwargs == {"enable_thinking": THINKS[kind]}
    assert ("Messages", "field", kind) in EFFECTS
