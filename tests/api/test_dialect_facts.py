"""Outputs of every family become reasoning, text and calls: whole, and in pieces of any size.

The outputs restate the families' chat templates, and facts that the tests of other servers hold.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.dialect_kit import ANSWER, ARGUMENTS, FUNCTIONS, SAMPLES, THOUGHT, Sample, tokenizer
from support.dialect_templates import TEMPLATES
from support.front_kit import write_model
from support.grammars import first
from test_text_parts import cut

from edgemoe.api.dialects.dialect import DIALECTS, PLAIN, Dialect, OutputMarks, OutputStart, begun_by, dialect_of
from edgemoe.api.dialects.output_parser import OutputParser
from edgemoe.api.dialects.tool_calls import OutputPieces
from edgemoe.api.endpoints.chat_completions import chat_generation
from edgemoe.api.generate.generation import Generation, RequestContext
from edgemoe.api.schema import Chat, convert
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.types.request import NOBODY, Emission, RequestLimits

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()
BY_NAME = {dialect.name: dialect for dialect in (*DIALECTS, PLAIN)}
WRITE: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "n": {"type": "number"}, "at": {}},
}
OFFERED: dict[str, Any] = {
    "write": WRITE | {"properties": WRITE["properties"] | {"at": {"type": "object"}}},
    "now": None,
}


@dataclass(frozen=True)
class Fact:
    """An output, and its parts."""

    dialect: str
    output: str
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names, and arguments letter by letter
    reasoning: str = ""
    begun: OutputStart = "open"


def xml(parameters: str) -> str:
    return f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"


def glm(pairs: str) -> str:
    return f"<tool_call>write\n{pairs}\n</tool_call>"


A = '{"path": "a"}'
CALL = [("write", A)]
TWO = [("write", A), ("now", "{}")]
NUMBERS = '{"n": 1.50, "at": {"z": 1e5, "a": [ ], "z": "\\u00e9\\/"}}'  # that no encoder writes so
EXACT = [("write", NUMBERS)]
LISTED = f'[{{"name": "write", "arguments": {A}}}, {{"name": "now", "arguments": {{}}}}]'
FLIPPED = f'[{{"arguments": {A}, "name": "write"}}]'
SEEK, SEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SEEK_CALL = f"<｜tool▁call▁begin｜>write<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
FENCED = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{A}\n```<｜tool▁call▁end｜>"
KIMI_CALL = f"<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{A}<|tool_call_end|>"
XML_CALL = xml("<parameter=path>\na\n</parameter>\n")
GLM_CALL = glm("<arg_key>path</arg_key>\n<arg_value>a</arg_value>")
MINIMAX_CALL = '<invoke name="write">\n<parameter name="path">a</parameter>\n</invoke>\n'
TEXT = "\nx = 1\n"
MINIMAX_TEXT = f'<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">{TEXT}</parameter>\n</invoke>\n'
GEMMA_CALL = '<|tool_call>call:write{path:<|"|>a<|"|>}<tool_call|>'
HERMES_CALL = f'<tool_call>\n{{"name": "write", "arguments": {A}}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
BARE_FIRST = '[{"name": "now", "arguments": {}}, {"name": "write", "arguments": {"n": 42}}]'
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"

FACTS = [
    # Qwen3: one object between marks
    Fact("hermes", HERMES_CALL, calls=CALL),
    Fact("hermes", f'So.\n<tool_call>{{"arguments": {A}, "name": "write"}}</tool_call>', "So.", CALL),
    Fact("hermes", f'<tool_call>\n{{"name": "write", "arguments": {A}}}', calls=CALL),
    Fact("hermes", f'<tool_call>\n{{"name": "write", "arguments": {A}}}\n', calls=CALL),
    Fact("hermes", f'<tool_call>\n{{"name": "write", "arguments": {NUMBERS}}}\n</tool_call>', calls=EXACT),
    Fact("hermes", f"<think>\nHm\n{HERMES_CALL}", "", CALL, "Hm"),
    Fact("hermes", f"Hm\n{HERMES_CALL}", "", CALL, "Hm", "reasoning"),
    Fact("hermes", "Hm and no end", "", [], "Hm and no end", "reasoning"),
    Fact("hermes", "<think>\nHm\n</think>\n\nHi", "Hi", [], "Hm", "reasoning"),
    Fact("hermes", "Hm</think>Hi", "Hi", [], "Hm", "reasoning"),
    Fact("hermes", OTHER_CALL, OTHER_CALL),
    Fact("hermes", "<tool_calls>[]", "<tool_calls>[]"),
    # ERNIE: an answer within marks
    Fact("ernie", "<think>\nHm\n</think>\n\n\n<response>\nHi\nyou\n</response>\n", "Hi\nyou", [], "Hm"),
    Fact("ernie", "abc\n</think>\n\n<response>\nHi", "Hi", [], "abc", "reasoning"),
    Fact("ernie", "abc</think>def", "def", [], "abc", "reasoning"),
    Fact("ernie", f"Hm\n</think>\n\n{HERMES_CALL}\n", "", CALL, "Hm", "reasoning"),
    Fact("ernie", f"<response>\nHi\n</response>\n{HERMES_CALL}\n", "Hi", CALL),
    # Hunyuan: a list within an answer within marks
    Fact("hunyuan", "<think>\nHm\n</think>\n<answer>\nHi\n</answer>", "Hi", [], "Hm"),
    Fact("hunyuan", "<think>\n\n</think>\n<answer>\nHi\n</answer>", "Hi"),
    Fact("hunyuan", "<think>\nThis\nThat\n</think>\n<answer>\nHi\nyou", "Hi\nyou", [], "This\nThat"),
    Fact("hunyuan", "<think>\nHm\n</think>\n<answer>\n", "", [], "Hm"),
    Fact("hunyuan", "<answer>\nHi\n</answer>", "Hi", begun="answer"),
    Fact("hunyuan", "Hi", "Hi"),
    Fact("hunyuan", "See <answer>x</answer>", "See <answer>x</answer>"),
    Fact("hunyuan", "<answer>\nThe tag </answer> ends it.\n</answer>\n", "The tag </answer> ends it."),
    Fact("hunyuan", f"<tool_calls>{LISTED}</tool_calls>", calls=TWO),
    Fact("hunyuan", f"<tool_calls>{LISTED}</tool_calls>\n</answer>", "</answer>", TWO),
    Fact("hunyuan", f"<answer>\n<tool_calls>{LISTED}</tool_calls>\n</answer>", "", TWO),
    Fact("hunyuan", f"I call. <tool_calls>{LISTED}</tool_calls>\nThanks!", "I call.Thanks!", TWO),
    Fact("hunyuan", f"<tool_calls>{LISTED}", calls=TWO),
    Fact("hunyuan", f"<think>\nHm <tool_calls>{LISTED}</tool_calls>", "", TWO, "Hm"),
    Fact("hunyuan", f"<tool_calls>{BARE_FIRST}</tool_calls>", calls=[("now", "{}"), ("write", '{"n": 42}')]),
    # Granite, in both of its releases' forms
    Fact("granite", f"<|tool_call|> {LISTED}", calls=TWO),
    Fact("granite", f"<tool_call>{LISTED}", calls=TWO),
    Fact("granite", f"<|tool_call|>{FLIPPED}", calls=CALL),
    Fact("granite", f"<|tool_call|>[\n  {LISTED[1:-1]}\n]", calls=TWO),
    Fact("granite", f"Let me.\n<|tool_call|> {LISTED}\nDone.", "Let me.Done.", TWO),
    Fact("granite", f'<|tool_call|>[{{"name": "write", "arguments": {NUMBERS}}}]', calls=EXACT),
    Fact(
        "granite",
        f'<|tool_call|> {{"name": "write", "arguments": {A}}}',
        f'<|tool_call|> {{"name": "write", "arguments": {A}}}',
    ),
    Fact("granite", '[{"name": "write"}]', '[{"name": "write"}]'),
    # Mistral's list
    Fact("mistral", f"[TOOL_CALLS] {LISTED}", calls=TWO),
    Fact("mistral", f"[TOOL_CALLS]{LISTED}", calls=TWO),
    Fact("mistral", f"[TOOL_CALLS] {FLIPPED}", calls=CALL),
    Fact("mistral", f'[TOOL_CALLS] [{{"name": "write", "arguments": {A}, "id": "abcdefgh9"}}]', calls=CALL),
    Fact("mistral", f"Hello[TOOL_CALLS] {LISTED}", "Hello", TWO),
    Fact("mistral", f"[TOOL_CALLS] {FLIPPED}[TOOL_CALLS] {FLIPPED}", calls=CALL * 2),
    Fact("mistral", "[TOOL_CALLS] not json at all", "[TOOL_CALLS] not json at all"),
    # DeepSeek
    Fact("deepseek", f"So{SEEK}{SEEK_CALL}{SEEK_END}", "So", CALL, begun="answer"),
    Fact("deepseek", f"Hm</think>{SEEK}{SEEK_CALL}{SEEK_END}", "", CALL, "Hm", "reasoning"),
    Fact("deepseek", f"Hm{SEEK}{SEEK_CALL}", "", CALL, "Hm", "reasoning"),
    Fact("deepseek", f"So{SEEK_CALL}", "So", CALL),
    Fact("deepseek", f"{SEEK}{SEEK_CALL.removesuffix('<｜tool▁call▁end｜>')}", "", CALL),
    Fact("deepseek", f"{SEEK}{SEEK_CALL.replace(A, NUMBERS)}{SEEK_END}", "", EXACT),
    Fact("deepseek-r1", f"<think>\nHm\n</think>\n\nSo{SEEK}{FENCED}{SEEK_END}", "So", CALL, "Hm"),
    Fact("deepseek-r1", f"Hm\n</think>\n\nSo{SEEK}{FENCED}\n{FENCED}{SEEK_END}", "So", CALL * 2, "Hm", "reasoning"),
    Fact("deepseek-r1", f"<think>\nHm\n</think>{FENCED}", "", CALL, "Hm", "reasoning"),
    Fact("deepseek-r1", "<think>\nHm\n</think>\n\nHi", "Hi", [], "Hm"),
    # Kimi
    Fact(
        "kimi",
        f"<think>Hm</think>So<|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>",
        "So",
        CALL,
        "Hm",
    ),
    Fact("kimi", f"So{KIMI_CALL}", "So", CALL),
    Fact("kimi", f"<think>Hm{KIMI_CALL}<|tool_calls_section_end|>", "", CALL, "Hm"),
    Fact("kimi", f"<|tool_calls_section_begin|>{KIMI_CALL.replace(A, NUMBERS)}<|tool_calls_section_end|>", "", EXACT),
    # Qwen's XML
    Fact("qwen-xml", f"So\n{XML_CALL}", "So", CALL),
    Fact("qwen-xml", f"<think>\nHm\n{XML_CALL}", "", CALL, "Hm"),
    Fact(
        "qwen-xml",
        xml("<parameter=path>\na\n<parameter=text>\nb\n</parameter>\n"),
        "",
        [("write", '{"path": "a", "text": "b"}')],
    ),
    Fact("qwen-xml", xml("<parameter=path>\na\n"), "", CALL),
    Fact("qwen-xml", xml("<parameter=text>\n\na\n\n</parameter>\n"), "", [("write", '{"text": "\\na\\n"}')]),
    Fact(
        "qwen-xml",
        xml('<parameter=at>\n{"z": 1e5, "a": 1.50}\n</parameter>\n'),
        "",
        [("write", '{"at": {"z": 1e5, "a": 1.50}}')],
    ),
    # GLM
    Fact("glm", f"<think>Hm</think>\nSo\n{GLM_CALL}", "So", CALL, "Hm"),
    Fact("glm", f"<think>Hm{GLM_CALL}", "", CALL, "Hm"),
    Fact(
        "glm",
        glm("<arg_key>path</arg_key>\n<arg_value>a\n<arg_key>text</arg_key>\n<arg_value>b</arg_value>"),
        "",
        [("write", '{"path": "a", "text": "b"}')],
    ),
    Fact("glm", glm("<arg_key>n</arg_key>\n<arg_value>1.50</arg_value>"), "", [("write", '{"n": 1.50}')]),
    # MiniMax, whose values have no layout
    Fact(
        "minimax",
        f"Hm\n</think>\n\nSo\n<minimax:tool_call>\n{MINIMAX_CALL}</minimax:tool_call>",
        "So",
        CALL,
        "Hm",
        "reasoning",
    ),
    Fact("minimax", f"Hm\n<minimax:tool_call>\n{MINIMAX_CALL}</minimax:tool_call>", "", CALL, "Hm", "reasoning"),
    Fact("minimax", f"So\n{MINIMAX_CALL}", "So", CALL, begun="answer"),
    Fact(
        "minimax",
        f"{MINIMAX_TEXT}</minimax:tool_call>",
        "",
        [("write", '{"text": "\\nx = 1\\n"}')],
    ),
    # Gemma
    Fact("gemma", f"<|channel>thought\nHm<channel|>So{GEMMA_CALL}", "So", CALL, "Hm"),
    Fact("gemma", "<|channel>thought<channel|>Hi", "Hi"),
    Fact("gemma", f"<|channel>thought\nHm{GEMMA_CALL}", "", CALL, "Hm"),
    Fact("gemma", GEMMA_CALL.removesuffix("<tool_call|>"), "", CALL),
    Fact("gemma", "<|tool_call>call:write{n:1.50}<tool_call|>", "", [("write", '{"n": 1.50}')]),
    # gpt-oss: headers are never shown
    Fact("harmony", f"{ANALYSIS}Hm<|end|><|start|>assistant{FINAL}Hi", "Hi", [], "Hm"),
    Fact(
        "harmony", f"<|channel|>commentary to=assistant{ANALYSIS}Hm<|end|><|start|>assistant{FINAL}Hi", "Hi", [], "Hm"
    ),
    Fact("harmony", '<|channel|>commentary to=browser.search code<|message|>{"q": 1}', '{"q": 1}'),
    Fact("harmony", f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{A}", "", CALL),
    Fact("harmony", "<|channel|>commentary to=functions.write <|constrain|>json<|message|>", ""),
    Fact("harmony", f"<|channel|>final <|constrain|>json<|message|>{A}", A),
    Fact("harmony", f"{FINAL}Hi<|end|><|start|>assistant<|channel|>comm", "Hi"),
    Fact("harmony", "<|channel|>some thing new<|message|>Hi", "Hi"),
    # Others have no form of calls
    Fact("plain", "<think>\nHm\n</think>\n\nHi", "Hi", [], "Hm"),
]


def parsed(fact: Fact, chunks: list[str]) -> OutputPieces:
    dialect = BY_NAME[fact.dialect]
    most = 8 if dialect.takes_tool_calls else 0
    parser, pieces = OutputParser(OutputMarks(dialect, fact.begun, most, OFFERED)), OutputPieces()
    for chunk in chunks:
        pieces.extend(parser.feed(chunk))
    pieces.extend(parser.flush())
    pieces.drop_broken_tool_calls()
    return pieces


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.dialect}: {fact.output[:60]!r}")
def test_an_output_has_its_parts_in_pieces_of_any_size(fact: Fact) -> None:
    for size in (0, 1, 2, 3, 7, 31):
        borders = list(range(0, len(fact.output), size)) if size else []
        pieces = parsed(fact, cut(fact.output, borders))
        calls = pieces.of("call")
        assert pieces.text("reasoning") == fact.reasoning, size
        assert pieces.text() == fact.text, size
        assert [(piece.call.name, piece.text) for piece in calls if piece.call] == fact.calls, size
        assert {piece.ended for piece in calls} <= {"complete"}, size


def families() -> dict[str, list[str]]:
    """Returns the dialects of each family in docs/models.md; none for a family whose template was not at hand."""
    table = PAGE.partition("| family |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    assert all(cells[4] == "by its template" or "`" in cells[4] for cells in rows)
    return {cells[1]: re.findall(r"`([\w-]+)`", cells[4]) for cells in rows}


def test_every_family_has_a_dialect_and_every_dialect_facts_and_a_family() -> None:
    named = families()
    assert len(named) > 15
    spoken = {name for names in named.values() for name in names}
    assert spoken == set(BY_NAME) == {fact.dialect for fact in FACTS}


# Parts of the families' templates by which a dialect is recognised, of templates without tools, too.
SIGNS = {
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "ernie": "<tool_call></tool_call> <think> '\\n<response>\\n' ~ message.content ~ '\\n</response>\\n'",
    "hunyuan": "'<|startoftext|>' + message['content'] + '<|extra_0|>'",
    "granite": "'<|start_of_role|>' + message['role'] + '<|end_of_role|>'",
    "mistral": "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]",
    "plain": "<|im_start|> tools",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments",
    "deepseek-r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json",
    "minimax": "<minimax:tool_call> <response>",
    "glm": "<tool_call>{function-name}<arg_key></tool_call>",
    "qwen-xml": "<tool_call><function=NAME></function></tool_call>",
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_template_tells_its_dialect(name: str) -> None:
    assert dialect_of(SIGNS[name], ()) is BY_NAME[name]


def test_granite_s_later_templates_speak_hermes() -> None:
    assert dialect_of("<|start_of_role|> <tool_call></tool_call>", ()).name == "hermes"


R1 = BY_NAME["deepseek-r1"]


@pytest.mark.parametrize(
    ("template", "tokens", "prompt", "begun"),
    [
        ("<think>", (), "<｜Assistant｜>", "open"),
        ("content.split('</think>')[-1]", (), "<｜Assistant｜>", "open"),
        ("nothing of it", ("<think>", "</think>"), "<｜Assistant｜>", "open"),
        ("nothing of it", (), "<｜Assistant｜>", "answer"),
        ("'<think>\\n'", (), "<｜Assistant｜><think>\n", "reasoning"),
        ("</think>", (), "<｜Assistant｜></think>", "answer"),
        ("nothing of it", ("<think>",), "<｜Assistant｜><think>\n", "reasoning"),
    ],
)
def test_a_model_may_reason_where_its_template_or_its_tokens_have_a_mark_of_it(
    template: str, tokens: tuple[str, ...], prompt: str, begun: OutputStart
) -> None:
    assert begun_by(prompt, R1, template, continued=False, tokens=tokens) == begun


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema or {}}} for name, schema in FUNCTIONS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}
LIMITS = RequestLimits(context_tokens=8192, vocab=1000)
EACH = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())


@cache
def folders() -> dict[str, TextModel]:
    return {}


@pytest.fixture
def model(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    name = sample.dialect.name
    if name not in folders():
        folder = tmp_path_factory.mktemp(name) / "model"
        folders()[name] = TextModel(write_model(folder, TEMPLATES[name], tokenizer(sample.dialect)))
    return folders()[name]


def prepared(model: TextModel, **options: Any) -> Generation:
    asked = {"messages": [{"role": "user", "content": "go"}], "reasoning_effort": "medium", **options}
    context = RequestContext(model, "tiny", (), LIMITS, NOBODY.principal, shares_prefixes=False)
    return chat_generation(convert(asked, Chat), context, "chatcmpl")


def answered(dialect: Dialect, output: str, generation: Generation) -> tuple[OutputPieces, str]:
    """Returns the pieces that a generation makes of the tokens of `output`, and its finish reason."""
    choice, pieces = generation.choices[0], OutputPieces()
    for index, token in enumerate(tokenizer(dialect).encode(output).ids):
        choice.add(Emission(request="r", attempt=1, index=index, token=token))
        pieces.extend(choice.delta().pieces)
        if choice.finish:
            break
    else:
        choice.add(Emission(request="r", attempt=1, index=choice.tokens, finish="stop"))
        pieces.extend(choice.delta().pieces)
    return pieces, choice.finish


def called(pieces: OutputPieces) -> list[tuple[str, Any]]:
    return [(piece.call.name, json.loads(piece.text)) for piece in pieces.of("call") if piece.call]


def written(sample: Sample) -> str:
    """Returns the output without the mark that R1's prompt has written already."""
    return sample.output.removeprefix("<think>\n") if sample.dialect is R1 else sample.output


