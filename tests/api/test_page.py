"""The page at / and its events: the clients that get them, its policy, and the absence of users' text."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from edgemoe.api.api_keys import KeyRing
from edgemoe.api.app import build
from edgemoe.api.backend import BoxSnapshot
from edgemoe.api.endpoints.event_stream import MOST_STREAMS, EventStreams, StreamMemory
from edgemoe.api.http.middleware import Origins
from edgemoe.api.http.page import FILES, PAGE
from edgemoe.api.metrics import Metrics
from edgemoe.api.resources import Api
from edgemoe.api.text.bounded_text import BoundedText, text_command
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import ApiSettings
from edgemoe.errors import QueueFull
from edgemoe.front.main import Front
from edgemoe.policy.shares import most_of
from edgemoe.types.request import Principal
from edgemoe.types.snapshot import COMING, IN_RAM, ON_DISK, USE_BITS, RequestProgress, ServingSnapshot

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEY = {"authorization": "Bearer 0123456789abcdef"}
LISTED = "https://chat.example.org"


class Looked:
    """A backend that returns the snapshots given to it."""

    state = "ready"
    shown: list[BoxSnapshot] = []  # noqa: RUF012

    def metrics(self) -> dict[str, float]:
        return {"edgemoe_num_requests_running": 1.0}

    def snapshots(self) -> list[BoxSnapshot]:
        return self.shown

    def describe(self) -> dict[str, Any]:
        return {"status": self.state}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tcp(text_model: TextModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("0123456789abcdef\n")
    keys.chmod(0o600)
    settings = ApiSettings(cors_origins=(LISTED,))
    prompts = BoundedText(text_command(text_model.directory))
    app = build(Api(settings, Looked(), text_model, prompts, keys=KeyRing(keys)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080") as client:
        yield client
    await prompts.close()


async def events_of(client: httpx.AsyncClient, enough: Any) -> list[tuple[str, Any]]:
    """Returns the events until `enough` of it is true."""
    heard: list[tuple[str, Any]] = []
    async with asyncio.timeout(60), client.stream("GET", "/events") as answer:
        assert answer.status_code == 200
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                heard.append((name, json.loads(line.removeprefix("data: "))))
                if enough(heard):
                    return heard
    raise AssertionError(f"the stream ended: {heard}")


# --- the page


async def test_the_page_is_had_without_a_key_and_lets_nothing_else_in(tcp: httpx.AsyncClient) -> None:
    for path in PAGE:
        answer = await tcp.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await tcp.get("/")).headers["content-type"] == "text/html; charset=utf-8"
    assert (await tcp.get("/page/../app.py")).status_code == 401


async def test_the_page_is_files_of_the_package_without_inline_script_or_anything_from_outside() -> None:
    assert {file.name for file in FILES.iterdir()} == set(PAGE.values())
    for file in FILES.iterdir():
        text = file.read_text()
        assert len(text.splitlines()) <= 300
        assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+/", text.replace("http://www.w3.org/2000/svg", ""))
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|document\.cookie", text)
        assert "localStorage" not in text or file.name == "memory.js"
        assert "sessionStorage" not in text or file.name == "wire.js"
    html = (FILES / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module" src="/page/main.js">']
    assert not re.search(r"\son\w+=|\sstyle=|<style", html)


async def test_events_need_the_key(tcp: httpx.AsyncClient) -> None:
    assert (await tcp.get("/events")).status_code == 401
    assert (await tcp.get("/events", headers={"authorization": "Bearer wrong"})).status_code == 401


# --- who may call


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:8080", True),
        ("192.0.2.7", True),
        ("[::1]:8080", True),
        ("localhost:1", True),
        (f"{socket.gethostname().partition('.')[0]}.lan:80", True),
        ("chat.example.org", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        (f"{socket.gethostname().partition('.')[0]}.evil.com", False),
        (f"{socket.gethostname()}.lan.evil.com", False),
        ("localhost.evil.com", False),
        ("box.example.org", True),
        ("BOX.example.org.:80", True),
        ("a.box.example.org", False),
        ("", False),
        ("[", False),
    ],
)
async def test_a_host_is_ours_by_address_or_by_a_name_that_we_have(host: str, ours: bool) -> None:
    assert Origins([LISTED], ["box.example.org"]).are_ours(host) is ours


async def test_a_name_that_somebody_points_at_this_machine_is_not_shown_the_page(tcp: httpx.AsyncClient) -> None:
    answer = await tcp.get("/", headers={"host": "evil.example:8080"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "misdirected")
    assert (await tcp.get("/health", headers={"host": "monitored.example"})).status_code == 200


async def test_a_page_of_another_site_is_refused_unless_it_has_a_key(tcp: httpx.AsyncClient) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:8081"):
        answer = await tcp.get("/health", headers={"origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
        assert (await tcp.get("/version", headers={"origin": origin, **KEY})).status_code == 200
    for origin in ("http://127.0.0.1:8080", LISTED):
        assert (await tcp.get("/health", headers={"origin": origin})).status_code == 200


async def test_a_page_of_another_site_gets_nothing_by_way_of_a_proxy_to_the_socket(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = await http.post("/v1/chat/completions", json=body, headers={"origin": "http://evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
    assert (await http.get("/version", headers={"origin": "http://edgemoe"})).status_code == 200


# --- events


async def test_head_of_events_is_answered_at_once(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        answer = await http.head("/events")
        assert (await http.get("/version")).status_code == 200, "which comes by the same connection"
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_events_show_the_running_work(http: httpx.AsyncClient) -> None:
    heard = await events_of(http, lambda some: {"box", "state"} <= {name for name, _ in some})
    assert heard[0][0] == "hello"
    state = next(data for name, data in heard if name == "state")
    assert state["health"]["status"] == "ready"
    assert state["figures"]["edgemoe_time_to_first_token_seconds_count"] >= 0
    box = next(data for name, data in heard if name == "box")
    assert (box["box"], box["layers"], box["experts"]) == ("", 2, 8)
    assert base64.b64decode(box["cells"]) == bytes((ON_DISK, IN_RAM)) * 8


async def test_events_contain_no_prompts_or_answers(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    async def talk() -> None:
        said = "SAY{xylophone " + "zebra " * 300 + "}END"
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": said}],
            user="quagga",
            extra_headers={"x-request-id": "yeti"},
        )
        assert "zebra" in (answer.choices[0].message.content or "")

    talking = asyncio.ensure_future(talk())
    heard = await events_of(http, lambda some: any(data.get("requests") for name, data in some if name == "box"))
    await talking
    heard += await events_of(http, lambda some: "state" in {name for name, _ in some})
    assert not re.search("xylophone|zebra|quagga|yeti", json.dumps(heard))


async def test_only_changes_are_sent_again() -> None:
    memory, cells = StreamMemory(0.0), bytes((IN_RAM, IN_RAM | COMING | 9 << USE_BITS))
    seen = ServingSnapshot(layers=1, experts=2, cells=cells, requests=(RequestProgress("waiting", 1.0, 2, 0, 0),))
    assert [box["cells"] for box in memory.boxes([BoxSnapshot("a", seen), BoxSnapshot("b", None)])] == [cells]
    assert list(memory.boxes([BoxSnapshot("a", seen)])) == []
    (later,) = memory.boxes([BoxSnapshot("a", msgspec.structs.replace(seen, requests=()))])
    assert (later["requests"], "cells" in later) == ((), False)
    assert memory.state({"status": "ready"}, {"x": 1.0, "y": 2.0})["figures"] == {"x": 1.0, "y": 2.0}
    again = memory.state({"status": "ready"}, {"x": 1.0, "y": 3.0})
    assert (again["figures"], "health" in again) == ({"y": 3.0}, False)


async def test_no_principal_takes_all_places_of_viewers() -> None:
    events = EventStreams(Looked(), Metrics())  # type: ignore[arg-type]
    streams = [events(Principal("m")) for _ in range(most_of(MOST_STREAMS))]
    for stream in streams:
        events.admit(Principal("m"))
        await anext(stream)
    with pytest.raises(QueueFull):
        events.admit(Principal("m"))
    events.admit(Principal("v"))
    for stream in streams:
        await stream.aclose()


async def test_viewers_are_bounded_and_disconnected_when_the_daemon_drains() -> None:
    backend = Looked()
    events = EventStreams(backend, Metrics())  # type: ignore[arg-type]
    streams = [events(Principal(str(n))) for n in range(MOST_STREAMS)]
    for n, stream in enumerate(streams):
        events.admit(Principal(str(n)))
        await anext(stream)
    with pytest.raises(QueueFull, match="edgemoe top"):
        events.admit(Principal("another"))
    for stream in streams[1:]:
        await stream.aclose()
    backend.state = "draining"
    assert b"event: bye" in b"".join([some async for some in streams[0]])
    assert not events._watchers


# --- the real engine


async def test_a_real_engine_shows_its_experts_places_and_use(demo: Front) -> None:
    transport = httpx.AsyncHTTPTransport(uds=demo.settings.api.socket, verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=60.0) as client:
        body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}
        talking = asyncio.ensure_future(client.post("/v1/completions", json=body))
        seen = await events_of(client, used)
        assert (await talking).status_code == 200
    box = [data for name, data in seen if name == "box" and "cells" in data][-1]
    cells = base64.b64decode(box["cells"])
    assert len(cells) == box["layers"] * box["experts"] == 6 * 32
    assert {cell & 7 for cell in cells} == {IN_RAM}
    assert sum(box["served"]) > 0


def used(heard: list[tuple[str, Any]]) -> bool:
    """Whether a box has shown experts of every layer that are used more than the mean."""
    name, data = heard[-1]
    if name != "box" or not data.get("cells"):
        return False
    cells = base64.b64decode(data["cells"])
    rows = [cells[at : at + data["experts"]] for at in range(0, len(cells), data["experts"])]
    return all(any(cell >> USE_BITS > 8 for cell in row) for row in rows)
