"""Ollama's API, row by row of the tables in docs/ollama.md, against a scripted engine."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_kit import MARKS, byte_level_tokenizer, http_client, running, settings_for, write_model
from support.prose import ROOT

from edgemoe.api.generate.generation import Generation, RequestContext
from edgemoe.api.http import responding
from edgemoe.api.ollama_queries import REFUSALS, VERSION, parameter_size
from edgemoe.api.text.infill import FORMS, InfillMarks
from edgemoe.errors import EngineUnavailable
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")
PAGE = ROOT / "docs/ollama.md"
USER = [{"role": "user", "content": "SAY{hello}END"}]
HANGS = [{"role": "user", "content": "HANG@0"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":\n"Köln"}}\n</tool_call>'
Check = Callable[["Asked"], Awaitable[None]]


def rows(section: str) -> list[list[str]]:
    """Returns the cells of a section's table, without its head."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that go to the engine."""
    sent: list[Any] = []
    make = RequestContext.engine_requests

    def noting(*args: Any) -> Any:
        made = make(*args)
        sent.extend(made)
        return made

    monkeypatch.setattr(RequestContext, "engine_requests", noting)
    return sent


class Asked:
    """Asks over the Unix socket, and sees the requests that go to the engine."""

    def __init__(self, http: httpx.AsyncClient, front: Front, sent: list[Any]) -> None:
        self.http, self.front, self.sent = http, front, sent
        self.grammars: list[Any] = []

    async def chat(self, **body: Any) -> Any:
        return await self.post("/api/chat", {"model": "tiny", "messages": USER, "stream": False, **body})

    async def generate(self, **body: Any) -> Any:
        return await self.post("/api/generate", {"model": "tiny", "prompt": "SAY{hello}END", "stream": False, **body})

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def refused(self, words: str, path: str = "/api/chat", status: int = 400, **body: Any) -> None:
        given = {"model": "tiny", **({"messages": USER} if path == "/api/chat" else {"prompt": "x"}), **body}
        found = await self.post(path, given, status)
        assert found.keys() == {"error"}
        assert words in found["error"], found

    async def lines(self, path: str, **body: Any) -> list[Any]:
        answer = await self.http.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.text.endswith("\n")
        return [json.loads(line) for line in answer.text.splitlines()]

    @property
    def sampling(self) -> Any:
        return self.sent[-1].sampling

    def prompt(self) -> str:
        assert self.front.api is not None
        return self.front.api.text.vocabulary.text(self.sent[-1].prompt)


