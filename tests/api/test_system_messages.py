"""The system's messages between turns reach every model, under any chat template."""

from __future__ import annotations

from typing import Any

import pytest
from support.dialect_templates import TEMPLATES
from support.front_kit import TEMPLATE, write_model

from edgemoe.api.endpoints import anthropic, responses
from edgemoe.api.endpoints.chat_completions import render
from edgemoe.api.schema import convert
from edgemoe.api.text.tokenizer import TextModel

FIRST_ONLY = "{%- if message.role == 'system' and not loop.first %}@{% endif %}"
HEAD = "{%- for message in messages %}"
STRICT = """\
{%- set ns = namespace(turn='') %}
{%- for message in messages %}
    {%- if message.role == ns.turn or (message.role == 'system' and not loop.first) %}
        {{- raise_exception('roles must alternate, and the system speaks first') }}
    {%- endif %}
    {%- set ns.turn = message.role %}
    {{- '[' ~ message.role ~ ']' ~ message.content }}
{%- endfor %}
"""
TRIED = {
    **TEMPLATES,
    "first one raises": TEMPLATE.replace(HEAD, HEAD + FIRST_ONLY.replace("@", "{{ raise_exception('no') }}")),
    "others are dropped": TEMPLATE.replace(HEAD, HEAD + FIRST_ONLY.replace("@", "{% continue %}")),
    "roles alternate": STRICT,
}
CALL = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
PLACES = {
    "behind the user": [("user", "hello"), ("system", "LATE")],
    "twice behind the user": [("user", "hello"), ("system", "LATE"), ("system", "LATER")],
    "behind an answer": [("user", "hello"), ("assistant", "yes"), ("system", "LATE"), ("user", "go on")],
    "twice behind an answer": [
        ("user", "hello"),
        ("assistant", "yes"),
        ("system", "LATE"),
        ("system", "LATER"),
        ("user", "go on"),
    ],
    "last, behind an answer": [("user", "hello"), ("assistant", "yes"), ("system", "LATE")],
    "among several at the start": [("system", "FIRST"), ("system", "LATE"), ("system", "LATER"), ("user", "hello")],
}


@pytest.fixture(scope="module", params=TRIED, ids=str)
def tried(request: Any, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel(write_model(tmp_path_factory.mktemp("model"), TRIED[request.param]))


@pytest.mark.parametrize("place", PLACES)
def test_all_words_reach_the_model_in_order(tried: TextModel, place: str) -> None:
    turns = [{"role": role, "content": text} for role, text in PLACES[place]]
    as_items, *_ = responses.as_chat(convert({"input": turns}, responses.ResponsesBody))
    as_turns, _ = anthropic.as_chat(convert({"messages": turns, "max_tokens": 9}, anthropic.MessagesBody))
    for chat in (as_items, as_turns):
        prompt = render(chat, [], tried)
        found = [prompt.index(text) for _, text in PLACES[place]]
        assert found == sorted(found) or tried.dialect.name == "deepseek"  # whose template puts them all in front
        assert prompt.count("LATER") == sum(text == "LATER" for _, text in PLACES[place])


def test_a_result_of_a_tool_absorbs_the_text_after_it(tried: TextModel) -> None:
    if "roles must alternate" in tried.template_text:
        pytest.skip("it has no tools")
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "RESULT"}]},
        {"role": "system", "content": "LATE"},
    ]
    chat, _ = anthropic.as_chat(convert({"messages": turns, "max_tokens": 9}, anthropic.MessagesBody))
    prompt = render(chat, [], tried)
    assert "RESULT" in prompt
    assert "LATE" in prompt
