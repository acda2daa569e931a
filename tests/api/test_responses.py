"""/v1/responses, as the openai client reads it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from edgemoe.api.endpoints.responses import ResponsesBody, as_chat
from edgemoe.api.schema import convert

pytestmark = pytest.mark.asyncio(loop_scope="session")
THOUGHT = "SAY{<think>\nhm\n</think>\n\nHello Köln}END"
CALL = 'SAY{Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>}END'
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


async def test_a_response_has_reasoning_and_text(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="tiny", input=THOUGHT, instructions="be brief")
    assert response.output_text == "Hello Köln"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.status, response.store, response.instructions) == ("completed", False, "be brief")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_the_events_build_up_the_same_response(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input=THOUGHT) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello Köln"
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2


async def test_function_calls_are_items(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="tiny", input=CALL, tools=[TOOL])
    message, call = response.output
    assert (message.type, call.type) == ("message", "function_call")
    assert json.loads(call.arguments) == {"a": 1}  # type: ignore[union-attr]
    async with client.responses.stream(model="tiny", input=CALL, tools=[TOOL]) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]


async def test_a_call_that_is_cut_short_is_text_or_an_incomplete_item(client: openai.AsyncOpenAI) -> None:
    half = CALL[: CALL.index(" 1}")] + ' "Kö}END'
    whole = await client.responses.create(model="tiny", input=half, tools=[TOOL])
    assert whole.output_text.endswith('{"name": "f", "arguments": {"a": "Kö')
    async with client.responses.stream(model="tiny", input=half, tools=[TOOL]) as stream:
        final = await stream.get_final_response()
    message, call = final.output
    assert (message.content[0].text, call.status) == ("Wait.", "incomplete")  # type: ignore[union-attr]
    assert call.arguments == '{"a": "Kö'  # type: ignore[union-attr]


PATCH = '*** Begin Patch\n*** Update File: a.txt\n-"hello"\n+\\Grüße 🦊\n*** End Patch\n'
CUSTOM: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: ANY"},
}
NAMED: Any = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}
CRM: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [NAMED, CUSTOM]}
FLEET: Any = {"type": "namespace", "name": "mcp__fleet__", "description": "Cars.", "tools": [NAMED]}
LOOKUP: Any = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}


def call(name: str, arguments: Any, escape: bool = False) -> str:
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=escape)
    return f"SAY{{<tool_call>\n{said}\n</tool_call>}}END"


async def both(client: openai.AsyncOpenAI, **asked: Any) -> list[Any]:
    """Returns the only item of the answer, whole and streamed."""
    (whole,) = (await client.responses.create(model="tiny", **asked)).output
    async with client.responses.stream(model="tiny", **asked) as stream:
        (streamed,) = (await stream.get_final_response()).output
    return [whole, streamed]


@pytest.mark.parametrize(
    ("flat", "name", "namespace"),
    [
        ("find", "find", None),
        ("crm__find", "find", "crm"),
        ("mcp__fleet__find", "find", "mcp__fleet__"),
        ("crm__find_2", "crm__find", None),
    ],
)
async def test_a_function_in_a_namespace_is_called_by_name_and_namespace(
    client: openai.AsyncOpenAI, flat: str, name: str, namespace: str | None
) -> None:
    tools = [NAMED, CRM, FLEET, {"type": "web_search"}, {**NAMED, "name": "crm__find"}]
    for item in await both(client, input=call(flat, {"a": 1}), tools=tools):
        assert (item.type, item.name, item.namespace) == ("function_call", name, namespace)
        assert json.loads(item.arguments) == {"a": 1}
    items = [{"type": "function_call", "call_id": "c", "name": name, "arguments": "{}", "namespace": namespace}]
    chat, _, offer = as_chat(convert({"input": items, "tools": tools}, ResponsesBody))
    assert [one.function.name for one in chat.messages[0].tool_calls or ()] == [flat]
    assert [one.function.name for one in chat.tools or ()] == [one["function"]["name"] for one in offer.functions]
    chosen = {"type": "function", "name": name, **({"namespace": namespace} if namespace else {})}
    for choice in (chosen, {"type": "allowed_tools", "mode": "required", "tools": [chosen]}):
        (item, _) = await both(client, input=call(flat, {"a": 1}), tools=tools, tool_choice=choice)
        assert (item.name, item.namespace) == (name, namespace)


@pytest.mark.parametrize("escape", [False, True])
@pytest.mark.parametrize(("flat", "namespace"), [("apply_patch", None), ("crm__apply_patch", "crm")])
async def test_a_custom_tool_is_called_with_its_plain_input(
    client: openai.AsyncOpenAI, flat: str, namespace: str | None, escape: bool
) -> None:
    asked: Any = {"input": call(flat, {"input": PATCH}, escape), "tools": [CUSTOM, CRM]}
    for item in await both(client, **asked):
        assert (item.type, item.name, item.namespace, item.input) == (
            "custom_tool_call",
            "apply_patch",
            namespace,
            PATCH,
        )
    events = [event async for event in await client.responses.create(model="tiny", stream=True, **asked)]
    pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(pieces) > 9, "it is streamed as it is written"
    assert "".join(pieces) == PATCH
    (done,) = (event.input for event in events if event.type == "response.custom_tool_call_input.done")
    assert done == PATCH


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": "x"}, "x"),
        ({"patch": "x"}, "x"),
        ({"a": "x", "b": "y"}, '{"a": "x", "b": "y"}'),
        ({"input": 3}, '{"input": 3}'),
    ],
)
async def test_a_custom_tools_other_arguments_reach_the_client(
    client: openai.AsyncOpenAI, arguments: Any, text: str
) -> None:
    for item in await both(client, input=call("apply_patch", arguments), tools=[CUSTOM]):
        assert item.input == text


async def test_a_client_finds_tools_which_are_offered_from_then_on(client: openai.AsyncOpenAI) -> None:
    for item in await both(client, input=call("tool_search", {"query": "cars"}), tools=[LOOKUP]):
        assert (item.type, item.execution, item.arguments) == ("tool_search_call", "client", {"query": "cars"})
    items = [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "cars"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [FLEET]},
        {"role": "user", "content": call("mcp__fleet__find", {})},
    ]
    for item in await both(client, input=items, tools=[LOOKUP]):
        assert (item.name, item.namespace) == ("find", "mcp__fleet__")


async def test_reasoning_is_sent_back_sealed_where_the_client_asks_for_it(client: openai.AsyncOpenAI) -> None:
    include: Any = ["reasoning.encrypted_content"]
    plain = (await client.responses.create(model="tiny", input=THOUGHT)).output[0].to_dict()
    assert "encrypted_content" not in plain
    async with client.responses.stream(model="tiny", input=THOUGHT, include=include) as stream:
        thought, answer = (await stream.get_final_response()).to_dict()["output"]  # type: ignore[misc]
    thought.pop("content")
    chat, *_ = as_chat(convert({"input": [thought, answer]}, ResponsesBody))
    assert [message.reasoning_content for message in chat.messages] == ["hm"]
    thought["encrypted_content"] = "gAAAA of another server"
    chat, *_ = as_chat(convert({"input": [thought, answer]}, ResponsesBody))
    assert [message.reasoning_content for message in chat.messages] == [None]


async def test_a_turn_after_a_function_call_is_accepted(client: openai.AsyncOpenAI) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"type": "message", "role": "user", "content": "SAY{fine}END"},
    ]
    response = await client.responses.create(model="tiny", input=items, tools=[TOOL])
    assert response.output_text == "fine"


async def test_reasoning_that_is_sent_back_belongs_to_the_message_behind_it() -> None:
    def thought(text: str) -> Any:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    answer = {"role": "assistant", "content": "yes"}
    items = [thought("a"), call, call, output, thought("b"), thought("c"), answer, {"role": "user", "content": "x"}]
    chat, _, _ = as_chat(convert({"input": [*items, thought("d"), items[-1]]}, ResponsesBody))
    reasons = [message.reasoning_content for message in chat.messages]
    assert reasons == ["a", None, "bc", None, None]
    assert len(chat.messages[0].tool_calls or ()) == 2


async def test_an_answer_cut_short_is_incomplete(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="tiny", input="go", max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_an_error_midstream_is_a_failed_response(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError):
        await client.responses.create(model="tiny", input="FAIL{missing_expert}END", stream=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}, {**TOOL, "name": 3}]}, "tools[1].name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, {**TOOL, "name": "g", "parameters": 3}]}]},
            "tools[0].tools[1].parameters",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ],
)
async def test_requests_for_stored_responses_or_more_than_text_are_refused(
    client: openai.AsyncOpenAI, fields: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**{"model": "tiny", "input": "x", **fields})
    assert refused.value.param == param


LOGPROBS: list[Any] = ["message.output_text.logprobs"]


@pytest.mark.parametrize("asked", [{"include": LOGPROBS}, {"top_logprobs": 2, "include": LOGPROBS}], ids=str)
async def test_the_text_of_a_response_has_the_log_probabilities_of_its_own_tokens(
    client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    whole = await client.responses.create(model="tiny", input=THOUGHT, **asked)
    part = whole.output[1].content[0]  # type: ignore[union-attr]
    shown = part.logprobs  # type: ignore[union-attr]
    raw = b"".join(bytes(one.bytes) for one in shown)
    assert raw.decode().strip() == "Hello Köln"
    assert all(len(one.top_logprobs) == asked.get("top_logprobs", 0) for one in shown)
    assert all(one.logprob <= 0 for one in shown)
    async with client.responses.stream(model="tiny", input=THOUGHT, **asked) as stream:
        events = [event async for event in stream]
    parts = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [one.logprob for one in parts] == [one.logprob for one in done.logprobs] == [one.logprob for one in shown]


async def test_a_response_has_no_log_probabilities_unless_they_are_asked_for(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model="tiny", input=THOUGHT)
    assert whole.output[1].content[0].logprobs == []  # type: ignore[union-attr]


async def test_calls_leave_the_log_probabilities_of_the_text_alone(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"include": LOGPROBS, "tools": [TOOL]}
    message, _ = (await client.responses.create(model="tiny", input=CALL, **asked)).output
    shown = message.content[0].logprobs  # type: ignore[union-attr]
    assert b"".join(bytes(one.bytes) for one in shown).decode().strip() == "Wait."
