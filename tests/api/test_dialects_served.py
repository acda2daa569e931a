"""Each dialect through the public door: the real openai client, streamed or not, and the other two APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from support.dialect_kit import ANSWER, ARGUMENTS, CITY, FUNCTIONS, SAMPLES, THOUGHT, Sample, tokenizer
from support.dialect_templates import TEMPLATES
from support.front_kit import http_client, openai_client, running, settings_for, write_model
from support.gate import in_gate
from test_anthropic import anthropic_client

from edgemoe.api.endpoints.chat_completions import render
from edgemoe.api.schema import Chat, convert
from edgemoe.api.text.tokenizer import TextModel, Vocabulary
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")
GATE = ("hermes", "mistral", "harmony", "qwen-xml", "kimi")  # each writes calls in a way of its own
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in FUNCTIONS.items()
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=in_gate(SAMPLES, GATE), name="served")
async def served_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Sample, Front]]:
    sample = SAMPLES[request.param]
    folder = tmp_path_factory.mktemp(sample.dialect.name)
    model = write_model(folder / "model", TEMPLATES[sample.dialect.name], tokenizer(sample.dialect))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCRIPTED_STEP_S", "0.0005")  # answers have hundreds of tokens
        async with running(settings_for(folder, model)) as front:
            yield sample, front


@pytest_asyncio.fixture(loop_scope="session")
async def client(served: tuple[Sample, Front]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(served[1].settings) as client:
        yield client


def ask(text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": f"SAY{{{text}}}END"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 1000, "reasoning_effort": "medium", **options}


def assert_message(sample: Sample, message: Any, city: str = CITY) -> None:
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT)
    assert [call.function.name for call in message.tool_calls] == sample.names
    wanted = [{**ARGUMENTS, "city": city}, {}][: len(sample.names)]
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == wanted


async def test_an_answer_has_its_reasoning_and_calls(served: tuple[Sample, Front], client: openai.AsyncOpenAI) -> None:
    sample = served[0]
    choice = (await client.chat.completions.create(**ask(sample.output, tools=TOOLS))).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert_message(sample, choice.message)


async def test_a_stream_says_the_same_in_small_pieces(served: tuple[Sample, Front], client: openai.AsyncOpenAI) -> None:
    sample, pieces, reasoning = served[0], 0, ""
    long = "Süd" * 50  # pieces that come while the front is busy are joined: so long that they are several even then
    output, city = (text.replace("Süd", long) for text in (sample.output, CITY))
    async with client.chat.completions.stream(**ask(output, tools=TOOLS)) as stream:
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                delta: Any = event.chunk.choices[0].delta
                pieces += bool(delta.tool_calls)
                reasoning += getattr(delta, "reasoning_content", None) or ""
        message: Any = (await stream.get_final_completion()).choices[0].message
    assert pieces > 1 + len(sample.names)  # each call begins with one
    assert reasoning == THOUGHT
    assert_message(sample, message, city)


async def test_the_calls_are_the_answers_of_all_apis(served: tuple[Sample, Front], client: openai.AsyncOpenAI) -> None:
    sample, front = served
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    text = f"SAY{{{sample.output}}}END"
    asked: Any = {"model": "tiny", "input": text, "tools": tools, "reasoning": {"effort": "medium"}}
    whole = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        final = await stream.get_final_response()
    for response in (whole, final):
        thought, message, *calls = response.output
        assert (thought.type, message.type) == ("reasoning", "message")
        assert [(call.name, json.loads(call.arguments)) for call in calls] == list(  # type: ignore[union-attr]
            zip(sample.names, [ARGUMENTS, {}], strict=False)
        )
    asked = {
        "model": "tiny",
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": text}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": name, "input_schema": schema or {"type": "object"}} for name, schema in FUNCTIONS.items()],
    }
    async with anthropic_client(front.settings) as claude:
        message = await claude.messages.create(**asked)
        async with claude.messages.stream(**asked) as streamed:
            again = await streamed.get_final_message()
    for one in (message, again):
        kinds = [block.type for block in one.content]
        assert kinds == ["thinking", "text", *(["tool_use"] * len(sample.names))]
        assert [block.input for block in one.content[2:]] == [ARGUMENTS, {}][: len(sample.names)]
        assert one.stop_reason == "tool_use"


async def test_the_calls_are_ollamas_answer_and_its_second_turn_needs_no_ids(served: tuple[Sample, Front]) -> None:
    sample, front = served
    first = {"role": "user", "content": f"SAY{{{sample.output}}}END"}
    asked: Any = {"model": "tiny", "messages": [first], "tools": TOOLS, "think": True}
    async with http_client(front.settings) as http:
        whole = (await http.post("/api/chat", json={**asked, "stream": False})).json()
        lines = [json.loads(line) for line in (await http.post("/api/chat", json=asked)).text.split("\n")[:-1]]
        parts = [line["message"] for line in lines]
        streamed = {
            "content": "".join(part["content"] for part in parts),
            "thinking": "".join(part.get("thinking", "") for part in parts),
            "tool_calls": [call for part in parts for call in part.get("tool_calls", ())],
        }
        for message in (whole["message"], streamed):
            assert (message["content"], message["thinking"]) == (ANSWER, THOUGHT)
            called = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            assert called == list(zip(sample.names, [ARGUMENTS, {}], strict=False))
        assert (whole["done_reason"], lines[-1]["done_reason"]) == ("stop", "stop")
        calls = [{"function": call["function"]} for call in whole["message"]["tool_calls"]]
        results = [{"role": "tool", "tool_name": name, "content": f"result of {name}"} for name in sample.names]
        turns = [{"role": "user", "content": "go"}, whole["message"] | {"tool_calls": calls}, *results]
        answer = await http.post("/api/chat", json={**asked, "messages": turns, "options": {"num_predict": 5}})
        assert answer.status_code == 200, answer.text


async def test_calls_that_are_cut_short_are_text_or_end_unfinished(
    served: tuple[Sample, Front], client: openai.AsyncOpenAI
) -> None:
    sample = served[0]
    half = sample.output[: sample.output.index("Süd")]
    choice = (await client.chat.completions.create(**ask(half, tools=TOOLS))).choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert "Köln" in (choice.message.content or "")
    arguments, finish = "", None
    async for chunk in await client.chat.completions.create(**ask(half, tools=TOOLS), stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments += call.function.arguments
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "stop"
    assert arguments.endswith('"city": "Köln \\"')


async def test_no_mark_is_ever_shown(served: tuple[Sample, Front], client: openai.AsyncOpenAI) -> None:
    sample = served[0]
    special = [name for name in Vocabulary(tokenizer(sample.dialect)).special if not name.startswith("<|im_")]
    for text in (sample.output[:-9], sample.calls + sample.thought, "".join(special)):
        for tools in (TOOLS, openai.NOT_GIVEN):
            message: Any = (await client.chat.completions.create(**ask(text, tools=tools))).choices[0].message
            shown = (message.content or "") + getattr(message, "reasoning_content", "")
            assert not [mark for mark in special if mark in shown]


async def test_a_conversation_with_calls_and_results_goes_through_the_template(
    served: tuple[Sample, Front], client: openai.AsyncOpenAI
) -> None:
    sample, front = served
    message: Any = (await client.chat.completions.create(**ask(sample.output, tools=TOOLS))).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.function.name}"}
        for call in message.tool_calls
    ]
    said = {**message.model_dump(exclude_none=True), "content": ""}
    messages = [{"role": "user", "content": "go"}, said, *results]
    model = TextModel(Path(front.settings.model.path))
    body = convert({"messages": messages, "tools": TOOLS}, Chat)
    prompt = render(body, body.tools or [], model)
    for call in message.tool_calls:
        assert prompt.count(f"result of {call.function.name}") == 1
    assert "Köln" in prompt
    answer = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_a_call_that_the_length_cuts_is_the_same_call_streamed_and_whole_in_every_api(
    served: tuple[Sample, Front], client: openai.AsyncOpenAI
) -> None:
    sample, front = served
    tokens = len(tokenizer(sample.dialect).encode(sample.output[: sample.output.index("Süd")]).ids)
    asked = ask(sample.output, tools=TOOLS, max_tokens=tokens)
    whole = (await client.chat.completions.create(**asked)).choices[0]
    name = arguments = ""
    finish = None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments
        finish = chunk.choices[0].finish_reason or finish
    (call,) = whole.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == (name, arguments)
    assert arguments.endswith('"city": "Köln \\"')
    assert (whole.finish_reason, finish) == ("length", "length")
    assert "weather" not in (whole.message.content or "")
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for stream in (False, True):
        response: Any = await client.responses.create(
            model="tiny", input=asked["messages"][0]["content"], tools=flat, max_output_tokens=tokens, stream=stream
        )
        if stream:
            (response,) = [event.response async for event in response if event.type == "response.incomplete"]
        item = response.output[-1]
        assert (item.type, item.arguments, item.status) == ("function_call", arguments, "incomplete")
    async with anthropic_client(front.settings) as claude:
        tools = [{"name": name, "input_schema": schema or {"type": "object"}} for name, schema in FUNCTIONS.items()]
        message = await claude.messages.create(
            model="tiny", max_tokens=tokens, messages=asked["messages"], tools=tools, thinking={"type": "adaptive"}
        )
    assert message.content[-1].input["city"] == 'Köln "'
    assert message.stop_reason == "max_tokens"
