"""Chat templates render as transformers renders them, and refuse as a client's error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.front_kit import TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from edgemoe.api.text.chat_template import ChatTemplate, special_tokens
from edgemoe.errors import CheckpointError, InvalidRequest

MIXTRAL = """\
{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""
FEATURES = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {{- message.role.strip() ~ ': ' ~ message.content | trim }}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
{%- endfor %}
{{ ns.last }} {{ tools | tojson(indent=2) }} {{ {'b': '<é&>', 'a': [1, none, true]} | tojson }}
{%- if enable_thinking is defined and not enable_thinking %} quiet{% endif %}
{%- if add_generation_prompt %} >{% endif %}
"""
MESSAGES = [
    {"role": "user", "content": " Hallo <b>Größe</b> "},
    {"role": "assistant", "content": "東京"},
    {"role": "user", "content": "more"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [TEMPLATE, MIXTRAL, FEATURES], ids=["chatml", "mixtral", "features"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}], ids=["", "quiet"])
def test_a_prompt_equals_transformers_rendering(source: str, tools: list[dict] | None, extra: dict) -> None:
    theirs, _ = render_jinja_template([MESSAGES], tools, None, source, add_generation_prompt=True, **TOKENS, **extra)
    assert ChatTemplate({"default": source}, TOKENS).render(MESSAGES, tools, extra=extra) == theirs[0]


def test_the_tool_use_template_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, TOOLS) == "with tools"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].content.x.y }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{% set x = messages.append(1) %}", "refuses"),
    ],
)
def test_a_template_s_refusal_is_the_client_s_error(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        ChatTemplate({"default": source}, {}).render(MESSAGES)


def test_callers_cannot_replace_the_template_s_variables() -> None:
    template = ChatTemplate({"default": "{{ messages | length }}{{ add_generation_prompt }}"}, {})
    assert template.render(MESSAGES, extra={"messages": [], "add_generation_prompt": 1, "self": 2}) == "3True"


def test_templates_are_found_in_every_place_that_models_keep_them(tmp_path: Path) -> None:
    listed = {"chat_template": [{"name": "default", "template": "listed"}, {"name": "rag", "template": "no"}]}
    found = [ChatTemplate.load(tmp_path, {}), ChatTemplate.load(tmp_path, listed)]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    found.append(ChatTemplate.load(tmp_path, listed))
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    found.append(ChatTemplate.load(tmp_path, listed))
    assert [one and one.render(MESSAGES) for one in found] == [None, "listed", "from json", "from jinja"]


def test_special_tokens_are_read_in_both_spellings() -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_broken_template_is_named_when_the_model_is_opened() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        _ = ChatTemplate({"default": "{% if %}"}, {}).compiled
