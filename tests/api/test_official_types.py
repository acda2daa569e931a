"""Answers and events have every field that the types of OpenAI's and Anthropic's libraries require."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion as CompletionType
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from edgemoe.api.endpoints.anthropic import MessagesBody
from edgemoe.api.llama_bodies import LlamaCompletion, LooseChat
from edgemoe.api.schema import Chat, read
from edgemoe.errors import InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
WHOLE: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletion),
    TEXT: TypeAdapter(CompletionType),
    RESPONSES: TypeAdapter(Response),
    MESSAGES: TypeAdapter(Message),
}
EVENT: dict[str, TypeAdapter[Any]] = {  # not completions: their type has no null as finish_reason, which OpenAI sends
    CHAT: TypeAdapter(ChatCompletionChunk),
    RESPONSES: TypeAdapter(ResponseStreamEvent),
    MESSAGES: TypeAdapter(RawMessageStreamEvent),
}
TAKES = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
OFFERED: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {"name": "f", "parameters": TAKES}}],
    RESPONSES: [{"type": "function", "name": "f"}, {"type": "function", "function": {"name": "g"}}],
    MESSAGES: [{"name": "f", "input_schema": TAKES}],
}
FORMAT: dict[str, Any] = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": TAKES}}},
    TEXT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": TAKES}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": TAKES}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": TAKES}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "X"}}\n</tool_call>'
SAID = {
    "text": "one two",
    "reasoning": "<think>Q</think>so",
    "call": f"<think>hm</think>I call{CALL}",
    "format": '{"a":"7"}',
    "cut": "a text that is longer than its limit",
    "logprobs": "one",
}


def asked(path: str, kind: str) -> dict[str, Any]:
    """Returns a request whose answer is of the kind."""
    said = f"SAY{{{SAID[kind]}}}END"
    body: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": said}]},
        TEXT: {"prompt": said},
        RESPONSES: {"input": said},
        MESSAGES: {"messages": [{"role": "user", "content": said}]},
    }[path]
    most = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}[path]
    body[most] = 3 if kind == "cut" else 200
    if kind == "reasoning" and path == MESSAGES:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if kind == "call" and path in OFFERED:
        body["tools"] = OFFERED[path]
    if kind == "format":
        body |= FORMAT[path]
    if kind == "logprobs" and path != MESSAGES:
        body |= {"logprobs": 2} if path == TEXT else {"logprobs": True, "top_logprobs": 2}
    return body


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("path", WHOLE)
async def test_an_answer_is_of_the_official_type(http: httpx.AsyncClient, path: str, kind: str) -> None:
    answer = await http.post(path, json=asked(path, kind))
    assert answer.status_code == 200, answer.text
    WHOLE[path].validate_python(answer.json())


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("path", EVENT)
async def test_every_event_is_of_the_official_type(http: httpx.AsyncClient, path: str, kind: str) -> None:
    options = {"stream_options": {"include_usage": True}} if path == CHAT else {}
    answer = await http.post(path, json=asked(path, kind) | {"stream": True, **options})
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len(events) > 2
    for event in events:
        EVENT[path].validate_json(event)


async def test_a_response_repeats_its_format_and_functions(http: httpx.AsyncClient) -> None:
    body = asked(RESPONSES, "format") | {"tools": OFFERED[RESPONSES], "tool_choice": "none"}
    told = (await http.post(RESPONSES, json=body)).json()
    assert told["text"] == {"format": {"type": "json_schema", "name": "x", "schema": TAKES, "strict": None}}
    assert [tool["name"] for tool in told["tools"]] == ["f", "g"]
    assert all({"description", "parameters", "strict"} <= tool.keys() for tool in told["tools"])


# --- custom tools in a chat ----------------------------------------------------------------------------------------

CUSTOM = {"type": "custom", "custom": {"name": "sh", "description": "A shell"}}
SHELL = 'SAY{<tool_call>\n{"name": "sh", "arguments": {"input": "ls\\n\\"x\\""}}\n</tool_call>}END'


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "custom": {"name": "sh"}}], ids=str)
@pytest.mark.parametrize("tool", [CUSTOM, {"type": "custom", "name": "sh"}], ids=str)
async def test_a_custom_tool_of_a_chat_is_called_with_plain_text(
    http: httpx.AsyncClient, tool: dict[str, Any], choice: Any
) -> None:
    body = {"messages": [{"role": "user", "content": SHELL}], "tools": [*OFFERED[CHAT], tool], "tool_choice": choice}
    (call,) = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "sh", "input": 'ls\n"x"'})
    text = (await http.post(CHAT, json=body | {"stream": True})).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.splitlines() if line.startswith("data: {")]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert (parts[0]["type"], parts[0]["custom"]["name"]) == ("custom", "sh")
    assert all("function" not in part for part in parts)
    assert "".join(part["custom"]["input"] for part in parts) == 'ls\n"x"'


# --- Anthropic's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_of_a_message_compute_the_prompt_alone(http: httpx.AsyncClient, stream: bool) -> None:
    body = asked(MESSAGES, "text") | {"max_tokens": 0, "stream": stream}
    text = (await http.post(MESSAGES, json=body)).text
    assert '"stop_reason":"max_tokens"' in text
    assert '"output_tokens":0' in text
    assert "one" not in text
    if not stream:
        assert json.loads(text)["content"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("display", "shown"), [("omitted", False), ("summarized", True), (None, True)])
async def test_thinking_is_shown_unless_it_shall_be_omitted(
    http: httpx.AsyncClient, display: str | None, shown: bool, stream: bool
) -> None:
    thinking = {"type": "adaptive", "display": display}
    body = asked(MESSAGES, "reasoning") | {"thinking": thinking, "stream": stream}
    text = (await http.post(MESSAGES, json=body)).text
    assert ("Q" in text) == shown
    assert '"type":"thinking"' in text, "the block comes in either way"
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    blocks = [part.get("delta", {}) for part in parts] if stream else json.loads(text)["content"]
    assert "".join(block.get("text", "") for block in blocks) == "so"


# --- numbers of llama.cpp and Ollama -------------------------------------------------------------------------------

LOOSE = [
    ({"temperature": 3.5}, "temperature", 3.5),
    ({"temperature": -1}, "temperature", 0.0),
    ({"top_p": 1.5}, "top_p", 1.0),
    ({"top_p": -1}, "top_p", 0.0),
    ({"min_p": -0.5}, "min_p", 0.0),
    ({"repeat_penalty": 0}, "repetition_penalty", 1.0),
    ({"repeat_penalty": -2}, "repetition_penalty", 1.0),
    ({"repeat_penalty": 500}, "repetition_penalty", 100.0),
]


@pytest.mark.parametrize(("more", "field", "value"), LOOSE, ids=str)
async def test_numbers_that_only_openai_refuses_are_read_in_the_apis_that_take_them(
    http: httpx.AsyncClient, more: dict[str, Any], field: str, value: float
) -> None:
    said = {"messages": [{"role": "user", "content": "SAY{x}END"}]}
    for kind, rest in ((LooseChat, said), (LlamaCompletion, {"prompt": "SAY{x}END"})):
        assert getattr(read(json.dumps(rest | more).encode(), kind), field) == value
    with pytest.raises(InvalidRequest):
        read(json.dumps(said | more).encode(), Chat)
    for path, body in (
        ("/api/chat", {"model": "tiny", **said, "options": more}),
        ("/api/generate", {"model": "tiny", "prompt": "SAY{x}END", "options": more}),
        ("/api/generate", {"model": "tiny", "prompt": "SAY{x}END", "raw": True, "options": more}),
        ("/completion", {"prompt": "SAY{x}END", **more}),
    ):
        answer = await http.post(path, json=body | {"stream": False})
        assert answer.status_code == 200, answer.text


async def test_a_bias_may_be_text_as_other_numbers_may() -> None:
    said = {"messages": [{"role": "user", "content": "x"}]}
    assert read(json.dumps({**said, "logit_bias": {"65": "-2.5"}}).encode(), Chat).logit_bias == {65: -2.5}
    for kind, wrong in ((Chat, {**said, "logit_bias": {"65": "much"}}), (MessagesBody, {**said, "max_tokens": -3})):
        with pytest.raises(InvalidRequest):
            read(json.dumps(wrong).encode(), kind)