@pytest.fixture
def asked(http: httpx.AsyncClient, front: Front, sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked(http, front, sent)

    def following(self: Generation, tried: Any) -> None:
        asked.grammars.append(tried)

    monkeypatch.setattr(Generation, "constrain", following)
    return asked


# --- fields ------------------------------------------------------------------------------------------------------


class Fields:
    """A check for each row of the table."""

    async def model(self, asked: Asked) -> None:
        for name in ("tiny", "tiny:latest", "TINY", "Tiny:Latest"):
            assert (await asked.chat(model=name))["model"] == name
            assert (await asked.generate(model=name))["model"] == name
        for path in ("/api/chat", "/api/generate"):
            await asked.refused("model 'nothing' not found", path, 404, model="nothing")
            await asked.refused("model 'tiny:30b' not found", path, 404, model="tiny:30b")
            await asked.refused("model is required", path, model="")

    async def messages(self, asked: Asked) -> None:
        for none in ([], None, {}):
            found = await asked.chat(messages=none)
            assert (found["done"], found["done_reason"], found["message"]["content"]) == (True, "load", "")
        roles = [{"role": "System", "content": "be"}, *USER, {"role": "tool", "content": "sun"}]
        await asked.chat(messages=roles)
        assert "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\n" in asked.prompt()
        await asked.refused("messages[0].role", messages=[{"role": "wizard", "content": "x"}])
        text, image = {"type": "text", "text": "SAY{two}END"}, {"type": "image_url", "image_url": {"url": "data:,"}}
        for content in ([text], text, ["SAY{", "two}END"]):
            assert (await asked.chat(messages=[{"role": "user", "content": content}]))["message"]["content"] == "two"
        await asked.refused("messages[0].content[1]", messages=[{"role": "user", "content": [text, image]}])
        await asked.chat(messages=[{"role": "user", "content": [text, image]}, *USER])
        assert "[image_url left out" in asked.prompt()
        await asked.chat(messages=[{"role": "user", "content": [text], "images": ["iVBORw0KGgo="]}, *USER])
        assert "SAY{two}END[image left out" in asked.prompt()
        await asked.refused("messages[0].content", messages=[{"role": "user", "content": 5}])
        await asked.chat(messages=[*USER, {"role": "assistant", "content": "Well, "}])
        assert asked.prompt().endswith("<|im_start|>assistant\nWell, ")

    async def prompt(self, asked: Asked) -> None:
        found = await asked.generate()
        assert (found["response"], found["done_reason"]) == ("hello", "stop")
        assert asked.prompt() == "<|im_start|>user\nSAY{hello}END<|im_end|>\n<|im_start|>assistant\n"
        for none in ("", None):
            found = await asked.generate(prompt=none)
            assert (found["response"], found["done"], found["done_reason"]) == ("", True, "load")

    async def stream(self, asked: Asked) -> None:
        for path, key, body in (
            ("/api/chat", "message", {"messages": USER}),
            ("/api/generate", "response", {"prompt": USER[0]["content"]}),
        ):
            for more in ({}, {"stream": True}, {"stream": None}):
                *lines, last = await asked.lines(path, **body, **more)
                said = [line[key]["content"] if key == "message" else line[key] for line in lines]
                assert "".join(said) == "hello"
                assert len(said) > 1
                assert not any(line["done"] for line in lines)
                assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 4)

    async def format(self, asked: Asked) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        for ask in (asked.chat, asked.generate):
            for given in ("json", schema, ""):
                await ask(format=given)
            plain, followed, none = asked.grammars[-3:]
            assert (plain is not None, followed is not None, none) == (True, True, None)
            assert plain != followed
        await asked.refused("format", format="xml")
        await asked.refused("format.properties.a.minLength", format={"properties": {"a": {"minLength": 10**9}}})

    async def options(self, asked: Asked) -> None:
        await asked.chat(options=None)
        await asked.chat(options={"new_topic_penalty": 3, "num_gqa": 8})
        await asked.refused("options", options=[1])

    async def keep_alive(self, asked: Asked) -> None:
        for ask in (asked.chat, asked.generate):
            none = {"messages": []} if ask == asked.chat else {"prompt": ""}
            for keep in (0, 0.0, "0", "0s", "0m"):
                assert (await ask(keep_alive=keep, **none))["done_reason"] == "unload"
                assert (await ask(keep_alive=keep))["done_reason"] == "stop"
            for keep in (-1, "-1m", "5m", 1800, None):
                assert (await ask(keep_alive=keep, **none))["done_reason"] == "load"
                assert (await ask(keep_alive=keep))["done_reason"] == "stop"

    async def think(self, asked: Asked) -> None:
        ends = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        for ask in (asked.chat, asked.generate):
            ons = (
                True,
                "true",
                "True",
                1,
                "on",
                "low",
                "HIGH",
                "max",
                "xhigh",
                "minimal",
                "",
                None,
                {},
                {"type": "enabled"},
            )
            for off, think in (
                *((True, one) for one in (False, "false", 0, "off", "none", {"type": "disabled"})),
                *((False, one) for one in ons),
            ):
                await ask(think=think)
                assert asked.prompt().endswith(ends) is off
        said = [{"role": "user", "content": "SAY{<think>hm, yes</think>hello}END"}]
        found = (await asked.chat(messages=said, think=True))["message"]
        assert (found["thinking"], found["content"]) == ("hm, yes", "hello")
        lines = await asked.lines("/api/chat", messages=said, think="high")
        assert "".join(line["message"].get("thinking", "") for line in lines) == "hm, yes"
        found = await asked.generate(prompt=said[0]["content"], think=True)
        assert (found["thinking"], found["response"]) == ("hm, yes", "hello")
        for wrong in ("a lot", 2, [1], {"type": "a lot"}):
            await asked.refused("think", think=wrong)

    async def tools(self, asked: Asked) -> None:
        said = [{"role": "user", "content": f"SAY{{{CALL}}}END"}]
        lines = await asked.lines("/api/chat", messages=said, tools=[WEATHER])
        whole = await asked.chat(messages=said, tools=[WEATHER])
        (streamed,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
        (call,) = whole["message"]["tool_calls"]
        for one in (streamed, call):
            assert one["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Köln"}}
        assert (whole["done_reason"], lines[-1]["done_reason"], whole["message"]["content"]) == ("stop", "stop", "")
        for most in range(10, 40, 3):  # a call that num_predict cuts has the arguments so far, as an object
            options = {"num_predict": most}
            lines = await asked.lines("/api/chat", messages=said, tools=[WEATHER], options=options)
            whole = await asked.chat(messages=said, tools=[WEATHER], options=options)
            streamed = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
            assert streamed == [call["function"] for call in whole["message"].get("tool_calls", ())]
            assert all(isinstance(function["arguments"], dict) for function in streamed)
            assert (whole["done_reason"], lines[-1]["done_reason"]) == ("length", "length")
        half = [{"role": "user", "content": f"SAY{{{CALL[:-16]}}}END"}]
        lines = await asked.lines("/api/chat", messages=half, tools=[WEATHER])
        whole = await asked.chat(messages=half, tools=[WEATHER])
        text = "".join(line["message"]["content"] for line in lines)
        assert text == whole["message"]["content"] != ""

    async def tool_calls(self, asked: Asked) -> None:
        calls = [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]
        await asked.chat(messages=[*USER, {"role": "assistant", "content": "", "tool_calls": calls}], tools=[WEATHER])
        assert '<tool_call>\n{"arguments": {"city": "Köln"}, "name": "weather"}' in asked.prompt().replace(
            '{"name": "weather", "arguments": {"city": "Köln"}}', '{"arguments": {"city": "Köln"}, "name": "weather"}'
        )

    async def tool_name(self, asked: Asked) -> None:
        for named in ({"tool_name": "weather"}, {"name": "weather"}, {"tool_call_id": "functions.weather:0"}, {}):
            calls = [{"function": {"name": "weather", "arguments": {}}}]
            turns = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "sunny", **named}]
            await asked.chat(messages=[*USER, *turns])
            assert "<|im_start|>tool\nsunny<|im_end|>" in asked.prompt()

    async def thinking(self, asked: Asked) -> None:
        turn = {"role": "assistant", "content": "yes", "thinking": "hm"}
        assert (await asked.chat(messages=[*USER, turn, *USER]))["message"]["content"] == "hello"

    async def images(self, asked: Asked) -> None:
        for none in ([], None):
            await asked.chat(messages=[USER[0] | {"images": none}])
            await asked.generate(images=none)
        await asked.refused("reads text only, no images", messages=[USER[0] | {"images": ["iVBORw0KGgo="]}])
        await asked.refused("reads text only, no images", "/api/generate", images=["iVBORw0KGgo="])

    async def system(self, asked: Asked) -> None:
        await asked.generate(system="be kind")
        assert asked.prompt().startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n")

    async def raw(self, asked: Asked) -> None:
        assert (await asked.generate(raw=True))["response"] == "hello"
        assert asked.prompt() == "SAY{hello}END"
        assert asked.sampling.max_tokens > 4000
        for field in ({"system": "x"}, {"template": "x"}, {"context": [1]}):
            await asked.refused("raw mode does not support", "/api/generate", raw=True, **field)

    async def suffix(self, asked: Asked) -> None:
        await asked.generate(suffix="")
        await asked.refused("does not support insert", "/api/generate", suffix="return a")

    async def template(self, asked: Asked) -> None:
        await asked.generate(template="")
        await asked.refused("template is not supported", "/api/generate", template="{{ .Prompt }}")

    async def context(self, asked: Asked) -> None:
        assert "context" not in await asked.generate(context=[])
        await asked.refused("context is not supported", "/api/generate", context=[1, 2])

    async def logprobs(self, asked: Asked) -> None:
        for ask in (asked.chat, asked.generate):
            assert "logprobs" not in await ask(logprobs=False, top_logprobs=3)
            found = (await ask(logprobs=True))["logprobs"]
            assert [one["token"] for one in found] == ["he", "l", "l", "o"]
            assert all(one["logprob"] <= 0 and not one["top_logprobs"] for one in found)
        lines = await asked.lines("/api/chat", messages=USER, logprobs=True)
        assert sum(len(line.get("logprobs", ())) for line in lines) == 4
        found = (await asked.generate(raw=True, logprobs=True))["logprobs"]
        assert [one["token"] for one in found] == ["he", "l", "l", "o"]

    async def top_logprobs(self, asked: Asked) -> None:
        for ask in (asked.chat, asked.generate):
            found = (await ask(logprobs=True, top_logprobs=2))["logprobs"]
            assert all(len(one["top_logprobs"]) == 2 for one in found)
        await asked.refused("top_logprobs", logprobs=True, top_logprobs=21)

    async def truncate(self, asked: Asked) -> None:
        long = [{"role": "user", "content": "word " * 5000}]
        for truncate in (True, False):
            await asked.refused("maximum context length", messages=long, truncate=truncate)

    async def shift(self, asked: Asked) -> None:
        long = [{"role": "user", "content": "x" * 3800}]  # of the context's 4096 tokens
        for shift in (True, False):
            found = await asked.chat(messages=long, shift=shift)
            assert found["done_reason"] == "length"


