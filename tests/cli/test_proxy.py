"""`edgemoe proxy`: one address for several fronts, whose clients get each token once while fronts come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from support.front_kit import running, settings_for, write_model
from support.rolling import THIS
from support.waiting import until

from edgemoe.api.generate.held_answer import ASKS_FRAMES, HELD_BYTES, HeldAnswer
from edgemoe.cli import proxy_command
from edgemoe.cli.dashboard import proxy_server
from edgemoe.cli.proxy_command import FrontAddress, FrontProxy, run
from edgemoe.errors import ServiceError
from edgemoe.front.listen import tcp_socket
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = 'so: <tool_call>\n{"name": "look", "arguments": {"where": "in the drawer below", "far": 3}}\n</tool_call>'
ASKED = [{"role": "user", "content": "SAY{naïve 東京 and 🦊 go over the lazy dog in the morning}END"}]
CALLS = [{"role": "user", "content": f"SAY{{{CALL}}}END"}]
FREE = [{"role": "user", "content": "anything"}]
SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}, "far": {"type": "integer"}}}
TOOL = {"name": "look", "parameters": SCHEMA}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": ASKED, "stream_options": {"include_usage": True}}),
    "chat with a call": (
        "/v1/chat/completions",
        {"messages": CALLS, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "two chats with log probabilities": (
        "/v1/chat/completions",
        {"messages": FREE, "n": 2, "max_tokens": 30, "logprobs": True, "top_logprobs": 1},
    ),
    "completions": ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 20, "stop": ["xyzw"]}),
    "a completion that repeats its prompt": ("/v1/completions", {"prompt": "one", "echo": True, "max_tokens": 20}),
    "a response": ("/v1/responses", {"input": ASKED}),
    "a response with a call": ("/v1/responses", {"input": CALLS, "tools": [{"type": "function", **TOOL}]}),
    "a message": ("/v1/messages", {"messages": ASKED, "max_tokens": 80}),
    "a message with a call": (
        "/v1/messages",
        {"messages": CALLS, "max_tokens": 120, "tools": [{"name": "look", "input_schema": SCHEMA}]},
    ),
    "Ollama's chat": ("/api/chat", {"messages": ASKED}),
    "Ollama's text": ("/api/generate", {"prompt": "anything", "options": {"num_predict": 30, "seed": 7}}),
}
CHANGING = {"timings", "created", "created_at", "total_duration", "load_duration", "eval_duration", "usage", "id"}
CHANGING |= {"prompt_eval_duration", "item_id", "call_id", "sequence_number", "logprobs", "model"}


class Cutting(httpx.AsyncBaseTransport):
    """Passes requests to a front. Breaks off, or stands still, behind `after` bytes of each answer that generates."""

    def __init__(self, path: str, after: int | None, hangs: bool) -> None:
        self._inner = httpx.AsyncHTTPTransport(uds=path)
        self.after, self.hangs = after, hangs
        self.cut = 0
        self.asked: list[tuple[httpx.Headers, bytes]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.cut and self.after is not None:
            if self.hangs:
                await asyncio.Event().wait()
            raise httpx.ConnectError("it is gone")
        if request.method == "POST":
            self.asked.append((request.headers, await request.aread()))
        answer = await self._inner.handle_async_request(request)
        if self.after is None or request.method != "POST":
            return answer
        return httpx.Response(answer.status_code, headers=answer.headers, stream=CutStream(self, answer))

    async def aclose(self) -> None:
        await self._inner.aclose()


class CutStream(httpx.AsyncByteStream):
    def __init__(self, owner: Cutting, answer: httpx.Response) -> None:
        self._owner, self._answer, self._left = owner, answer, owner.after or 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._answer.stream, httpx.AsyncByteStream)
        async for some in self._answer.stream:
            yield some[: self._left]
            self._left -= len(some)
            if self._left < 0:
                self._owner.cut += 1
                if self._owner.hangs:
                    await asyncio.Event().wait()
                raise httpx.ReadError("it was killed")

    async def aclose(self) -> None:
        await self._answer.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Front]]:
    folder = tmp_path_factory.mktemp("p")
    model = write_model(folder / "model")
    for name in ("a", "b"):
        (folder / name).mkdir()
    async with contextlib.AsyncExitStack() as open_:
        yield [await open_.enter_async_context(running(settings_for(folder / name, model))) for name in ("a", "b")]


@contextlib.asynccontextmanager
async def proxied(
    fronts: Sequence[Front], cuts: Sequence[int | None], *, hangs: bool = False, most: int = 256
) -> AsyncIterator[tuple[httpx.AsyncClient, list[Cutting], FrontProxy]]:
    """Leads a client to fronts, each of which is cut behind the bytes in `cuts`."""
    transports = [Cutting(front.settings.api.socket, cut, hangs) for front, cut in zip(fronts, cuts, strict=True)]
    addresses = [FrontAddress.of(f"unix:{n}") for n, _ in enumerate(transports)]
    proxy = FrontProxy(addresses, most)
    proxy._is_open = True
    for address, transport in zip(addresses, transports, strict=True):
        address.http = httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=60)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://app", timeout=60.0) as client:
        yield client, transports, proxy
    await proxy.close()


def events_of(text: str) -> list[Any]:
    """Returns the objects of a stream of events or lines."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith(("event:", ":"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def same(one: Any) -> Any:
    """Returns a part of an event without the fields that differ from answer to answer."""
    if isinstance(one, dict):
        return {name: same(value) for name, value in one.items() if name not in CHANGING}
    return [same(each) for each in one] if isinstance(one, list) else one


