"""Schemas and expressions made to take for ever, by every endpoint that takes one: each costs only its request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.front_kit import http_client
from support.turns import by_turns

from edgemoe.front.main import Front

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
Body = dict[str, Any]
MESSAGES = [{"role": "user", "content": "Write."}]
PAUSE_S = 0.1  # between a victim's requests, so that it takes a part of a core
GROWTH_BYTES = 400 << 20  # of the engine, by all that is tried here

SCHEMAS: dict[str, Body] = {
    "a large multiple": {"type": "integer", "multipleOf": 99999999},
    "a large prime": {"type": "integer", "multipleOf": 999983},
    "a multiple with decimals": {"type": "number", "multipleOf": 0.99999989},
    "a multiple with many decimals": {"type": "number", "multipleOf": 1e-300},
    "a multiple in a range": {"type": "integer", "multipleOf": 997, "minimum": 3, "maximum": 10**15},
    "a long text": {"type": "string", "minLength": 10**9, "maxLength": 10**12},
    "nested repetition": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "thrice nested repetition": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "all of many patterns": {"allOf": [{"type": "string", "pattern": f"^.*a{{{at}}}.*$"} for at in range(1, 40)]},
    "many alternatives": {"anyOf": [{"const": f"word {at}"} for at in range(50_000)]},
    "a long enum": {"enum": [f"word {at}" for at in range(50_000)]},
    "many properties": {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(10_000)}},
    "many property patterns": {"type": "object", "patternProperties": {f"^.*a{{{at}}}$": {} for at in range(90)}},
    "unicode classes": {"type": "string", "pattern": r"^(\p{L}|\p{N}|\p{P}){1,5000}\p{L}{900}$"},
    "depth": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "alternatives of itself": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}] * 200 + [{"type": "null"}]},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
}
EXPRESSIONS = {
    "an exponential automaton": "(.|\n)*a(.|\n){60}b",
    "nested repetition": "((a{1,100}){1,100}){1,1000}",
    "many words": "|".join(f"word{at}x" for at in range(50_000)),
    "optional parts": "(a?){5000}a{5000}",
    "coprime parts": "(" + "|".join(f"([ab]{{{prime}}})*" for prime in (7, 11, 13, 17, 19, 23, 29)) + ")c",
}


def schema_format(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def tool(schema: Body) -> Body:
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}},
    }


DOORS: dict[str, tuple[str, Callable[[Body], Body]]] = {
    "chat": ("/v1/chat/completions", lambda it: {"messages": MESSAGES, "response_format": schema_format(it)}),
    "chat tools": (
        "/v1/chat/completions",
        lambda it: {"messages": MESSAGES, "tools": [tool(it)], "tool_choice": "required"},
    ),
    "free chat tools": ("/v1/chat/completions", lambda it: {"messages": MESSAGES, "tools": [tool(it)]}),
    "completions": ("/v1/completions", lambda it: {"prompt": "Write", "response_format": schema_format(it)}),
    "responses": (
        "/v1/responses",
        lambda it: {"input": "Write.", "text": {"format": {"type": "json_schema", "name": "a", "schema": it}}},
    ),
    "responses tools": (
        "/v1/responses",
        lambda it: {
            "input": "Write.",
            "tools": [{"name": "f", **tool(it)["function"], "type": "function"}],
            "tool_choice": "required",
        },
    ),
    "messages": (
        "/v1/messages",
        lambda it: {"messages": MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": it}}},
    ),
    "messages tools": (
        "/v1/messages",
        lambda it: {
            "messages": MESSAGES,
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"x": it}}}],
            "tool_choice": {"type": "any"},
        },
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(demo: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(demo.settings) as client:
        yield client


def engine_bytes(front: Front) -> int:
    assert front.supervisor is not None
    pid = front.supervisor.describe()["engine"]["pid"]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@contextlib.asynccontextmanager
async def victim(front: Front, http: httpx.AsyncClient) -> AsyncIterator[list[float]]:
    """Asks for a few tokens again and again meanwhile; yields how long each took. The engine must be the same then."""
    assert front.supervisor is not None
    took, before, starts = list[float](), engine_bytes(front), front.supervisor.starts

    async def ask() -> None:
        while True:
            began_s = time.monotonic()
            answer = await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4}, timeout=60)
            assert answer.status_code == 200
            took.append(time.monotonic() - began_s)
            await asyncio.sleep(PAUSE_S)

    asking = asyncio.ensure_future(ask())
    try:
        yield took
    finally:
        asking.cancel()
        await asyncio.wait([asking])
    assert asking.cancelled(), asking.exception()
    assert front.supervisor.starts == starts, "an engine has died"
    assert engine_bytes(front) - before < GROWTH_BYTES


async def judged(http: httpx.AsyncClient, path: str, body: Body) -> httpx.Response:
    answer = await http.post(path, json={"max_tokens": 8, **body} if "input" not in body else body, timeout=120)
    assert answer.status_code in (200, 400), answer.text
    return answer


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_schema_costs_only_its_request(demo: Front, http: httpx.AsyncClient, name: str) -> None:
    async with victim(demo, http) as took:
        answer = await judged(http, *_at("chat", SCHEMAS[name]))
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] in ("invalid_grammar", "body_too_complex"), answer.text
    assert took or answer.elapsed.total_seconds() < 5


@pytest.mark.parametrize(
    ("name", "door"),
    by_turns(("a large multiple", "a large prime", "nested repetition"), [door for door in DOORS if door != "chat"]),
)
async def test_no_endpoint_lets_an_endless_schema_in(
    demo: Front, http: httpx.AsyncClient, door: str, name: str
) -> None:
    async with victim(demo, http):
        answer = await judged(http, *_at(door, SCHEMAS[name]))
        assert answer.status_code == (200 if door == "free chat tools" else 400), answer.text


@pytest.mark.parametrize("name", EXPRESSIONS)
async def test_a_regular_expression_costs_only_its_request(demo: Front, http: httpx.AsyncClient, name: str) -> None:
    asked = {"type": "regex", "regex": EXPRESSIONS[name]}
    async with victim(demo, http):
        await judged(http, "/v1/chat/completions", {"messages": MESSAGES, "response_format": asked})
        await judged(http, "/v1/completions", {"prompt": "Write", "response_format": asked})
        await judged(http, "/v1/responses", {"input": "Write.", "text": {"format": asked}, "max_output_tokens": 8})


async def test_another_s_grammar_goes_on_beside_endless_ones(demo: Front, http: httpx.AsyncClient) -> None:
    path, endless = _at("chat", SCHEMAS["a large prime"])
    async with victim(demo, http):
        attacks = [asyncio.ensure_future(judged(http, path, endless)) for _ in range(3)]
        answer = await judged(http, *_at("chat", {"type": "integer", "minimum": 1, "maximum": 9}))
        assert answer.status_code == 200
        for attack in attacks:
            assert (await attack).status_code == 400


async def test_a_refusal_names_the_place_and_the_bound(http: httpx.AsyncClient) -> None:
    nested = {"type": "object", "properties": {"a": {"items": SCHEMAS["a large multiple"]}}}
    error = (await judged(http, *_at("chat", nested))).json()["error"]
    assert error["param"] == "response_format.json_schema.schema.properties.a.items.multipleOf"
    assert "1000000" in error["message"]
    error = (await judged(http, *_at("responses tools", nested))).json()["error"]
    assert error["param"] == "tools[0].parameters.properties.x.properties.a.items.multipleOf"


def _at(door: str, schema: Body) -> tuple[str, Body]:
    path, body = DOORS[door]
    return path, body(schema)