@pytest.mark.parametrize("row", [name for name, *_ in rows("Fields")])
async def test_a_field_does_what_the_table_says(row: str, asked: Asked) -> None:
    await getattr(Fields(), row)(asked)


async def test_every_check_has_a_row() -> None:
    assert [name for name, _ in inspect.getmembers(Fields, inspect.isfunction)] == sorted(
        name for name, *_ in rows("Fields")
    )
    assert OPTIONS.keys() | WITHOUT_EFFECT.keys() == {name for name, *_ in rows("Options")}
    assert not OPTIONS.keys() & WITHOUT_EFFECT.keys()
    assert set(ENDPOINTS) == {path for path, *_ in rows("Endpoints")}


# --- options -----------------------------------------------------------------------------------------------------

OPTIONS: dict[
    str, list[tuple[Any, str, Any]]
] = {  # option -> its values, the sampling's field, its value; None: refused
    "num_predict": [
        (7, "max_tokens", 7),
        (7.0, "max_tokens", 7),
        ("7", "max_tokens", 7),
        ("many", "", None),
        (1.5, "", None),
    ],
    "temperature": [(0, "temperature", 0.0), (1.5, "temperature", 1.5), (2.5, "temperature", 2.5), ("hot", "", None)],
    "top_k": [(5, "top_k", 5), (40.0, "top_k", 40), (0, "top_k", 0), (-1, "top_k", 0), (-2, "", None)],
    "top_p": [(0.5, "top_p", 0.5), (1, "top_p", 1.0), (1.1, "top_p", 1.0)],
    "min_p": [(0.25, "min_p", 0.25), (-0.1, "min_p", 0.0)],
    "seed": [(5, "seed", 5), (5.0, "seed", 5), (2**70, "", None)],
    "stop": [("l", "stop", "he"), (["x", "l"], "stop", "he"), ([], "stop", "hello"), (["x"] * 17, "", None)],
    "repeat_penalty": [
        (1.5, "repetition_penalty", 1.5),
        (0, "repetition_penalty", 1.0),
        (-1, "repetition_penalty", 1.0),
    ],
    "repeat_last_n": [(0, "repetition_penalty", 1.0), (64, "repetition_penalty", 1.0), (-1, "repetition_penalty", 1.0)],
    "presence_penalty": [(1.5, "presence_penalty", 1.5), (-2, "presence_penalty", -2.0), (2.5, "", None)],
    "frequency_penalty": [(0.5, "frequency_penalty", 0.5), (2.5, "", None)],
    "typical_p": [(1, "top_p", 0.95), (1.0, "top_p", 0.95), (0.5, "", None)],
}
WITHOUT_EFFECT: dict[str, list[Any]] = {
    "num_ctx": [2048, 1 << 20],
    "num_keep": [4],
    "num_batch": [512],
    "num_gpu": [-1, 99],
    "main_gpu": [0],
    "num_thread": [8],
    "use_mmap": [True, False],
    "draft_num_predict": [4],
    "mirostat": [0, 2],
    "tfs_z": [1.0, 0.5],
}


