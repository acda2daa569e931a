"""LM Studio's native API, by the tables of docs/api.md, against a scripted engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_tables import rows, spans
from support.front_kit import MARKS, byte_level_tokenizer, http_client, running, settings_for, write_model

from edgemoe.api.lm_studio_queries import REFUSALS

pytestmark = pytest.mark.asyncio(loop_scope="session")
ENDPOINTS = [(spans(row[0])[0].split(), row[1]) for row in rows("endpoint | what it does here")]
FIELDS = rows("field of `/api/v1/chat` | value | here")
SAY: dict[str, Any] = {"model": "tiny", "input": "SAY{some words}END", "max_output_tokens": 20}
EVENT = re.compile(r"event: (\S+)\ndata: (.*)\n\n")


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/api/v1/chat", json=SAY | fields)


async def test_an_answer_is_whole_or_a_stream_of_named_events(http: httpx.AsyncClient) -> None:
    whole = (await ask(http)).json()
    assert whole["model_instance_id"] == "tiny"
    assert whole["output"] == [{"type": "message", "content": "some words"}]
    stats = whole["stats"]
    assert stats["input_tokens"] > 0
    assert stats["total_output_tokens"] > 0
    assert set(stats) == {
        "input_tokens",
        "total_output_tokens",
        "reasoning_output_tokens",
        "tokens_per_second",
        "time_to_first_token_seconds",
    }
    events = [(name, json.loads(data)) for name, data in EVENT.findall((await ask(http, stream=True)).text)]
    assert all(data["type"] == name for name, data in events)
    names = [name for name, _ in events]
    assert names[:4] == ["chat.start", "prompt_processing.start", "prompt_processing.end", "message.start"]
    assert names[-2:] == ["message.end", "chat.end"]
    assert "".join(data["content"] for name, data in events if name == "message.delta") == "some words"
    assert events[-1][1]["result"]["output"] == whole["output"]


async def test_reasoning_is_an_item_of_its_own(http: httpx.AsyncClient) -> None:
    said = "SAY{<think>so</think>\n\nyes}END"
    whole = (await ask(http, input=said, reasoning="on")).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["stats"]["reasoning_output_tokens"] > 0
    names = [name for name, _ in EVENT.findall((await ask(http, input=said, stream=True)).text)]
    assert [name for name in names if name.endswith((".start", ".end"))][3:] == [
        "reasoning.start",
        "reasoning.end",
        "message.start",
        "message.end",
        "chat.end",
    ]


@pytest.mark.parametrize("row", FIELDS, ids=[f"{row[0]}-{row[1]}" for row in FIELDS])
async def test_each_field_does_what_the_table_says(http: httpx.AsyncClient, row: list[str]) -> None:
    (name,), (value,) = spans(row[0]), spans(row[1])
    answer = await ask(http, **{name: json.loads(value)})
    assert answer.status_code == (400 if row[2].startswith("400") else 200), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert name in error["message"]
        assert error["param"].startswith(name)
    elif name != "stream":
        assert "response_id" not in answer.json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": 9}, "temperature"), ({"repeat_penalty": -1}, "repeat_penalty"), ({"input": []}, "input")],
)
async def test_faults_are_told_by_the_clients_names(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await ask(http, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_each_endpoint_is_there_and_refused_ones_say_why(http: httpx.AsyncClient) -> None:
    asked = {path: (method, told) for (method, path), told in ENDPOINTS}
    assert {path for path, _, _ in REFUSALS} == {path for path, (_, told) in asked.items() if told == "refused"}
    for path, (method, told) in asked.items():
        at = path.replace("{id}", "tiny").replace("{job}", "1")
        answer = await http.request(method, at, **({"json": SAY} if method == "POST" else {}))
        assert answer.status_code == (400 if "400" in told or told == "refused" else 200), (at, answer.text)
        if told == "refused":
            assert "not supported" in answer.json()["error"]["message"]


async def test_lists_are_of_both_forms(http: httpx.AsyncClient) -> None:
    told = (await http.get("/api/v1/models")).json()
    (model,) = told["models"]
    assert (model["key"], model["type"]) == ("tiny", "llm")
    assert model["loaded_instances"][0]["config"]["context_length"] == model["max_context_length"]
    card = (await http.get("/v1/models/tiny")).json()
    assert told["data"] == [card]
    assert card == (await http.get("/api/v0/models/tiny")).json()
    assert {"publisher", "arch", "compatibility_type", "quantization", "state", "max_context_length"} <= set(card)


async def test_a_model_that_does_not_reason_refuses_to(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(marks=[mark for mark in MARKS if "think" not in mark])
    model = write_model(tmp_path / "model", template="{{ messages[0].content }}", tokenizer=tokenizer)
    settings = settings_for(tmp_path, model)
    async with running(settings), http_client(settings) as http:
        for word in ("on", "low", "medium", "high"):
            assert (await ask(http, reasoning=word)).status_code == 400, word
        assert (await ask(http, reasoning="off")).status_code == 200
