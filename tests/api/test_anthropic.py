"""/v1/messages, with the real anthropic client over the socket."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
import pytest_asyncio

from edgemoe.api.dialects.tool_calls import OutputPiece, ToolCall
from edgemoe.api.endpoints.anthropic import MessagesBody, _tool_use, as_chat
from edgemoe.api.schema import convert, read
from edgemoe.config.settings import Settings
from edgemoe.errors import EngineUnavailable
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER: Any = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
PATH = "/v1/messages"


def anthropic_client(settings: Settings) -> anthropic.AsyncAnthropic:
    transport = httpx2.AsyncHTTPTransport(uds=settings.api.socket, verify=False)
    http_client = httpx2.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=120.0)
    return anthropic.AsyncAnthropic(base_url="http://edgemoe", api_key="none", max_retries=0, http_client=http_client)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def claude(front: Front) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(front.settings) as client:
        yield client


@pytest.mark.parametrize(("id", "shown"), [("call_1f", "toolu_1f"), ("functions.call_taxi:0", "functions.call_taxi:0")])
async def test_a_dialects_own_names_of_calls_stay(id: str, shown: str) -> None:
    assert _tool_use(OutputPiece("call", "{}", ToolCall(0, "call_taxi", id)), {})["id"] == shown


def say(text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": f"SAY{{{text}}}END"}]
    return {"model": "tiny", "max_tokens": 200, "messages": messages, **options}


async def test_an_answer_arrives_whole_and_streamed(claude: anthropic.AsyncAnthropic) -> None:
    asked = say("Größe 🦊", system="be brief", metadata={"user_id": "anna"})
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        (block,) = message.content
        assert (block.type, block.text) == ("text", "Größe 🦊")  # type: ignore[union-attr]
        assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
        assert message.usage.input_tokens > 0
        assert message.usage.output_tokens > 0
        assert message.id.startswith("msg_")
    assert text == "Größe 🦊"
    assert whole.usage == streamed.usage
    assert whole._request_id


async def test_why_an_answer_stopped_is_said(claude: anthropic.AsyncAnthropic) -> None:
    stopped = await claude.messages.create(**say("one two three", stop_sequences=["zzz", "two"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    assert stopped.content[0].text == "one "  # type: ignore[union-attr]
    short = await claude.messages.create(**{**say("one two three"), "max_tokens": 2})
    assert short.stop_reason == "max_tokens"
    empty = await claude.messages.create(**say(""))
    assert (empty.content, empty.stop_reason) == ([], "end_turn")
    async with claude.messages.stream(**say("")) as stream:
        assert (await stream.get_final_message()).content == []


async def test_tools_are_called(claude: anthropic.AsyncAnthropic) -> None:
    asked = say(f"Let me see.\n{CALL}\n{CALL}", tools=[WEATHER])
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        for block in message.content[1:]:
            assert (block.name, block.input) == ("weather", {"city": "Köln"})  # type: ignore[union-attr]
        assert message.stop_reason == "tool_use"
    one = await claude.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    none = await claude.messages.create(**asked, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]


async def test_reasoning_comes_as_thinking(claude: anthropic.AsyncAnthropic) -> None:
    asked = say("<think>\nfirst this\n</think>\n\nthen that", thinking={"type": "enabled", "budget_tokens": 1024})
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        thought, answer = message.content
        assert thought.thinking == "first this"  # type: ignore[union-attr]
        assert answer.text == "then that"  # type: ignore[union-attr]


async def test_a_conversation_with_results_of_tools_is_read(claude: anthropic.AsyncAnthropic) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "weather "}, {"type": "text", "text": "in Köln?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I see."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "SAY{ok}END"},
            ],
        },
    ]
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    answer = await claude.messages.create(
        model="tiny",
        max_tokens=99,
        system=system,
        messages=messages,
        tools=[WEATHER],  # type: ignore[arg-type]
    )
    assert answer.content[0].text == "ok"  # type: ignore[union-attr]


async def test_an_effort_and_thinking_reach_the_template() -> None:
    body = {**say("x"), "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}
    chat, _ = as_chat(convert(body, MessagesBody))
    assert (chat.reasoning_effort, chat.chat_template_kwargs) == ("high", {"enable_thinking": True})


@pytest.mark.parametrize("role", ["developer", "System", "USER", "human", "model", "ai", "bot", "assistant"])
async def test_a_turn_may_have_another_servers_role(http: httpx.AsyncClient, role: str) -> None:
    turns = [
        {"role": "user", "content": "x"},
        {"role": role, "content": "hm"},
        {"role": "user", "content": "SAY{y}END"},
    ]
    answer = await http.post("/v1/messages", json={"messages": turns, "max_tokens": 8})
    assert answer.json()["content"][0]["text"] == "y", answer.text
    for wrong in ("tool", "function", "wizard", ""):
        turns[1]["role"] = wrong
        refused = await http.post("/v1/messages", json={"messages": turns, "max_tokens": 8})
        assert (refused.status_code, "messages[1].role" in refused.text) == (400, True)


SAY: Any = {"type": "text", "text": "SAY{y}END"}


@pytest.mark.parametrize("content", ["SAY{y}END", [SAY], SAY, ["SAY{", "y}END"], [SAY, ""]])
async def test_a_turn_may_be_a_text_or_blocks(http: httpx.AsyncClient, content: Any) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "stop_sequences": "z"}
    assert (await http.post("/v1/messages", json=body)).json()["content"][0]["text"] == "y"
    for wrong, where in ((5, "content"), ([5], "content[0]"), ([SAY, None], "content[1]")):
        body["messages"] = [{"role": "user", "content": wrong}]
        refused = await http.post("/v1/messages", json=body)
        assert (refused.status_code, f"messages[0].{where}" in refused.text) == (400, True), refused.text


@pytest.mark.parametrize(
    ("thinking", "on"), [(True, True), ("on", True), (1, True), ("high", True), (False, False), (0, False), ({}, False)]
)
async def test_thinking_may_be_a_switch(thinking: Any, on: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "thinking": thinking}
    chat, _ = as_chat(read(json.dumps(body).encode(), MessagesBody))
    assert chat.chat_template_kwargs is not None
    assert chat.chat_template_kwargs["enable_thinking"] is on


async def test_the_block_that_bills_claude_code_is_not_shown_to_the_model() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f2e;"},
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
    ]
    chat, _ = as_chat(convert(say("x", system=system), MessagesBody))
    assert chat.messages[0].content == "be brief"
    chat, _ = as_chat(convert(say("x", system=system[:1]), MessagesBody))
    assert [message.role for message in chat.messages] == ["user"]


async def test_a_prompt_that_is_too_long_says_so_in_the_words_that_agents_match(
    claude: anthropic.AsyncAnthropic,
) -> None:
    asked = {**say("x"), "messages": [{"role": "user", "content": "ab " * 5000}]}
    with pytest.raises(anthropic.BadRequestError) as refused:
        await claude.messages.create(**asked)
    said = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", refused.value.message, re.I)
    assert said is not None
    assert int(said[1]) > int(said[2]) == 4096


async def test_tokens_are_counted_as_they_are_used(claude: anthropic.AsyncAnthropic) -> None:
    asked = say("x", system="be brief", tools=[WEATHER])
    counted = await claude.messages.count_tokens(**{key: asked[key] for key in asked if key != "max_tokens"})
    used = (await claude.messages.create(**asked)).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


async def test_an_answer_continues_its_given_beginning(claude: anthropic.AsyncAnthropic) -> None:
    asked = say("x")
    begun = [*asked["messages"], {"role": "assistant", "content": "It is"}]
    plain = await claude.messages.count_tokens(model="tiny", messages=asked["messages"])
    counted = await claude.messages.count_tokens(model="tiny", messages=begun)
    assert plain.input_tokens < counted.input_tokens + 8  # no second turn was opened
    answer = await claude.messages.create(**{**asked, "messages": begun})
    assert answer.usage.input_tokens == counted.input_tokens


async def test_errors_are_anthropics(claude: anthropic.AsyncAnthropic, http: httpx.AsyncClient) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(**{**say("x"), "model": "claude-x"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.RateLimitError) as limited:
        await claude.messages.create(**{**say("x"), "messages": [{"role": "user", "content": "FAIL{queue_full}END"}]})
    assert limited.value.response.headers["retry-after"] == "1"
    with pytest.raises(anthropic.InternalServerError) as failed:
        await claude.messages.create(
            **{**say("x"), "messages": [{"role": "user", "content": "FAIL{missing_expert}END"}]}
        )
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    refused = (await http.get(PATH)).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "invalid_request_error")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (
        {"system": "x", "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]",
    ),
    ({"tools": [WEATHER, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [SEARCH, {"name": "", "input_schema": {}}]}, "tools[1].name"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "tool_choice"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_named(http: httpx.AsyncClient, wrong: dict[str, Any], named: str) -> None:
    answer = await http.post(PATH, json={**say("x"), **wrong})
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]


async def test_a_stream_that_fails_says_so_as_an_event(front: Front, http: httpx.AsyncClient) -> None:
    body = {**say("x"), "messages": [{"role": "user", "content": "HANG@2"}], "stream": True}
    assert front.supervisor is not None
    async with http.stream("POST", PATH, json=body) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: message_start"
        front.supervisor.requests.fail_all(EngineUnavailable("gone"))
        events = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
    assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


async def test_the_demo_model_calls_a_tool(demo: Front) -> None:
    tool = {**WEATHER, "name": "get_weather"}
    asked: Any = {"model": "tiny", "max_tokens": 80, "tools": [tool], "extra_body": {"temperature": 0}}
    asked["messages"] = [{"role": "user", "content": "What is the weather in Warsaw?"}]
    async with anthropic_client(demo.settings) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        (call,) = message.content
        assert (call.type, call.name) == ("tool_use", "get_weather")  # type: ignore[union-attr]
        assert call.input.keys() == {"city"}  # type: ignore[union-attr]
