"""In every dialect a grammar accepts its models' outputs: reasoning, then the answer, or calls to offered functions."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.dialect_kit import ANSWER, FUNCTIONS, SAMPLES, Sample, tokenizer
from support.grammars import free_grammar, response_grammar, tool_grammar
from test_grammar import accepts

from edgemoe.api.dialects.argument_types import kinds
from edgemoe.api.dialects.dialect import OutputMarks, OutputStart
from edgemoe.api.dialects.output_parser import OutputParser
from edgemoe.api.dialects.tool_calls import BracedForm, ParameterForm
from edgemoe.api.generate.answer_grammar import AnswerForm
from edgemoe.api.schema import Function, JsonSchema, ResponseFormat, Tool, convert
from edgemoe.api.text.tokenizer import Vocabulary
from edgemoe.errors import InvalidRequest

EACH = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
TEXTUAL = [sample for sample in SAMPLES.values() if isinstance(sample.dialect.call, BracedForm | ParameterForm)]
TOOLS = [Tool(function=Function(name=name, parameters=parameters)) for name, parameters in FUNCTIONS.items()]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OBJECT = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=SCHEMA))


@cache
def tokens_of(name: str) -> LLTokenizer:
    return LLTokenizer(tokenizer(SAMPLES[name].dialect).to_str())


def accepts_tokens(sample: Sample, grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(tokens_of(sample.dialect.name), grammar, log_level=0)
    return matcher.consume_tokens(tokenizer(sample.dialect).encode(text).ids) and matcher.is_accepting()


def form(sample: Sample, begun: OutputStart | None = None) -> AnswerForm:
    return AnswerForm(Vocabulary(tokenizer(sample.dialect)).added, sample.dialect, begun or sample.begun)


@EACH
def test_models_own_output_is_accepted(sample: Sample) -> None:
    grammar = free_grammar(TOOLS, True, form(sample))
    assert accepts_tokens(sample, grammar, sample.output)
    assert accepts_tokens(sample, grammar, sample.thought + sample.only_calls)
    assert accepts_tokens(sample, grammar, sample.thought + sample.said(ANSWER))
    for wrong in ("weather", "now"):
        if wrong in sample.names:
            assert not accepts_tokens(sample, grammar, sample.output.replace(wrong, "other"))
    assert not accepts_tokens(sample, grammar, sample.output.replace("wind", "windy").replace("3", "three"))


@EACH
def test_calls_that_are_required_come_after_reasoning_and_fit_their_functions(sample: Sample) -> None:
    several, single = (tool_grammar(TOOLS, many, form(sample)) for many in (True, False))
    assert accepts_tokens(sample, several, sample.thought + sample.only_calls)
    assert accepts_tokens(sample, single, sample.thought + sample.only_calls) == sample.one_call
    assert not accepts_tokens(sample, several, sample.thought + sample.said(ANSWER))
    assert not accepts_tokens(sample, several, sample.thought + sample.only_calls.replace("3", '"x"'))
    assert not accepts_tokens(sample, several, sample.thought + sample.only_calls.replace("city", "town"))
    if sample.begun == "open":
        assert accepts_tokens(sample, several, sample.only_calls)


@pytest.mark.parametrize("sample", TEXTUAL, ids=lambda sample: sample.dialect.name)
@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"]])
def test_parameters_that_are_not_required_may_be_missing(sample: Sample, required: list[str]) -> None:
    parameters = {"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}, "required": required}
    tool = Tool(function=Function(name="f", parameters=parameters))
    grammar = tool_grammar([tool], False, form(sample, "answer"))
    for keys in ("", "a", "b", "c", "ab", "ac", "bc", "abc"):
        assert accepts_tokens(sample, grammar, sample.written("f", keys)) == (set(required) <= set(keys)), keys
    assert not accepts_tokens(sample, grammar, sample.written("f", "ca"))


NAMES = st.sampled_from(["a", "$ref", "type", "properties", "required", "enum", "const", "anyOf", "items", "$defs"])
TEXTS = st.sampled_from(["#", "#/$defs/a", "string", "object", "x"])
SCHEMAS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=25,
)


@EACH
@given(schema=SCHEMAS)
def test_any_schema_is_kept_to_or_refused(sample: Sample, schema: Any) -> None:
    function = {"name": "f", "parameters": {"properties": schema, "required": schema, "$defs": {"a": schema}}}
    tool = convert({"function": function}, Tool)
    with contextlib.suppress(InvalidRequest):
        tool_grammar([tool], True, form(sample))
    assert free_grammar([tool], True, form(sample)) is not None
    parser = OutputParser(OutputMarks(sample.dialect, "answer", 8, {"f": tool.function.parameters}))
    parser.feed(sample.written("f", "a"))
    parser.flush()


def test_types_are_found_in_time_where_schemas_refer_to_themselves() -> None:
    loop = {"anyOf": [{"$ref": "#"}] * 50 + [{"type": "integer"}]}
    assert kinds(loop, loop) <= {"integer"}


def test_hundreds_of_tools_and_parameters_make_a_grammar_of_their_size() -> None:
    def tools(number: int) -> list[Tool]:
        parameters = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(number)}}
        return [Tool(function=Function(name=f"f{at}", parameters=parameters)) for at in range(5)]

    for sample in SAMPLES.values():
        small, large = (len(tool_grammar(tools(number), True, form(sample))) for number in (40, 160))
        assert large < 6 * small, sample.dialect.name


@EACH
def test_a_format_begins_with_the_answer(sample: Sample) -> None:
    grammar = response_grammar(OBJECT, form(sample))
    assert accepts_tokens(sample, grammar, sample.thought + sample.said('{"a":1}'))
    assert not accepts_tokens(sample, grammar, sample.thought + sample.said('{"b":1}'))
    assert not accepts_tokens(sample, grammar, sample.thought)
    assert accepts_tokens(sample, response_grammar(OBJECT, form(sample, "text")), '{"a":1}')


@EACH
def test_marks_that_are_no_tokens_are_written_out(sample: Sample) -> None:
    plain = AnswerForm({}, sample.dialect, sample.begun)
    assert free_grammar(TOOLS, True, plain) is None
    assert accepts(tool_grammar(TOOLS, True, plain), sample.thought + sample.only_calls)
    assert accepts(response_grammar(OBJECT, plain), sample.thought + sample.said('{"a":1}'))