@pytest.mark.parametrize("row", [name for name, *_ in rows("Options")])
async def test_an_option_does_what_the_table_says(row: str, asked: Asked) -> None:
    for ask, path in ((asked.chat, "/api/chat"), (asked.generate, "/api/generate")):
        await ask(options={"seed": 1})
        plain = asked.sampling
        for value in WITHOUT_EFFECT.get(row, ()):
            await ask(options={row: value})
            assert asked.sampling == plain
        for value, field, wanted in OPTIONS.get(row, ()):
            if wanted is None:
                await asked.refused(f"options.{row}", path, options={row: value})
                continue
            found = await ask(options={row: value})
            if field == "stop":
                assert (found["message"]["content"] if ask == asked.chat else found["response"]) == wanted
            else:
                assert getattr(asked.sent[-1] if field == "seed" else asked.sampling, field) == wanted


async def test_no_limit_is_what_the_context_has_room_for(asked: Asked) -> None:
    for ask in (asked.chat, asked.generate):
        for below in (-1, -2, -1.0, 0, -5):
            found = await ask(options={"num_predict": below})
            assert asked.sampling.max_tokens == 4096 - found["prompt_eval_count"]
    assert (await asked.chat(options={"num_predict": 2}))["done_reason"] == "length"


async def test_a_seed_of_minus_one_is_drawn(asked: Asked) -> None:
    for _ in range(2):
        await asked.chat(options={"seed": -1})
    assert len({one.seed for one in asked.sent}) == 2


