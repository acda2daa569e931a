"""Requests as Open WebUI (backend/open_webui/utils/payload.py) and Continue (core/llm/llms/Ollama.ts) make them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx
import pytest
from support.front_kit import MARKS

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
CALL = 'SAY{<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>}END'
RESULT = "It is sunny. SAY{Sunny!}END"


async def lines_of(http: httpx.AsyncClient, path: str, body: Any) -> list[Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.split("\n") if line.strip()]


async def test_open_webui_lists_models_and_when_they_expire(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/api/tags")).json()["models"]
    loaded = (await http.get("/api/ps")).json()["models"]
    expires = {model["name"]: datetime.fromisoformat(model["expires_at"]).timestamp() for model in loaded}
    assert [int(expires[model["name"]]) > 0 for model in listed] == [True]
    assert listed[0]["model"] == listed[0]["name"]
    assert isinstance((await http.get("/api/version")).json()["version"], str)


async def test_open_webui_asks_streams_and_calls_tools(http: httpx.AsyncClient) -> None:
    every = {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 7,
        "mirostat": 0,
        "mirostat_eta": 0.1,
        "mirostat_tau": 5.0,
        "num_ctx": 2048,
        "num_batch": 512,
        "num_keep": 24,
        "num_predict": 128,
        "repeat_last_n": 64,
        "top_k": 40,
        "min_p": 0.0,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["###"],
        "num_gpu": 1,
        "use_mmap": True,
        "use_mlock": True,
        "num_thread": 2,
    }
    body: Any = {
        "model": "tiny:latest",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": CALL}],
        "stream": True,
        "tools": [TOOL],
        "num_predict": 128,
        "options": every,
        "keep_alive": "5m",
        "think": True,
        "metadata": {"chat_id": "1"},
    }
    lines = await lines_of(http, "/api/chat", body)
    (call,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert call["function"]["arguments"] == {"city": "Köln"}
    assert lines[-1]["done"]
    assert min(lines[-1][name] for name in ("eval_count", "eval_duration", "prompt_eval_count", "total_duration")) > 0
    past = {"index": 0, "id": None, "function": call["function"]}
    body["messages"] += [{"role": "assistant", "tool_calls": [past], "content": ""}]
    body["messages"] += [{"role": "tool", "content": RESULT, "tool_call_id": call["id"]}]
    whole = (await http.post("/api/chat", json={**body, "stream": False})).json()
    assert whole["message"]["content"]


async def test_open_webui_shows_why_an_image_is_refused(http: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": "What is this?", "images": ["iVBORw0KGgo="]}
    answer = await http.post("/api/chat", json={"model": "tiny", "messages": [message], "stream": True})
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        "messages[0].images: this model reads text only, no images",
    )


async def test_open_webui_embeds_nothing(http: httpx.AsyncClient) -> None:
    for path in ("/api/embed", "/api/embeddings"):
        answer = await http.post(path, json={"model": "tiny", "input": ["x"], "prompt": "x"})
        assert (answer.status_code, "no embeddings" in answer.json()["error"]) == (400, True)


async def test_continue_reads_the_models_facts(http: httpx.AsyncClient) -> None:
    shown = (await http.post("/api/show", json={"name": "tiny"})).json()
    parameters = dict(line.split(maxsplit=1) for line in shown["parameters"].split("\n"))
    assert int(parameters["num_ctx"]) == 4096
    assert ".Suffix" not in shown["template"]
    assert [model["name"] for model in (await http.get("/api/tags")).json()["models"]] == ["tiny:latest"]


async def test_continue_chats_and_completes(http: httpx.AsyncClient) -> None:
    options = {"temperature": 0.5, "num_predict": 2048, "stop": ["\n\n"], "num_ctx": 8192, "num_thread": 4}
    body: Any = {"model": "tiny", "options": options, "keep_alive": 1800, "stream": True}
    chat = {**body, "messages": [{"role": "user", "content": CALL}], "think": False, "tools": [TOOL]}
    lines = await lines_of(http, "/api/chat", chat)
    (call,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}]}]
    turns += [{"role": "tool", "content": RESULT}, {"role": "user", "content": "SAY{Sunny!}END"}]
    lines = await lines_of(http, "/api/chat", {**chat, "messages": [*chat["messages"], *turns]})
    assert all(line["message"]["role"] == "assistant" for line in lines)
    lines = await lines_of(http, "/api/generate", {**body, "prompt": "SAY{x + y}END", "raw": True})
    assert "".join(line["response"] for line in lines) == "x + y"
    assert not [mark for mark in MARKS if mark in json.dumps(lines)]