def leaves(one: Any, place: str) -> Any:
    if isinstance(one, dict):
        for name, value in one.items():
            yield from leaves(value, f"{place}/{name}")
    elif isinstance(one, list):
        for value in one:
            yield from leaves(value, place)
    else:
        yield place, str(one)


def summary(events: Sequence[Any]) -> tuple[dict[str, str], list[str]]:
    """Returns the joined pieces of text of a stream by kind and choice, and its other events in order."""
    pieces: dict[str, str] = {}
    others: list[str] = []
    for each in events:
        kind = each.get("type") or each.get("object") or "line"
        for n in each.get("choices", [{}]):
            about = f"{kind} {n.get('index', each.get('index', each.get('output_index', '')))}"
            for place, value in leaves(same(n or each), ""):
                if place.rpartition("/")[2] in ("content", "text", "delta", "partial_json", "arguments", "response"):
                    pieces[f"{about} {place}"] = pieces.get(f"{about} {place}", "") + value.replace("None", "")
                elif (
                    place.endswith(("finish_reason", "stop_reason", "done_reason", "status", "/name"))
                    and value != "None"
                ):
                    others.append(f"{about} {place} {value}")
        if "delta" not in kind and "chunk" not in kind and kind != "line":
            others.append(kind)
    return {name: value for name, value in pieces.items() if value}, sorted(
        dict.fromkeys(others), key=lambda one: one.split("/")[0]
    )


@pytest.mark.parametrize("cuts", [(1, 1500), pytest.param((700, 2500), marks=pytest.mark.slow)])
async def test_a_front_that_is_killed_within_any_stream_costs_no_token_and_repeats_none(
    fronts: list[Front], cuts: tuple[int, int]
) -> None:
    moved = 0
    for name, (path, body) in STREAMS.items():
        body = {"model": "tiny", "stream": True, "seed": 7, **body}
        async with proxied(fronts, [None, None]) as (client, _, _):
            whole = await client.post(path, json=body)
            assert whole.status_code == 200, whole.text
        wanted, size = summary(events_of(whole.text)), 0
        for cut in cuts:
            async with proxied(fronts, [cut, None]) as (client, (dying, other), proxy):
                answer = await client.post(path, json=body)
                assert answer.status_code == 200
                assert answer.headers["content-type"] == whole.headers["content-type"]
                assert summary(events_of(answer.text)) == wanted, (name, cut)
                check_ids(events_of(answer.text))
                size += dying.cut
                if proxy.moved:
                    moved += 1
                    headers, sent = other.asked[-1]
                    held = msgspec.json.decode(sent[: int(headers[HELD_BYTES])], type=HeldAnswer)
                    assert any(shown.tokens for frame in held.frames for shown in frame)
        assert size, name
    assert moved >= len(STREAMS) // 2