async def test_no_window_of_repeats_turns_all_penalties_off(asked: Asked) -> None:
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1}
    await asked.chat(options={**penalties, "repeat_last_n": 0})
    found = asked.sampling
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.0, 0.0, 0.0)
    await asked.chat(options={**penalties, "repeat_last_n": 64})
    assert asked.sampling.repetition_penalty == 1.5


# --- endpoints ---------------------------------------------------------------------------------------------------


async def _chat(asked: Asked) -> None:
    found = await asked.chat()
    assert found["message"] == {"role": "assistant", "content": "hello"}
    times = [found[f"{part}_duration"] for part in ("total", "load", "prompt_eval", "eval")]
    assert all(isinstance(time, int) for time in times)
    assert times[0] == times[2] + times[3] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", found["created_at"])


async def _generate(asked: Asked) -> None:
    assert (await asked.generate())["prompt_eval_count"] == len(asked.sent[-1].prompt)


async def _tags(asked: Asked) -> None:
    (model,) = (await asked.http.get("/api/tags")).json()["models"]
    assert (model["name"], model["model"]) == ("tiny:latest", "tiny:latest")
    assert model["details"]["family"] == "scripted"
    assert (await asked.http.head("/api/tags")).status_code == 200


async def _ps(asked: Asked) -> None:
    (model,) = (await asked.http.get("/api/ps")).json()["models"]
    assert (model["model"], model["context_length"], model["expires_at"][:4]) == ("tiny:latest", 4096, "9999")


