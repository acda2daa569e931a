"""Messages, tools and calls in the form of chat templates."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from edgemoe.api.dialects.dialect import HARMONY
from edgemoe.api.dialects.tool_calls import OutputPiece, ToolCall
from edgemoe.api.endpoints.anthropic import MessageFormat
from edgemoe.api.schema import ChatMessage, Tool
from edgemoe.api.text.chat_template import ChatTemplate, for_template, tools_for_template
from edgemoe.errors import InvalidRequest


def test_a_result_follows_the_call_of_its_own_turn_if_ids_restart_with_each() -> None:
    turns = []
    for places in (("Paris", "Rome"), ("Oslo", "Bern")):
        calls = [
            {"id": f"call_{n}", "type": "function", "function": {"name": "w", "arguments": f'{{"at": "{place}"}}'}}
            for n, place in enumerate(places)
        ]
        turns.append({"role": "assistant", "content": None, "tool_calls": calls})
        turns += [
            {"role": "tool", "tool_call_id": f"call_{n}", "content": f"in {place}"} for n, place in enumerate(places)
        ]
    told = for_template(msgspec.convert(turns, list[ChatMessage]), HARMONY.history)
    said = [one["content"] if one["role"] == "tool" else one["tool_calls"][0]["function"]["arguments"] for one in told]
    places = ["Paris", "Rome", "Oslo", "Bern"]
    assert said == [text for place in places for text in (f'{{"at": "{place}"}}', f"in {place}")]


def test_a_tool_has_the_description_and_parameters_that_templates_read() -> None:
    tools = msgspec.convert([{"type": "function", "function": {"name": "f"}}], list[Tool])
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert tools_for_template(tools) == [{"type": "function", "function": function}]


@pytest.mark.parametrize("arguments", ['{"a": 1e400}', '{"a": "\\ud83d x"}'])
def test_arguments_are_handed_out_as_the_model_wrote_them(arguments: str) -> None:
    piece = OutputPiece("call", arguments, ToolCall(0, "f", "call_1"))
    written = MessageFormat(cast(Any, None))._block(piece)
    assert arguments in msgspec.json.encode(written).decode()


def test_a_schema_that_a_template_cannot_walk_is_a_refusal() -> None:
    template = ChatTemplate({"default": "{{ tools[0].function.parameters.properties | dictsort }}"}, {})
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        template.render([], [{"function": {"parameters": {"properties": ["a"]}}}])
