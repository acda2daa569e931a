"""POST /infill, as llama.cpp's editor plug-ins send it, against a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_kit import MARKS, byte_level_tokenizer, http_client, running, settings_for, write_model

from edgemoe.api.generate.generation import RequestContext
from edgemoe.api.text.infill import FORMS, InfillMarks
from edgemoe.types.request import Request

pytestmark = pytest.mark.asyncio(loop_scope="session")
BODY: Any = {
    "input_prefix": "def add(a, b):\n    return SAY{a + b}END",
    "input_suffix": "\nprint(add(1, 2))",
    "prompt": "",
    "n_predict": 50,
    "top_k": 40,
    "t_max_predict_ms": 1000,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
}
FILES = [{"filename": "a.py", "text": "A = 1"}, {"filename": "b.py", "text": "B = 2"}]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that reach the engine."""
    requests: list[Request] = []
    made = RequestContext.engine_requests

    def engine_requests(self: RequestContext, *arguments: Any, **options: Any) -> list[Request]:
        found = made(self, *arguments, **options)
        requests.extend(found)
        return found

    monkeypatch.setattr(RequestContext, "engine_requests", engine_requests)
    return requests


@pytest.mark.parametrize("form", FORMS, ids=[form.prefix for form in FORMS])
async def test_the_text_between_prefix_and_suffix_is_completed(
    form: InfillMarks, tmp_path: Path, sent: list[Request]
) -> None:
    tokenizer = byte_level_tokenizer(
        marks=tuple(dict.fromkeys((*MARKS, *form.stops, *filter(None, [form.repository]))))
    )
    settings = settings_for(tmp_path, write_model(tmp_path / "model", tokenizer=tokenizer))
    async with running(settings), http_client(settings) as http:
        whole = (await http.post("/infill", json=BODY)).json()
        assert (whole["content"], whole["stop"], whole["stop_type"]) == ("a + b", True, "eos")
        assert whole["tokens_predicted"] >= 5
        assert whole["tokens_evaluated"] == len(sent[0].prompt)
        cut = (await http.post("/infill", json=BODY | {"n_predict": 2})).json()
        assert (cut["content"], cut["stop_type"]) == ("a ", "limit")
        assert await _streamed(http, BODY) == ("a + b", "eos")
        await http.post("/infill", json=BODY | {"input_extra": FILES, "prompt": "x"})
    prompt = form.prompt(BODY["input_prefix"], BODY["input_suffix"])
    assert list(sent[0].prompt) == tokenizer.encode(prompt, add_special_tokens=False).ids
    head = "A = 1B = 2"
    if form.file:
        head = f"{form.repository}myproject\n{form.file}a.py\nA = 1\n{form.file}b.py\nB = 2\n{form.file}filename\n"
    assert list(sent[-1].prompt) == tokenizer.encode(f"{head}{prompt}x", add_special_tokens=False).ids


async def _streamed(http: httpx.AsyncClient, body: Any) -> tuple[str, str]:
    """Returns the text and the reason of the end of a streamed answer."""
    text = ""
    async with http.stream("POST", "/infill", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                last = json.loads(line.removeprefix("data: "))
                text += last["content"]
    assert last["stop"]
    return text, last["stop_type"]


async def test_a_tokenizer_without_marks_and_wrong_fields_are_refused(tmp_path: Path) -> None:
    form = FORMS[0]
    cases: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
        (MARKS, {}, "input_suffix"),
        ((*MARKS, *form.stops), {"suffix": "x"}, "suffix"),
        ((*MARKS, *form.stops), {"n": 2}, "n"),
        ((*MARKS, *form.stops), {"input_extra": [{"filename": "a"}]}, "input_extra[0]"),
    )
    for number, (marks, wrong, param) in enumerate(cases):
        folder = tmp_path / str(number)  # short, for paths of sockets
        folder.mkdir()
        settings = settings_for(folder, write_model(folder / "model", tokenizer=byte_level_tokenizer(marks=marks)))
        async with running(settings), http_client(settings) as http:
            answer = await http.post("/infill", json=BODY | wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