async def _show(asked: Asked) -> None:
    for asking in ({"model": "tiny"}, {"name": "Tiny:latest"}, {"model": "tiny", "verbose": True}):
        found = await asked.post("/api/show", asking)
        assert found["capabilities"] == ["completion", "tools", "thinking"]
        assert found["model_info"]["general.architecture"] == "scripted"
        assert found["model_info"]["scripted.context_length"] == 4096
        assert found["parameters"].splitlines() == ["num_ctx 4096", "temperature 0.6", "top_p 0.95", "top_k 20"]
        assert "<|im_start|>" in found["template"]
        assert found["details"]["quantization_level"] == "F32"
    assert (await asked.post("/api/show", {"model": "x"}, 404)) == {"error": "model 'x' not found"}
    assert (await asked.post("/api/show", {}, 400)) == {"error": "model is required"}


async def _version(asked: Asked) -> None:
    assert (await asked.http.get("/api/version")).json()["version"] == VERSION
    assert f"`{VERSION}`" in PAGE.read_text()


async def _pull(asked: Asked) -> None:
    assert [line["status"] for line in await asked.lines("/api/pull", model="tiny")][-1] == "success"
    assert await asked.post("/api/pull", {"name": "tiny", "stream": False}) == {"status": "success"}
    found = await asked.post("/api/pull", {"model": "qwen3"}, 404)
    assert "model 'qwen3' not found: 'tiny' is served here" in found["error"]


async def _root(asked: Asked) -> None:
    assert (await asked.http.get("/")).headers["content-type"].startswith("text/html")
    assert (await asked.http.head("/")).status_code == 200


def _refused(path: str, method: str) -> Check:
    async def check(asked: Asked) -> None:
        answer = await asked.http.request(method, path.replace("DIGEST", "sha256:0"), json={"model": "tiny"})
        assert (answer.status_code, answer.json().keys()) == (400, {"error"})
        assert "is not supported" in answer.json()["error"] or "are not supported" in answer.json()["error"]

    return check


ENDPOINTS: dict[str, Check] = {
    "POST /api/chat": _chat,
    "POST /api/generate": _generate,
    "GET /api/tags": _tags,
    "GET /api/ps": _ps,
    "POST /api/show": _show,
    "GET /api/version": _version,
    "POST /api/pull": _pull,
    "GET /": _root,
    "HEAD /": _root,
    **{
        f"{method} {path}": _refused(path, method)
        for method, path in ((methods[0], path.replace("{digest}", "DIGEST")) for path, methods, _ in REFUSALS)
    },
}


@pytest.mark.parametrize("row", [path for path, *_ in rows("Endpoints")])
async def test_an_endpoint_does_what_the_table_says(row: str, asked: Asked) -> None:
    await ENDPOINTS[row](asked)


async def test_every_error_is_in_ollamas_form(asked: Asked) -> None:
    for method, path, body, status in (
        ("POST", "/api/chat", b"{", 400),
        ("POST", "/api/chat", b"[]", 400),
        ("POST", "/api/chat", b"", 400),
        ("GET", "/api/chat", b"", 405),
        ("GET", "/api/nothing", b"", 404),
        ("POST", "/api/generate", b'{"model":"tiny","prompt":3}', 400),
        ("POST", "/api/generate", b'{"model":"tiny","prompt":"' + b"x" * (1 << 20) + b'"}', 413),
        ("POST", "/api/show", b"nonsense", 400),
        ("POST", "/api/pull", b'{"model":[]}', 400),
    ):
        answer = await asked.http.request(method, path, content=body)
        assert (answer.status_code, answer.json().keys()) == (status, {"error"}), (path, answer.text)
    answer = await asked.http.post("/api/chat", content=b"x", headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json().keys()) == (415, {"error"})


