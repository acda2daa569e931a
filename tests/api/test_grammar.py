"""GrammarCompiler accept the format asked for, and nothing else; an impossible one is refused before the engine."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.front_kit import MARKS, byte_level_tokenizer
from support.grammars import free_grammar, response_grammar, tool_grammar
from tokenizers import Tokenizer

from edgemoe.api.generate.answer_grammar import AnswerForm
from edgemoe.api.schema import Function, JsonSchema, ResponseFormat, Tool
from edgemoe.errors import InvalidRequest

BYTES = LLTokenizer("byte")
TOKENIZER = byte_level_tokenizer()
SPECIAL = byte_level_tokenizer(special_marks=True)
TOKENS = LLTokenizer(TOKENIZER.to_str())  # has the marks as tokens
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"item": {"$ref": "#/$defs/Item"}},
    "required": ["item"],
    "$defs": {"Item": {"enum": ["a", "b"]}},
}
TOOLS = [Tool(function=Function(name="one", parameters=NESTED)), Tool(function=Function(name="two"))]


def accepts(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(BYTES, grammar)
    return matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting()


def accepts_tokens(grammar: str | None, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    assert grammar is not None
    matcher = LLMatcher(TOKENS if tokenizer is TOKENIZER else LLTokenizer(tokenizer.to_str()), grammar, log_level=0)
    return matcher.consume_tokens(tokenizer.encode(text).ids) and matcher.is_accepting()


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def form(**fields: object) -> ResponseFormat:
    return ResponseFormat(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (form(type="json_object"), '{"a":[1,{}]}', "[1]"),
        (form(type="json_schema", json_schema=JsonSchema(schema=PERSON)), '{"name":"é","age":3}', '{"name":"x"}'),
        (form(type="regex", regex="(ab|c/d)+x"), "abc/dx", "abx "),
    ],
)
def test_a_format_accepts_the_texts_that_it_describes(asked: ResponseFormat, good: str, bad: str) -> None:
    assert accepts(response_grammar(asked), good)
    assert not accepts(response_grammar(asked), bad)


def test_free_text_needs_no_grammar() -> None:
    assert response_grammar(None) is None
    assert response_grammar(form(type="text")) is None


def test_reasoning_may_come_first_where_the_model_reasons() -> None:
    asked = form(type="json_object")
    grammar = response_grammar(asked, AnswerForm(begun="open"))
    assert accepts(grammar, '<think>\nfirst {"no"} \n</think>\n\n{"a":1}')
    assert accepts(grammar, '{"a":1}')
    assert not accepts(response_grammar(asked), '<think>\n</think>{"a":1}')
    begun = response_grammar(asked, AnswerForm(begun="reasoning"))
    assert accepts(begun, 'more thought</think>\n{"a":1}')
    assert not accepts(begun, '{"a":1}')


def test_a_regex_cannot_leave_its_rule() -> None:
    grammar = response_grammar(form(type="regex", regex="a/\nstart: /b"))
    assert accepts(grammar, "a/\nstart: /b")


@pytest.mark.parametrize(
    "asked", [form(type="json_object"), form(type="json_schema", json_schema=JsonSchema(schema={}))]
)
def test_json_has_no_optional_white_space(asked: ResponseFormat) -> None:
    grammar = response_grammar(asked)
    assert accepts(grammar, '{"a":[1,2],"b c":" d "}')
    for spaced in ('{ "a":1}', '{"a": 1}', '{"a":1 }', '{"a":[1, 2]}', '{"a":1}\n', '{\n"a":1}', ' {"a":1}'):
        assert not accepts(grammar, spaced)


@pytest.mark.parametrize("regex", [r"[^\s\S]", r"a[^\s\S]b"])
def test_a_regex_that_nothing_matches_is_refused_in_one_line(regex: str) -> None:
    with pytest.raises(InvalidRequest, match="no text matches") as refused:
        response_grammar(form(type="regex", regex=regex))
    assert (refused.value.param, refused.value.code) == ("response_format.regex", "invalid_grammar")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SPECIAL], ids=["added", "special"])
def test_free_text_may_end_in_calls_to_offered_tools_only(tokenizer: Tokenizer) -> None:
    grammar = free_grammar(TOOLS, True, AnswerForm(MARKS, begun="open"))
    one, two = call("one", {"item": "a"}), call("two", {})
    for good in ("", "just text", "<think>hm</think>\n\nyes", f"let me see\n{one}", f"{two}\n{one}"):
        assert accepts_tokens(grammar, good, tokenizer), good
    for bad in (call("three", {}), call("one", {"item": "z"}), "<tool_call>what", f"{one} and more"):
        assert not accepts_tokens(grammar, bad, tokenizer), bad
    assert not accepts_tokens(free_grammar(TOOLS, False, AnswerForm(MARKS)), f"{two}\n{one}", tokenizer)


def test_tools_whose_schema_cannot_be_followed_are_kept_to_by_name() -> None:
    odd = Tool(function=Function(name="odd", parameters={"type": "object", "$ref": "http://x/y"}))
    grammar = free_grammar([odd], True, AnswerForm(MARKS))
    assert accepts_tokens(grammar, call("odd", {"anything": 1}))
    assert not accepts_tokens(grammar, call("even", {"anything": 1}))


def test_nothing_tells_a_call_from_text_where_its_marks_are_no_tokens() -> None:
    assert free_grammar(TOOLS, True, AnswerForm()) is None


def test_a_tool_call_must_fit_its_tool() -> None:
    grammar = tool_grammar(TOOLS, several=True)
    assert accepts(grammar, call("one", {"item": "a"}))
    assert accepts(grammar, call("two", {"x": 1}) + "\n" + call("one", {"item": "b"}))
    assert not accepts(grammar, call("one", {"item": "c"}))
    assert not accepts(grammar, call("three", {}))
    assert not accepts(grammar, "no call")
    assert not accepts(tool_grammar(TOOLS, several=False), call("two", {}) + "\n" + call("two", {}))
    assert accepts(
        tool_grammar(TOOLS, several=False, form=AnswerForm(begun="open")), "<think>hm</think>\n" + call("two", {})
    )


@pytest.mark.parametrize("thinking", [False, True])
def test_marks_that_are_tokens_are_accepted_as_tokens(thinking: bool) -> None:
    form = AnswerForm(MARKS, begun="reasoning" if thinking else "open")
    thought = "so <b> it is\n" if thinking else "<think>\nso <b> it is\n"
    schema = response_grammar(ResponseFormat(type="json_object"), form)
    assert accepts_tokens(schema, thought + '</think>\n\n{"a":1}')
    assert accepts_tokens(schema, '{"a":1}') != thinking
    calls = tool_grammar(TOOLS, True, form)
    assert accepts_tokens(calls, f"{thought}</think>\n{call('two', {})}\n{call('one', {'item': 'a'})}")
    assert not accepts_tokens(calls, f"{thought}</think>\n{call('one', {})}")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (form(type="xml"), "response_format.type"),
        (form(type="regex"), "response_format.regex"),
        (form(type="regex", regex="[0-9"), "response_format"),
        (form(type="json_schema"), "response_format.json_schema.schema"),
        (form(type="json_schema", json_schema=JsonSchema(schema={"type": "objeeect"})), "response_format"),
        (form(type="json_schema", json_schema=JsonSchema(schema={"$ref": "http://x/y"})), "response_format"),
        (form(type="json_schema", json_schema=JsonSchema(schema=False)), "response_format"),
        (form(type="regex", regex="x" * (2 << 20)), "response_format.regex"),
    ],
)
def test_unsupported_constraints_are_refused_by_name(asked: ResponseFormat, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        response_grammar(asked)
    assert refused.value.param == param