@EACH
def test_calls_of_a_request_s_tools(sample: Sample, model: TextModel) -> None:
    both = list(zip(sample.names, [ARGUMENTS, {}], strict=False))
    for choice, parallel, calls in (
        ("auto", None, both),
        ("required", None, both),
        (None, False, both[:1]),
        (NAMED, None, both[:1]),
    ):
        options = {"tool_choice": choice, "parallel_tool_calls": parallel}
        asked = {"tools": TOOLS, **{key: value for key, value in options.items() if value is not None}}
        pieces, finish = answered(sample.dialect, written(sample), prepared(model, **asked))
        assert (called(pieces), finish) == (calls, "tool_calls"), choice
        assert (pieces.text(), pieces.text("reasoning")) == (ANSWER, THOUGHT)


@EACH
def test_without_tools_nothing_is_called(sample: Sample, model: TextModel) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        generation = prepared(model, **options)
        pieces, finish = answered(sample.dialect, written(sample), generation)
        assert (called(pieces), finish, generation.grammar) == ([], "stop", None)
        assert pieces.text().startswith(ANSWER)
        assert pieces.text("reasoning") == THOUGHT


@EACH
def test_without_reasoning_all_is_the_answer(sample: Sample, model: TextModel) -> None:
    generation = prepared(model, reasoning_effort="none", tools=TOOLS)
    opened = sample.dialect.wrapper[0] + "\n" if sample.dialect.wrapper else ""
    output = opened + sample.said(ANSWER) if sample.dialect.call is not None else sample.output
    pieces, _ = answered(sample.dialect, output, generation)
    thinks_always = sample.dialect.name in ("minimax", "deepseek-r1")  # whose prompts open it
    assert (pieces.text("reasoning") if thinks_always else pieces.text()) == ANSWER