async def test_an_error_ends_a_stream_as_a_line(asked: Asked) -> None:
    await asked.refused("scripted", status=500, messages=[{"role": "user", "content": "FAIL{request_failed}END"}])
    assert asked.front.supervisor is not None
    late = [{"role": "user", "content": "HANG@2"}]
    for path, body in (("/api/chat", {"messages": late}), ("/api/generate", {"prompt": "HANG@2"})):
        async with asked.http.stream("POST", path, json={"model": "tiny", **body}) as answer:
            lines = answer.aiter_lines()
            assert not json.loads(await anext(lines))["done"]
            asked.front.supervisor.requests.fail_all(EngineUnavailable("gone"))
            rest = [json.loads(line) async for line in lines]
        assert rest[-1] == {"error": "gone"}


async def test_a_stream_that_has_nothing_for_long_sends_lines_that_say_nothing(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "QUIET_S", 0.05)
    for path, body in (("/api/chat", {"messages": HANGS}), ("/api/generate", {"prompt": "HANG@0"})):
        async with asyncio.timeout(60), asked.http.stream("POST", path, json={"model": "tiny", **body}) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            for _ in range(2):
                line = json.loads(await anext(lines))
                assert not line["done"]
                assert line.get("response", "") == line.get("message", {"content": ""})["content"] == ""


# --- filling in, and models that can less ------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=[form.prefix for form in FORMS])
async def test_a_suffix_is_filled_in_by_the_tokenizers_marks(
    form: InfillMarks, tmp_path: Path, sent: list[Any]
) -> None:
    tokenizer = byte_level_tokenizer(marks=(*MARKS, *form.stops))
    settings = settings_for(tmp_path, write_model(tmp_path / "model", tokenizer=tokenizer))
    async with running(settings), http_client(settings) as http:
        shown = (await http.post("/api/show", json={"model": "tiny"})).json()
        assert "insert" in shown["capabilities"]
        assert ".Suffix" in shown["template"]
        before, after = "def add(a, b): return SAY{a + b}END", "\nprint(add(1, 2))"
        body = {"model": "tiny", "prompt": before, "suffix": after, "stream": False}
        found = (await http.post("/api/generate", json=body)).json()
        assert (found["response"], found["done_reason"]) == ("a + b", "stop")
        completion = {"prompt": before, "suffix": after, "max_tokens": 50}  # OpenAI's
        (choice,) = (await http.post("/v1/completions", json=completion)).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a + b", "stop")
    assert len(sent) == 2
    for request in sent:
        assert list(request.prompt) == tokenizer.encode(form.prompt(before, after), add_special_tokens=False).ids
        assert {tokenizer.token_to_id(mark) for mark in form.stops} < set(request.sampling.stop_token_ids)


async def test_what_a_model_cannot_do_is_said_in_ollamas_words(tmp_path: Path) -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = settings_for(tmp_path, write_model(tmp_path / "model", plain, byte_level_tokenizer(marks=())))
    async with running(settings), http_client(settings) as http:
        assert (await http.post("/api/show", json={"model": "tiny"})).json()["capabilities"] == ["completion"]
        body: Any = {"model": "tiny", "messages": USER, "stream": False}
        for field, word in (
            ({"tools": [WEATHER]}, "tools"),
            ({"think": True}, "thinking"),
            ({"think": "low"}, "thinking"),
        ):
            answer = await http.post("/api/chat", json={**body, **field})
            assert (answer.status_code, answer.json()) == (400, {"error": f'"tiny" does not support {word}'})
        assert (await http.post("/api/chat", json={**body, "think": False})).status_code == 200


async def test_numbers_of_parameters_are_rounded_as_ollama_does() -> None:
    sizes = [parameter_size(number) for number in (0, 12, 5000, 1_500_000, 3 * 10**6, 30_532_122_624, 7 * 10**9)]
    assert sizes == ["", "12", "5K", "1.50M", "3M", "30.5B", "7B"]