def check_ids(events: Sequence[Any]) -> None:
    """Checks that the two halves of a stream name the same answer and parts, and count on."""
    numbers = [each["sequence_number"] for each in events if "sequence_number" in each]
    assert numbers == list(range(len(numbers)))
    for name in ("id", "created"):
        assert len({each[name] for each in events if name in each}) <= 1
    parts: dict[int, set[str]] = {}
    for each in events:
        item = each.get("item_id") or (each.get("item") or {}).get("id")
        if item and "output_index" in each:
            parts.setdefault(each["output_index"], set()).add(item)
    assert all(len(ids) == 1 for ids in parts.values())


async def test_the_next_front_draws_with_the_seed_of_the_first(fronts: list[Front]) -> None:
    body = {"model": "tiny", "stream": True, "prompt": "one", "max_tokens": 60}
    async with proxied(fronts, [2000, None]) as (client, (dying, other), proxy):
        drawn = await client.post("/v1/completions", json=body)
        assert (dying.cut, proxy.moved) == (1, 1)
        headers, sent = other.asked[-1]
    held = msgspec.json.decode(sent[: int(headers[HELD_BYTES])], type=HeldAnswer)
    async with proxied(fronts, [None, None]) as (client, _, _):
        again = await client.post("/v1/completions", json={**body, "seed": held.answer.seeds[0]})
    assert summary(events_of(drawn.text)) == summary(events_of(again.text))


async def test_a_front_that_stands_still_is_left(fronts: list[Front], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_command, "LOOK_S", 0.2)
    path, body = STREAMS["chat"]
    for cut in (0, 1500):
        async with proxied(fronts, [cut, None], hangs=True) as (client, (still, _), _):
            answer = await client.post(path, json={"stream": True, **body})
            assert still.cut == 1
        assert events_of(answer.text)[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_whole_answer_comes_from_the_next_front(fronts: list[Front]) -> None:
    async with proxied(fronts, [100, None]) as (client, (dying, _), _):
        answer = await client.post("/v1/chat/completions", json={"messages": ASKED})
        assert dying.cut == 1
    assert "lazy dog" in answer.json()["choices"][0]["message"]["content"]


async def test_keys_and_names_pass_and_internal_headers_do_not(fronts: list[Front]) -> None:
    given = {"authorization": "Bearer one", "x-request-id": "mine", HELD_BYTES: "9", ASKS_FRAMES: "0"}
    async with proxied(fronts, [None, None]) as (client, (first, _), _):
        answer = await client.post("/v1/chat/completions", json={"messages": ASKED}, headers=given)
        headers, _ = first.asked[-1]
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    assert (headers["authorization"], headers["x-request-id"]) == ("Bearer one", "mine")
    assert headers.get_list(ASKS_FRAMES) == ["1"]
    assert HELD_BYTES not in headers


@pytest.mark.parametrize(
    ("path", "begins"), [("/v1/chat/completions", True), ("/v1/messages", True), ("/version", False)]
)
async def test_without_any_front_a_client_is_told(
    fronts: list[Front], path: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_command, "PATIENCE_S", 0.0)
    async with proxied(fronts, [500, 0]) as (client, _, _):  # behind its begin, before the end of one with one event
        body = {"messages": ASKED, "max_tokens": 80, "stream": True}
        answer = await client.post(path, json=body) if begins else await client.get(path)
        if not begins:
            assert answer.status_code == 200  # only answers that generate are cut here
            return
    assert "no front takes the request" in answer.text
    assert answer.text.count("lazy dog") == 0


async def test_requests_beyond_the_limit_are_refused_and_a_client_that_leaves_frees_its_place(
    fronts: list[Front],
) -> None:
    async with proxied(fronts, [None, None], most=1) as (client, _, proxy):
        hanging = {"messages": [{"role": "user", "content": "HANG@5"}], "stream": True}
        waiting = asyncio.ensure_future(client.post("/v1/chat/completions", json=hanging))
        await until(lambda: proxy._live == 1)
        refused = await client.get("/version")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: proxy._live == 0)
        assert (await client.get("/version")).status_code == 200


