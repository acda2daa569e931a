"""Schemas as clients write them: which values the answer may be, as docs/api.md says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.api_tables import rows, spans
from support.grammars import response_grammar, tool_grammar

from edgemoe.api.dialects.dialect import DIALECTS, Dialect
from edgemoe.api.generate.answer_grammar import AnswerForm
from edgemoe.api.generate.json_schema import FORMATS
from edgemoe.api.schema import Function, JsonSchema, ResponseFormat, Tool
from edgemoe.errors import InvalidRequest

BYTES = LLTokenizer("byte")
INT: dict[str, Any] = {"type": "integer"}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def asked(schema: Any, strict: bool = False) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema, strict=strict))


def accepts(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


NODE = {"type": "object", "properties": {"v": INT, "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
CLOSED: list[tuple[Any, list[str], list[str]]] = [
    (thing(a=INT), ['{"a":1}'], ['{"a":1,"b":2}']),
    (thing(a=thing(b=INT)), ['{"a":{"b":1}}'], ['{"a":{"b":1,"c":2}}']),
    ({"type": "array", "items": thing(a=INT)}, ['[{"a":1}]'], ['[{"a":1,"b":2}]']),
    ({"type": "object", "properties": {}}, ["{}"], ['{"b":2}']),
    ({"type": "object"}, ["{}", '{"b":2}'], ["1"]),
    (thing(a=INT) | {"required": ["a", "z"]}, ['{"a":1,"z":[]}'], ['{"a":1,"z":1,"b":2}']),
    ({"allOf": [thing(a=INT), thing(b=INT)]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
    ({"allOf": [thing(a=INT)]}, ['{"a":1}'], ['{"a":1,"c":3}']),
    ({"anyOf": [thing(a=INT), thing(b=INT)]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"c":3}']),
    ({"oneOf": [thing(a=INT), thing(b=INT)]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"c":3}']),
    (
        {"type": "object", "properties": {"k": INT}, "oneOf": [thing(a=INT), thing(b=INT)]},
        ['{"k":1,"a":1}', '{"b":1}'],
        ['{"k":1,"c":3}'],
    ),
    (
        {"type": "object", "properties": {"k": INT, "l": INT}, "anyOf": [{"required": ["k"]}, {"required": ["l"]}]},
        ['{"k":1}', '{"l":1}'],
        ["{}", '{"k":1,"c":3}'],
    ),
    (
        {"$defs": {"X": thing(a=INT)}, "allOf": [{"$ref": "#/$defs/X"}, thing(b=INT)]},
        ['{"a":1,"b":2}'],
        ['{"a":1,"b":2,"c":3}'],
    ),
    (thing(x={"$ref": "#/$defs/X"}) | {"$defs": {"X": thing(a=INT)}}, ['{"x":{"a":1}}'], ['{"x":{"a":1,"b":1}}']),
    (
        {"$ref": "#/$defs/N", "$defs": {"N": NODE}},
        ['{"v":1,"n":{"v":2,"n":null}}'],
        ['{"v":1,"w":2}', '{"v":1,"n":{"v":1,"w":1}}'],
    ),
    (thing(a=INT) | {"additionalProperties": True}, ['{"a":1,"b":[2]}'], ['{"b":2}']),
    (thing(a=INT) | {"additionalProperties": INT}, ['{"a":1,"b":2}'], ['{"a":1,"b":"x"}']),
    (thing(a=INT) | {"patternProperties": {"^x": INT}}, ['{"a":1,"xy":2}'], ['{"a":1,"xy":"x"}']),
    (
        thing(a=INT) | {"if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"b": INT}}},
        ['{"a":1,"b":2}'],
        ['{"a":1,"c":2}'],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED, ids=lambda value: json.dumps(value)[:60])
def test_objects_have_the_listed_properties_only(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = response_grammar(asked(schema))
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_so_they_have_where_the_schema_is_strict() -> None:
    grammar = response_grammar(asked(thing(a=INT), strict=True))
    assert accepts(grammar, '{"a":1}')
    assert not accepts(grammar, '{"a":1,"b":2}')


UNKNOWN = (
    "password",
    "binary",
    "byte",
    "uri-reference",
    "regex",
    "url",
    "decimal",
    "base64",
    "file-path",
    "int32",
    "float",
)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_format_is_left_out(name: str, strict: bool) -> None:
    grammar = response_grammar(asked(thing(a={"type": "string", "format": name}), strict))
    assert accepts(grammar, '{"a":"x"}')


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS - {"hostname", "unknown"}))
def test_a_known_format_is_enforced(name: str, strict: bool) -> None:
    assert not accepts(response_grammar(asked({"type": "string", "format": name}, strict)), '"x"')


VALUES: dict[str, Any] = {
    "not": {"required": ["q"]},
    "if": {"required": ["a"]},
    "contains": INT,
    "uniqueItems": True,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "unevaluatedProperties": False,
    "pattern": "^(?=x)y",
}
(LOOSE,) = (spans(cell) for cell, here in rows("in a schema of a format or of a function | here") if "strict" in here)


@pytest.mark.parametrize("keyword", LOOSE)
def test_what_cannot_be_enforced_is_loose_unless_the_schema_is_strict(keyword: str) -> None:
    schema = {"type": "string", keyword: VALUES[keyword]} if keyword == "pattern" else {keyword: VALUES[keyword]}
    whole = thing(a=schema)
    assert accepts(response_grammar(asked(whole)), '{"a":"y"}')
    with pytest.raises(InvalidRequest, match=keyword):
        response_grammar(asked(whole, strict=True))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("keyword", LOOSE)
def test_so_it_is_in_every_dialects_calls(keyword: str, dialect: Dialect) -> None:
    schema = {"type": "string", keyword: VALUES[keyword]} if keyword == "pattern" else {keyword: VALUES[keyword]}
    parameters = thing(a=INT, b=schema)
    form = AnswerForm(dialect=dialect)
    assert tool_grammar([Tool(function=Function(name="f", parameters=parameters))], False, form)
