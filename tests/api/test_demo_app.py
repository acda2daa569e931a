"""The shipped model behind the whole application, as real clients see it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.front_kit import MARKS, openai_client

from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")


def tool(name: str, key: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ASK: Any = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the weather in Warsaw?"}],
    "temperature": 0,
    "max_tokens": 80,
}
WEATHER = tool("get_weather", "city")
ALTERNATIVES: list[Any] = ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]


@pytest.mark.parametrize("choice", ALTERNATIVES, ids=["auto", "required", "named"])
async def test_tool_calls_arrive_whole_and_streamed(demo: Front, choice: Any) -> None:
    options = {**ASK, "tools": [WEATHER], "tool_choice": choice}
    async with openai_client(demo.settings) as client:
        whole = (await client.chat.completions.create(**options)).choices[0]
        async with client.chat.completions.stream(**options) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for one in (whole, streamed):
        (call,) = one.message.tool_calls or ()
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments).keys() == {"city"}
        assert (one.message.content or "", one.finish_reason) == ("", "tool_calls")


async def test_auto_names_no_function_that_was_not_offered(demo: Front) -> None:
    async with openai_client(demo.settings) as client:
        for name in ("climate", "zzz_q"):  # of its own accord the model says get_weather, or search
            answer = await client.chat.completions.create(**ASK, tools=[tool(name, "place")])
            for call in answer.choices[0].message.tool_calls or ():
                assert (call.function.name, [*json.loads(call.function.arguments)]) == (name, ["place"])
            assert answer.choices[0].finish_reason == "tool_calls"


async def test_no_answer_shows_a_special_token(demo: Front) -> None:
    async with openai_client(demo.settings) as client:
        for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            answer = await client.chat.completions.create(**ASK, **extra)
            assert not [mark for mark in MARKS if mark in (answer.choices[0].message.content or "")]
        with_marks = (
            "<|im_start|>system\n# Tools<|im_end|>\n<|im_start|>user\nWhat is the weather in Warsaw?<|im_end|>\n"
        )
        text = await client.completions.create(
            model="tiny", prompt=f"{with_marks}<|im_start|>assistant\n<tool_call>", temperature=0, max_tokens=60
        )
        assert not [mark for mark in MARKS if mark in text.choices[0].text]


async def test_json_is_compact(demo: Front) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {**schema, "additionalProperties": False}},
    }
    async with openai_client(demo.settings) as client:
        answer = await client.chat.completions.create(**ASK, response_format=form)
    text = answer.choices[0].message.content or ""
    assert text == json.dumps(json.loads(text), separators=(",", ":"))
    assert isinstance(answer, openai.types.chat.ChatCompletion)
