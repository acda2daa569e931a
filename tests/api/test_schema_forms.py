"""JSON Schemas as other languages and APIs write them: each row of the table in docs/api.md."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.api_tables import rows, spans
from support.grammars import response_grammar

from edgemoe.api.schema import Chat, Function, read
from edgemoe.api.schema_forms import MAX_DEPTH, usual_schema
from edgemoe.errors import InvalidRequest

BYTES = LLTokenizer("byte")
ROWS = [(span, means) for cell, means in rows("a schema has | which is read as") for span in spans(cell)]
TEXTS = ('{"a":"x"}', '{"a":null}', '{"a":5}', "{}", "[]")


def accepted(schema: Any) -> list[str]:
    """Returns which of the texts a format of this schema accepts."""
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": asked}
    grammar = response_grammar(read(json.dumps(body).encode(), Chat).response_format)
    assert grammar is not None

    def accepts(text: str) -> bool:
        matcher = LLMatcher(BYTES, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = BYTES.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    return [text for text in TEXTS if accepts(text)]


@pytest.mark.parametrize(("span", "means"), ROWS)
def test_a_schema_is_read_as_the_table_says(span: str, means: str) -> None:
    found = accepted(json.loads(span))
    assert found == accepted(json.loads(spans(means)[0]))
    assert found == accepted(json.dumps(json.loads(span))), "as text, too"
    assert 0 < len(found) < len(TEXTS)


@pytest.mark.parametrize("empty", [None, [], "", "null", "[]"])
def test_no_parameters_may_be_written_in_many_ways(empty: Any) -> None:
    assert Function(name="f", parameters=empty).parameters is None


@pytest.mark.parametrize("wrong", [[1], 5, "5", "{", True])
def test_parameters_that_are_no_object_are_refused_by_their_path(wrong: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    with pytest.raises(InvalidRequest) as refusal:
        read(json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [tool]}).encode(), Chat)
    assert refusal.value.param == "tools[0].function.parameters"


def test_values_are_left_as_they_are() -> None:
    values = {"const": None, "default": None, "enum": [None, "A"], "description": "of null", "x-any": {"type": "ANY"}}
    assert usual_schema(values) == values
    named = {"properties": {"required": {"type": "STRING"}, "type": {"const": None}, "nothing": None}}
    assert usual_schema(named)["properties"] == {
        "required": {"type": "string"},
        "type": {"const": None},
        "nothing": None,
    }


def test_what_is_nested_deeper_than_any_schema_may_be_is_left() -> None:
    deep: Any = {"type": "STRING"}
    for _ in range(5 * MAX_DEPTH):
        deep = {"items": deep}
    found = usual_schema(deep)
    for _ in range(5 * MAX_DEPTH):
        found = found["items"]
    assert found == {"type": "STRING"}
