"""Conversations with calls and results go back to a template as it wants them, however it writes them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.dialect_kit import SAMPLES, Sample, tokenizer
from support.dialect_templates import TEMPLATES
from support.front_kit import write_model

from edgemoe.api.dialects.dialect import HARMONY, HistoryForm
from edgemoe.api.endpoints.chat_completions import render
from edgemoe.api.schema import Chat, convert
from edgemoe.api.text.bounded_text import BoundedText, text_command
from edgemoe.api.text.chat_template import AS_OPENAI, ChatTemplate, for_template
from edgemoe.api.text.tokenizer import TextModel

ARGUMENTS = '{"city": "Köln \\"Süd\\" \\\\ <b>", "n": 3}'
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": ARGUMENTS}}
EACH_CALL = "{% for m in messages %}{% for c in m.tool_calls or [] %}@{% endfor %}{% endfor %}"
# The ways in which published templates write the arguments of past calls.
WAYS = {
    "text behind text": "{{ 'f' + c['function']['arguments'] + 'g' }}",
    "text before text": "{{ c.function.arguments + 'g' }}",
    "joined text": "{{ 'f' ~ c.function.arguments ~ 'g' }}",
    "a value": "f{{ c.function.arguments }}g",
    "a filter": "f{{ c.function.arguments | string }}g",
    "JSON": "{{ 'f' + c.function.arguments | tojson + 'g' }}",
    "JSON unless it is text": "{% set a = c.function.arguments %}f{{ a if a is string else a | tojson }}g",
    "JSON if it is a mapping": "{% set a = c.function.arguments %}f{{ a | tojson if a is mapping }}g",
    "JSON of the function": "{{ c.function | tojson }}",
    "each argument": "{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v | tojson }};{% endfor %}",
    "each by a filter": "{% for k, v in c.function.arguments | items %}{{ k }}:{{ v | tojson }};{% endfor %}",
}


def chat(messages: list[Any], **options: Any) -> Chat:
    return convert({"messages": messages, **options}, Chat)


def rendered(template: str, messages: list[Any], history: HistoryForm = AS_OPENAI) -> str:
    return ChatTemplate({"default": template}, {}).render(for_template(chat(messages).messages, history, template))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", [ARGUMENTS, json.loads(ARGUMENTS)], ids=["text", "object"])
def test_arguments_are_json_once_however_a_template_writes_them(way: str, given: Any) -> None:
    calls = [{**CALL, "function": {"name": "w", "arguments": given}}]
    prompt = rendered(EACH_CALL.replace("@", WAYS[way]), [{"role": "assistant", "content": None, "tool_calls": calls}])
    if "each" in way:
        assert prompt == 'city:"Köln \\"Süd\\" \\\\ <b>";n:3;'
    else:
        assert ARGUMENTS in prompt
        assert prompt.count("\\") == ARGUMENTS.count("\\")


@pytest.mark.parametrize("way", WAYS)
async def test_so_they_are_in_the_process_that_makes_prompts(way: str, tmp_path: Path) -> None:
    model = TextModel(write_model(tmp_path, EACH_CALL.replace("@", WAYS[way])))
    texts = BoundedText(text_command(tmp_path))
    asked = chat([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert await asyncio.to_thread(render, asked, [], texts.of(model, "")) == render(asked, [], model)
    await texts.close()


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"a"'])
def test_arguments_that_are_no_object_are_the_text_that_came(text: str) -> None:
    calls = [{**CALL, "function": {"name": "w", "arguments": text}}]
    prompt = rendered(
        EACH_CALL.replace("@", "{{ c.function.arguments }}"), [{"role": "assistant", "tool_calls": calls}]
    )
    assert prompt == (text or "{}")


NO_TEXT = {
    "{% if m.content is none %}none{% else %}{{ m.content + '.' }}{% endif %}": "none",
    "{% if m['content'] is not none %}{{ m['content'] + '.' }}{% endif %}none": "none",
    "{{ m.content + '.' }}": ".",
    "{% set content = m.content %}{% if '</think>' in content %}no{% endif %}"
    "{% if content is none %}none{% else %}{{ content + '.' }}{% endif %}": ".",
    "{{ m.content.strip() }}{% if m.content is none %}none{% endif %}": "",
    "{% if m.content is string %}{{ m.content }}.{% endif %}": ".",
    "{% if m.content %}no{% endif %}none": "none",
}


@pytest.mark.parametrize("template", NO_TEXT)
@pytest.mark.parametrize("given", [None, "", []], ids=["null", "empty", "no parts"])
def test_a_message_that_only_calls_has_no_text_in_the_template_s_sense(template: str, given: Any) -> None:
    whole = f"{{% for m in messages %}}{template}{{% endfor %}}"
    assert rendered(whole, [{"role": "assistant", "content": given, "tool_calls": [CALL]}]) == NO_TEXT[template]


def test_parts_of_a_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    for role in ("system", "user", "assistant", "tool"):
        assert rendered("{{ messages[0].content }}", [{"role": role, "content": parts}]) == "ab"


def results(calls: list[Any], *given: dict[str, str]) -> list[Any]:
    return [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", "content": "x"} | one for one in given)]


def test_results_have_the_names_and_ids_of_their_calls() -> None:
    calls = [{**CALL, "id": id, "function": {"name": name, "arguments": "{}"}} for id, name in (("1", "v"), ("2", "w"))]
    template = "{% for m in messages if m.role == 'tool' %}{{ m.name }}={{ m.tool_call_id }} {% endfor %}"
    assert rendered(template, results(calls, {"tool_call_id": "2"}, {"tool_call_id": "1"})) == "w=2 v=1 "
    assert rendered(template, results(calls, {}, {})) == "v=1 w=2 "
    assert rendered(template, results(calls, {"name": "own", "tool_call_id": "2"}, {})) == "own=2 v=1 "
    twice = [*results(calls[:1], {"tool_call_id": "1"}), *results([{**calls[1], "id": "1"}], {"tool_call_id": "1"})]
    assert rendered(template, twice) == "v=1 w=1 "
    assert rendered("{{ messages[0].name }}|", [{"role": "tool", "tool_call_id": "7", "content": "x"}]) == "|"


def test_ids_are_as_long_as_a_template_demands() -> None:
    calls = [{**CALL, "id": id} for id in ("call_0123456789abcdef", "abcdefgh9", "abcdefg-9")]
    messages = results(calls, *({"tool_call_id": call["id"]} for call in calls))
    called, *answered = for_template(chat(messages).messages, HistoryForm(id_chars=9))
    ids = [call["id"] for call in called["tool_calls"]]
    assert ids == [one["tool_call_id"] for one in answered]
    assert ids[1] == "abcdefgh9"
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    assert len(set(ids)) == 3


def test_calls_are_text_for_a_template_that_has_no_place_for_them() -> None:
    template = "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}"
    history = HistoryForm(tool_calls_in_text="<|tool_call|>", result_role="tool_response")
    messages = [{"role": "assistant", "content": "So", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}]
    call = f'<|tool_call|>[{{"name": "w", "arguments": {ARGUMENTS}}}]'
    assert rendered(template, messages, history) == f"assistant:So{call};tool:x;"
    assert "tool_response:x" in rendered(template + "{# tool_response #}", messages, history)
    own = "{% for m in messages %}{{ m.content }}{{ 'own' if m.tool_calls }}{% endfor %}"
    assert rendered(own, messages, history) == "Soownx"


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_a_turn_of_each_dialect_is_read_back_from_its_own_prompt(sample: Sample, tmp_path: Path) -> None:
    """Arguments, results and ids of two calls in one turn stand in the prompt once and in order."""
    model = TextModel(write_model(tmp_path, TEMPLATES[sample.dialect.name], tokenizer(sample.dialect)))
    calls = [
        {**CALL, "id": f"functions.w:{at}", "function": {"name": "w", "arguments": f'{{"n": {at}7}}'}} for at in (1, 2)
    ]
    answers = [{"tool_call_id": call["id"], "content": f"result {at}"} for at, call in enumerate(calls)]
    said = [{"role": "user", "content": "go"}, *results(calls, *answers)]
    prompt = render(chat(said), [], model)
    for text in ("17", "27", "result 0", "result 1"):
        assert prompt.count(text) == 1, text
    assert prompt.index("17") < prompt.index("27")
    assert prompt.index("result 0") < prompt.index("result 1")
    assert (prompt.index("result 0") < prompt.index("27")) == (sample.dialect is HARMONY)
    assert "\\" not in prompt.split("go", 1)[1].replace("\\n", "")
