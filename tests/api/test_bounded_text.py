"""Templates and tokenizers of a checkpoint run in bounded processes: an endless one costs only its request."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import httpx
import msgspec
import pytest
from support.front_kit import http_client, running, settings_for, write_model
from support.gate import in_gate

from edgemoe.api.text.bounded_text import LOAD_BYTES, BoundedText, RenderQuestion, text_command
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import CheckpointError, InvalidRequest
from edgemoe.helper.child_process import frame

LOAD_S, TEXT_S = 3.0, 0.2  # a processor's, in place of the daemon's, which are for slow machines
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Attacks of a template, on a message that asks for them: endless time, any memory, or the interpreter for itself.
ATTACKS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * (10 ** 10) }}",
    "a large number": "{% set n = 9 %}{{ (n ** 9999999) | string }}",
    "a power of powers": "{% set n = 9 %}{{ n ** (n ** n) }}",
    "a doubling loop": "{% set at = namespace(text='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}"
    "{% set at.text = at.text + at.text %}{% endfor %}{{ at.text }}",
    "a doubling list": "{% set at = namespace(all=[1]) %}{% for i in range(60) %}"
    "{% set at.all = at.all + at.all %}{% endfor %}{{ at.all | length }}",
    "padding": "{% set n = 1 %}{{ '%1000000000d' | format(n) }}",
    "centring": "{{ 'a' | center(10 ** 10) }}",
    "recursion": "{% macro deeper(n) %}{{ deeper(n + 1) }}{% endmacro %}{{ deeper(0) }}",
    "a wide product": "{{ (range(90000) | list * 9000) | join('x') | length }}",
    "replacing": "{{ ('a' * 100000) | replace('a', 'b' * 1000000) | length }}",
    "sixteen million letters": "{{ 'a' * 17000000 }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "a cycler": "{{ cycler(*range(9)) }}",
    "macros that call each other": "{% macro a(n) %}{{ b(n) }}{{ b(n) }}{% endmacro %}"
    "{% macro b(n) %}{% if n < 60 %}{{ a(n + 1) }}{% endif %}{% endmacro %}{{ a(0) }}",
    "a caller": "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set at = namespace(text='a' * 999) %}"
    "{% for i in range(40) %}{% set at.text %}{% call twice() %}{{ at.text }}{% endcall %}{% endset %}{% endfor %}",
    "batches": "{% set n = 9 ** 9 %}{{ [1] | batch(n, 'x') | list | length }}",
    "slices": "{% set n = 9 ** 9 %}{{ [1] | slice(n, 'x') | list | length }}",
    "indenting": "{% set text = '\\n' * 99999 %}{{ text | indent(99999, blank=true) | length }}",
    "wrapping words": "{% set text = 'ab ' * 999999 %}{{ text | wordwrap(1, true, 'x' * 9999) | length }}",
    "nested JSON": "{% set at = namespace(all=[1]) %}{% for i in range(60) %}{% set at.all = [at.all, at.all] %}"
    "{% endfor %}{{ at.all | tojson | length }}",
    "unique among all": "{% set all = range(99999) | list * 999 %}{{ all | unique | list | length }}",
    "groups of groups": "{% set all = range(99999) | list * 99 %}"
    "{{ all | map('string') | groupby('x') | list | length }}",
    "sorting": "{% set all = range(99999) | list * 99 %}{{ all | map('string') | sort | list | length }}",
    "a sum of lists": "{% set at = namespace(all=[]) %}{% for i in range(99999) %}{% set at.all = at.all + [[i]] %}"
    "{% endfor %}{{ at.all | sum(start=[]) | length }}",
    "a recursive loop": "{% set at = namespace(all=[1]) %}{% for i in range(60) %}{% set at.all = [at.all, at.all] %}"
    "{% endfor %}{% for one in at.all recursive %}{{ loop(one) if one is iterable else '' }}{% endfor %}",
    "joining": "{% set n = 99999 %}{{ (['a' * 9999] * n) | join('b' * 9999) | length }}",
    "formats": "{% set n = 9 ** 9 %}{{ '{:>{}}'.format('a', n) | length }}",
    "repeats by addition": "{% set at = namespace(text='a') %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set at.text = at.text ~ 'aaaaaaaa' %}{% endfor %}{% endfor %}",
}


GATE = (  # one for each bound
    *("nested loops", "a large number", "a long text", "a doubling list", "recursion", "sixteen million letters"),
    "lipsum",
)


def model_with(directory: Path, attack: str) -> Path:
    return write_model(directory, "{% if messages[0].content == 'go' %}" + attack + "{% endif %}" + PLAIN)


@pytest.mark.parametrize("name", in_gate(ATTACKS, GATE))
async def test_a_template_s_failure_costs_only_its_request(tmp_path: Path, name: str) -> None:
    model = TextModel(model_with(tmp_path, ATTACKS[name]))
    texts = BoundedText(text_command(tmp_path, text_s=TEXT_S))

    def render(principal: str, content: str) -> asyncio.Future[str]:
        bounded = texts.of(model, principal)
        assert bounded.template is not None
        return asyncio.ensure_future(asyncio.to_thread(bounded.template.render, [{"role": "user", "content": content}]))

    attack = render("key:mallory", "go")
    await asyncio.sleep(0)
    assert await render("key:bob", "hello") == "hello", "whoever comes meanwhile"
    began_s = time.monotonic()
    with pytest.raises(InvalidRequest):
        await attack
    assert time.monotonic() - began_s < 60
    assert await render("key:mallory", "hello") == "hello", "whoever comes then"
    await texts.close()


def grown(letter: str) -> dict[str, Any]:
    """Returns a normalizer that makes a letter a hundred, and these as many again, without end."""
    replace = {"type": "Replace", "pattern": {"String": letter}, "content": letter * 100}
    return {"type": "Sequence", "normalizers": [replace] * 9}


# Files that take memory as they are read or as a prompt is made: a template, a normalizer.
GREEDY: dict[str, tuple[str, dict[str, Any] | None]] = {
    "a wide constant": ("{{ '%0999999999d' % 1 }}" + PLAIN, None),
    "a normalizer, as it is read": (PLAIN, grown("a")),
    "a normalizer, by a prompt": (PLAIN, grown("b")),
    **{name: (ATTACKS[name], None) for name in ("padding", "a doubling list", "replacing")},
}


# Prints the peak memory and the exit status of a process. A peak begins with that of the process that started it.
MEASURE = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, used = os.wait4(child.pid, 0)
print(used.ru_maxrss, os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("name", in_gate(GREEDY, ("a wide constant", "a normalizer, by a prompt")))
def test_a_process_keeps_to_its_memory(tmp_path: Path, name: str) -> None:
    template, normalizer = GREEDY[name]
    file = write_model(tmp_path, template) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    messages = msgspec.json.encode([{"role": "user", "content": "b"}])
    question = frame(RenderQuestion(1, messages, b"null", b"null", True))
    measured = subprocess.run([sys.executable, "-c", MEASURE, *text_command(tmp_path)], input=question, stdout=PIPE)
    peak_kb, status = map(int, measured.stdout.split())
    assert peak_kb * 1024 < LOAD_BYTES
    assert name == "a wide constant" or status != 0, "it takes more than it may"


async def test_a_tokenizer_s_expressions_cost_only_their_request(tmp_path: Path) -> None:
    """One whose pattern takes twice as long with each letter more."""
    write_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a|a|a+)+(?=b)$"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    file.write_text(json.dumps(tokenizer))
    texts = BoundedText(text_command(tmp_path, text_s=TEXT_S))
    model = TextModel(tmp_path)
    slow = asyncio.ensure_future(asyncio.to_thread(texts.of(model, "a").encode, "a" * 5000 + "c", False))
    assert await asyncio.to_thread(texts.of(model, "b").encode, "hello", False) == model.encode("hello", False)
    await asyncio.wait([slow])
    assert slow.exception() is None or isinstance(slow.exception(), InvalidRequest)
    await texts.close()


async def test_prompts_follow_the_model_s_own_files(text_model: TextModel) -> None:
    texts = BoundedText(text_command(text_model.directory))
    bounded = texts.of(text_model, "")
    assert text_model.template is not None
    assert bounded.template is not None
    messages = [{"role": "user", "content": "Größe 東京 🦊 \u0000"}, {"role": "assistant", "content": "x", "n": 10**30}]
    wanted = text_model.template.render(messages, extra={"enable_thinking": False})
    found = await asyncio.to_thread(bounded.template.render, messages, extra={"enable_thinking": False})
    assert found == wanted
    for special in (True, False):
        wanted_ids = text_model.encode(wanted, special, 10)
        assert await asyncio.to_thread(bounded.encode, wanted, special, 10) == wanted_ids
    with pytest.raises(InvalidRequest, match="unknown role nobody"):
        await asyncio.to_thread(bounded.template.render, [{"role": "nobody", "content": "x"}])
    await texts.close()


async def test_files_that_cannot_be_read_are_found_out_before_the_daemon_reads_them(tmp_path: Path) -> None:
    write_model(tmp_path)
    for files, why in (
        ({"tokenizer.json": "[" * 10_000_000}, "cannot be read"),
        ({"chat_template.jinja": "{% if %}"}, "chat template cannot be read"),
        ({"chat_template.jinja": "{{ " + "(" * 100_000}, "chat template cannot be read"),
        ({"chat_template.jinja": "{{ (9 ** 99999) ~ 'x' }}"}, "chat template cannot be read"),
        ({"chat_template.jinja": "{{ 9 ** (9 ** 9) }}"}, "within bounds"),
    ):
        model = write_model(tmp_path / str(len(str(files))))
        for name, content in files.items():
            (model / name).write_text(content)
        texts = BoundedText(text_command(model, load_s=LOAD_S))
        with pytest.raises(CheckpointError, match=why):
            await texts.check()
        await texts.close()


@pytest.mark.parametrize("name", in_gate(["nested loops", "a large number"], ["a large number"]))
async def test_a_daemon_with_such_a_template_serves_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("edgemoe.front.main.text_command", partial(text_command, text_s=TEXT_S))
    settings = settings_for(tmp_path / "f", model_with(tmp_path / "model", ATTACKS[name]))
    (tmp_path / "f").mkdir()
    async with running(settings) as front, http_client(front.settings) as http:

        def chat(content: str) -> asyncio.Future[httpx.Response]:
            body = {"messages": [{"role": "user", "content": content}]}
            return asyncio.ensure_future(http.post("/v1/chat/completions", json=body, timeout=120))

        attacks = [chat("go") for _ in range(3)]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(60):  # of one principal, whose attacks come first
            assert (await http.get("/health")).status_code == 200
        for attack in attacks:
            assert (await attack).status_code == 400
        assert (await chat("SAY{hi}END")).status_code == 200
