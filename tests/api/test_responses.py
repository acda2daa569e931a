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
    chat, _ = as_chat(convert({"input": [*items, thought("d"), items[-1]]}, ResponsesBody))
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
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ],
)
async def test_what_needs_a_store_or_more_than_text_is_refused(
    client: openai.AsyncOpenAI, fields: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**{"model": "tiny", "input": "x", **fields})
    assert refused.value.param == param