@EACH
def test_a_required_call_whose_schema_cannot_be_followed_takes_any_arguments(sample: Sample, model: TextModel) -> None:
    odd = {"type": "object", "properties": {"city": {"type": "array", "uniqueItems": True}}}
    for extra in ({}, {"strict": True}):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": odd, **extra}}]
        choice = prepared(model, tools=tools, tool_choice="required").grammar
        textual = sample.dialect.name in ("gemma",)  # whose grammar has the types of parameters only
        if extra and not textual:
            with pytest.raises(InvalidRequest, match="uniqueItems"):
                first(choice)
        else:
            assert first(choice) is not None


FORMATS = ["password", "path", "binary", "int32", "json-pointer", "uri-reference", "date-time", "uuid", "email"]


@EACH
@pytest.mark.parametrize("format", FORMATS)
def test_unknown_formats_of_texts_are_notes(sample: Sample, model: TextModel, format: str) -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": format}, "b": {"const": {"format": format}}},
        "required": ["format"],
    }
    asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert first(prepared(model, response_format=asked).grammar) is not None
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    assert first(prepared(model, tools=tools, tool_choice="required").grammar) is not None


def test_tools_are_refused_by_name_where_the_form_of_calls_is_unknown(tmp_path: Path) -> None:
    known = tokenizer(BY_NAME["mistral"])
    for template, said in (("{{ tools }}{{ messages }}", "in no form that is known"), ("{{ messages }}", "no place")):
        text = TextModel(write_model(tmp_path / said[:2], f"<|begin|>{template}", known))
        text.dialect = PLAIN
        with pytest.raises(InvalidRequest, match=said) as refused:
            prepared(text, tools=TOOLS)
        assert refused.value.param == "tools"
        assert prepared(text).choices
