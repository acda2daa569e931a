"""A model's dialect is seen from its files, and conversations go back to each family's template as it wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.dialect_kit import FUNCTIONS, SAMPLES, Sample, tokenizer
from support.dialect_templates import TEMPLATES
from support.front_kit import byte_level_tokenizer, write_model
from support.grammars import first, tool_grammar

from edgemoe.api.dialects.argument_types import as_json, kinds
from edgemoe.api.dialects.dialect import GEMMA, HARMONY, HERMES, KIMI, OutputMarks, begun_by, dialect_of
from edgemoe.api.dialects.output_parser import OutputParser
from edgemoe.api.dialects.tool_calls import OutputPiece
from edgemoe.api.endpoints.chat_completions import chat_generation, render
from edgemoe.api.generate.answer_grammar import AnswerForm
from edgemoe.api.generate.generation import RequestContext
from edgemoe.api.schema import Chat, Tool, convert
from edgemoe.api.text.tokenizer import TextModel, Vocabulary
from edgemoe.types.request import NOBODY, RequestLimits

EACH = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
LIMITS = RequestLimits(context_tokens=8192, vocab=1000)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}
    for name, schema in FUNCTIONS.items()
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def model_of(sample: Sample, folder: Path, template: str | None = None) -> TextModel:
    name = sample.dialect.name
    return TextModel(write_model(folder, TEMPLATES[name] if template is None else template, tokenizer(sample.dialect)))


@EACH
def test_the_chat_template_tells_the_dialect_and_so_do_the_tokens(sample: Sample, tmp_path: Path) -> None:
    model = model_of(sample, tmp_path / "a")
    assert model.dialect is sample.dialect
    assert model.about()["dialect"] == sample.dialect.name
    of_tokens = model_of(sample, tmp_path / "b", template="{{ messages[0].content }}").dialect
    alike = {"qwen-xml": "hermes", "deepseek-r1": "deepseek"}  # they have the same tokens
    assert of_tokens.name == alike.get(sample.dialect.name, sample.dialect.name)


def test_a_response_template_tells_the_dialect(tmp_path: Path) -> None:
    harmony = {"fields": {"content": {"open_pattern": r"<\|channel\|>final<\|message\|>", "close": "<|return|>"}}}
    assert dialect_of("", (), harmony) is HARMONY
    own = {
        "fields": {
            "thinking": {"open": "<mull>", "close": "</mull>", "content": "text"},
            "tool_calls": {
                "open": "<act>",
                "close": "</act>",
                "content": "json",
                "transform": {"function": {"name": "{content.tool}", "arguments": "{content.input}"}},
            },
        }
    }
    dialect = dialect_of("", (), own)
    parser = OutputParser(OutputMarks(dialect, "open", 8, FUNCTIONS))
    pieces = parser.feed('<mull>so</mull>Yes.<act>{"tool": "now", "input": {}}</act>')
    assert [(piece.kind, piece.text) for piece in pieces] == [("reasoning", "so"), ("text", "Yes."), ("call", "{}")]
    (write_model(tmp_path, "{{ messages }}") / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages }}", "response_template": {"fields": {"thinking": {"open": 1}}}})
    )
    assert TextModel(tmp_path).dialect.think == HERMES.think


@pytest.mark.parametrize("odd", [{}, {"fields": []}, {"fields": {"tool_calls": {"open_pattern": "<act"}}}, {"x": "y"}])
def test_a_response_template_that_cannot_be_read_changes_nothing(odd: Any) -> None:
    dialect = dialect_of("", (), odd)
    assert (dialect.call, dialect.think) == (HERMES.call, HERMES.think)


@EACH
def test_the_marks_that_end_an_answer_are_known(sample: Sample, tmp_path: Path) -> None:
    eos = model_of(sample, tmp_path).eos
    assert {tokenizer(sample.dialect).token_to_id(name) for name in sample.dialect.ends} <= set(eos)


@EACH
def test_structured_output_starts_at_the_answer(sample: Sample, tmp_path: Path) -> None:
    model = model_of(sample, tmp_path)
    messages: Any = [{"role": "user", "content": "go"}]

    def accepted(effort: str, output: str, **options: Any) -> bool:
        asked = {"messages": messages, "response_format": FORMAT, "reasoning_effort": effort, **options}
        context = RequestContext(model, "tiny", (), LIMITS, NOBODY.principal, shares_prefixes=False)
        job = chat_generation(convert(asked, Chat), context, "chatcmpl")
        grammar = first(job.grammar)
        assert grammar is not None
        matcher = LLMatcher(LLTokenizer(tokenizer(sample.dialect).to_str()), grammar, log_level=0)
        return matcher.consume_tokens(tokenizer(sample.dialect).encode(output).ids) and matcher.is_accepting()

    answer = sample.said('{"a":1}')
    started = sample.thought.removeprefix("<think>\n") if sample.dialect.name == "deepseek-r1" else sample.thought
    assert accepted("medium", started + answer)
    assert not accepted("medium", started + sample.said("no"))
    if sample.calls:
        assert accepted("medium", started + answer, tools=TOOLS)
        assert accepted("medium", started + sample.only_calls, tools=TOOLS)
        assert not accepted("medium", started + sample.only_calls)
    messages.append({"role": "assistant", "content": '{"a":'})
    if sample.dialect is not HARMONY:  # whose template ends an assistant's message
        assert accepted("none", '{"a":1}', continue_final_message=True, add_generation_prompt=False)


def test_a_prompt_that_ends_within_a_message_of_a_channel_goes_on_with_it() -> None:
    begun = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    assert begun_by(begun, HARMONY, "", False) == "open"
    assert begun_by(f"{begun}<|channel|>analysis<|message|>so", HARMONY, "", True) == "reasoning"
    assert begun_by(f"{begun}<|channel|>final<|message|>It is", HARMONY, "", True) == "text"
    pieces = OutputParser(OutputMarks(HARMONY, "text")).feed(" raining.<|return|>")
    assert pieces.text() == " raining."


def chat(messages: list[Any], **options: Any) -> Chat:
    return convert({"messages": messages, **options}, Chat)


CALLS = [
    {"id": f"functions.{name}:{at}", "type": "function", "function": {"name": name, "arguments": f'{{"n": {at}}}'}}
    for at, name in enumerate(("weather", "now"))
]
TURN: list[Any] = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": CALLS[0]["id"], "content": "rain"},
    {"role": "tool", "tool_call_id": CALLS[1]["id"], "content": '{"h": 7}'},
]


def test_harmony_has_a_message_for_each_call_which_its_result_follows(tmp_path: Path) -> None:
    prompt = render(chat(TURN), [], model_of(SAMPLES["harmony"], tmp_path))
    said = [
        "<|start|>assistant<|channel|>analysis<|message|>hm\n\nI look.<|end|>",
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"n": 0}<|call|>',
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>',
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"n": 1}<|call|>',
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"{\\"h\\": 7}"<|end|><|start|>assistant',
    ]
    assert prompt.endswith("".join(said))


def test_gemma_has_results_beside_the_calls(tmp_path: Path) -> None:
    prompt = render(chat(TURN), [], model_of(SAMPLES["gemma"], tmp_path))
    calls = "<|tool_call>call:weather{n:0}<tool_call|><|tool_call>call:now{n:1}<tool_call|>"
    results = '<|tool_response>response:weather{value:<|"|>rain<|"|>}<tool_response|>'
    results += "<|tool_response>response:now{h:7}<tool_response|>"
    assert calls + results in prompt
    assert "<|turn>tool" not in prompt


def test_kimi_has_its_own_names_of_calls_back(tmp_path: Path) -> None:
    prompt = render(chat(TURN), [], model_of(SAMPLES["kimi"], tmp_path))
    assert '<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{"n": 1}' in prompt
    assert "## Return of functions.now:1" in prompt
    pieces = OutputParser(OutputMarks(KIMI, "answer", 8, FUNCTIONS)).feed(SAMPLES["kimi"].calls)
    assert [piece.call.id for piece in pieces.of("call") if piece.call] == ["functions.weather:0", "functions.now:1"]


@pytest.mark.parametrize(
    ("effort", "shown"), [("none", "low"), ("minimal", "low"), ("high", "high"), ("xhigh", "high")]
)
def test_gpt_oss_is_asked_for_the_efforts_that_it_knows(tmp_path: Path, effort: str, shown: str) -> None:
    model = model_of(SAMPLES["harmony"], tmp_path)
    for asked in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"reasoning_effort": effort}}):
        assert f"Reasoning: {shown}<|end|>" in render(chat(TURN[:1], **asked), [], model)
    off = render(chat(TURN[:1], chat_template_kwargs={"enable_thinking": False}), [], model)
    assert "Reasoning: low" in off


@pytest.mark.parametrize("name", ["hermes", "deepseek", "gemma"])
def test_thinking_is_turned_on_and_off_by_the_template_s_name_for_it(tmp_path: Path, name: str) -> None:
    sample = SAMPLES[name]
    model = model_of(sample, tmp_path)
    template = TEMPLATES[name]

    def begun(**options: Any) -> str:
        return begun_by(render(chat(TURN[:1], **options), [], model), sample.dialect, template, False)

    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": False}}):
        assert begun(**off) == "answer"
    for on in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        assert begun(**on) == ("reasoning" if name == "deepseek" else "open")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({}, "3", "3"),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, '["a"', '["a"'),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": None}, "null", None),
        ({"$ref": "#/$defs/N"}, "7", 7),
        ({"$ref": "#/$defs/Loop"}, "7", "7"),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ("no schema", "x", "x"),
    ],
)
def test_text_becomes_values_of_the_schema_s_types(schema: Any, text: str, value: Any) -> None:
    root = {"$defs": {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    assert json.loads(as_json(text, kinds(schema, root))) == value


def test_a_call_without_line_breaks_is_read_too() -> None:
    glm = SAMPLES["glm"].dialect
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value> K </arg_value></tool_call><tool_call>now</tool_call>"
    pieces = OutputParser(OutputMarks(glm, "answer", 8, FUNCTIONS)).feed(text)
    assert [piece.text for piece in pieces.of("call")] == ['{"city": " K "}', "{}"]


@pytest.mark.parametrize("end", ["</function>\n</tool_call>", "</function>", "</function>\n\n"])
def test_a_call_of_qwen_that_lacks_its_first_or_last_mark_is_one(end: str) -> None:
    text = f"So:\n<function=weather>\n<parameter=city>\nK\n</parameter>\n{end}<function=now>{end}"
    pieces = whole(OutputParser(OutputMarks(SAMPLES["qwen-xml"].dialect, "answer", 8, FUNCTIONS)), text)
    assert [(piece.kind, piece.text) for piece in pieces] == [
        ("text", "So:"),
        ("call", '{"city": "K"}'),
        ("call", "{}"),
    ]


HEADERS = [
    "<|channel|>commentary to=functions.now<|message|>",
    "<|channel|>commentary to=functions.now json<|message|>",
    "<|channel|>commentary to=functions.now<|constrain|>json<|message|>",
    " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_call_of_harmony_has_its_recipient_anywhere_in_the_header(header: str) -> None:
    pieces = whole(OutputParser(OutputMarks(HARMONY, "open", 8, FUNCTIONS)), f"{header}{{}}")
    assert [piece.call.name for piece in pieces if piece.call] == ["now"]
    form = AnswerForm(Vocabulary(tokenizer(HARMONY)).added, HARMONY, "open")
    grammar = tool_grammar([convert({"function": {"name": "now"}}, Tool)], True, form)
    matcher = LLMatcher(LLTokenizer(tokenizer(HARMONY).to_str()), grammar, log_level=0)
    assert matcher.consume_tokens(tokenizer(HARMONY).encode(f"{header}{{}}").ids)


def whole(parser: OutputParser, text: str) -> list[OutputPiece]:
    pieces = parser.feed(text)
    pieces.extend(parser.flush())
    return list(pieces)


def test_gemma_may_think_again_behind_a_call() -> None:
    text = "<|channel>thought\na<channel|>x<|tool_call>call:now{}<tool_call|><|channel>thought\nb<channel|>y"
    pieces = OutputParser(OutputMarks(GEMMA, "open", 8, FUNCTIONS)).feed(text)
    assert [piece.kind for piece in pieces] == ["reasoning", "text", "call", "reasoning", "text"]


def test_the_tokenizer_of_the_other_tests_speaks_hermes() -> None:
    assert dialect_of("", byte_level_tokenizer().get_vocab()) is HERMES


def test_whether_text_is_within_reasoning_is_known_as_it_comes() -> None:
    parser = OutputParser(OutputMarks(SAMPLES["qwen-xml"].dialect, "open", 8, FUNCTIONS))
    for text, reasoning in (("<think>Hm", True), (", well", True), ("</think>It", False), (" rains.", False)):
        parser.feed(text)
        assert parser.reasoning == reasoning