HELD = {"answer": {"id": "chatcmpl-" + "0" * 24, "created": 1, "seeds": [1]}, "frames": [[[0, [5, 6], ""]]]}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"answer": {**HELD["answer"], "seeds": [1, 2]}}, "2 seeds for 1 choices"),
        ({"answer": {**HELD["answer"], "id": "resp-" + "0" * 24}}, "no part of an answer"),
        ({"answer": {**HELD["answer"], "id": "x" * 99}}, "regex"),
        ({"frames": [[[1, [5], ""]]]}, "a choice or a token"),
        ({"frames": [[[0, [99_999], ""]]]}, "a choice or a token"),
        ({"frames": [[[0, [5] * 50, ""]]]}, "50 tokens of at most 30"),
        ({"frames": 3}, "array"),
    ],
)
async def test_a_held_part_that_cannot_be_is_refused(fronts: list[Front], changed: dict[str, Any], why: str) -> None:
    held = json.dumps({**HELD, **changed}).encode()
    body = json.dumps({"messages": FREE, "stream": True, "max_tokens": 30}).encode()
    transport = httpx.AsyncHTTPTransport(uds=fronts[0].settings.api.socket)
    async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe") as client:
        for size, said in ((str(len(held)), why), ("x", "no number of bytes"), (str(10**9), "no number of bytes")):
            answer = await client.post("/v1/chat/completions", content=held + body, headers={HELD_BYTES: size})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_held")
            assert said in answer.json()["error"]["message"]
        whole = json.dumps(HELD).encode()
        body = json.dumps({"messages": FREE, "max_tokens": 30}).encode()
        answer = await client.post("/v1/chat/completions", content=whole + body, headers={HELD_BYTES: str(len(whole))})
        assert "only streams" in answer.json()["error"]["message"]


async def test_addresses_that_lead_nowhere_or_past_the_keys_are_refused(tmp_path: Path) -> None:
    for word in ("here", "ftp://a", "http://", "http://a:1/v1"):
        with pytest.raises(ServiceError, match=r"no front's address|no address"):
            FrontAddress.of(word)
    options = type("Options", (), {"front": ["unix:/x"], "socket": None, "listen": "127.0.0.1:0", "requests": 1})
    with pytest.raises(ServiceError, match="asks for no key"):
        run(options())  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def front_process(folder: Path, model: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], Path]]:
    """Runs a front in a process of its own, whose scripted engine takes 20 ms a token."""
    folder.mkdir()
    settings = settings_for(folder, model)
    path = Path(settings.api.socket)
    command = [*THIS, msgspec.json.encode(settings).decode()]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "SCRIPTED_STEP_S": "0.02"})
    try:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe") as client:

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get("/health")).is_success
                return False

            while not await is_ready():
                assert process.poll() is None, (folder / "log").read_text()
                await asyncio.sleep(0.1)
        yield process, path
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_front_s_process_that_is_killed_or_stopped_mid_stream_costs_no_token(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_command, "LOOK_S", 0.5)
    model = write_model(tmp_path / "model")
    body = {"model": "tiny", "prompt": "one", "max_tokens": 60, "stream": True, "seed": 3}
    async with (
        front_process(tmp_path / "a", model) as (dying, first),
        front_process(tmp_path / "b", model) as (_, second),
    ):
        proxy = FrontProxy([FrontAddress.of(f"unix:{path}") for path in (first, second)], 8)
        listener = tcp_socket("127.0.0.1:0")
        server = proxy_server(proxy)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=address, timeout=60.0) as client:
            wanted = await client.post("/v1/completions", json=body)
            lines = list[str]()
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if len(lines) == 20:
                        os.kill(dying.pid, number)
        assert proxy.moved == 1
        assert lines[-2:] == ["data: [DONE]", ""]
        assert summary(events_of("\n".join(lines))) == summary(events_of(wanted.text))
        check_ids(events_of("\n".join(lines)))
        server.should_exit = True
        await serving
        await proxy.close()
