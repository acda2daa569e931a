"""`edgemoe dashboard`: the daemon's page on a loopback port, for a browser with the token."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from support.front_kit import running, settings_for, write_model

from edgemoe.cli.dashboard import DashboardProxy, listen
from edgemoe.errors import ServiceError
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="module")
PORT, TOKEN = 8099, "a-token-of-this-once"
KEY = {"authorization": f"Bearer {TOKEN}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("d")
    async with running(settings_for(folder, write_model(folder / "model"))) as front:
        yield front


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    passage = DashboardProxy(Path(front.settings.api.socket), TOKEN, PORT)
    transport = httpx.ASGITransport(passage)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
        yield client
    await passage.close()


async def test_the_page_comes_with_its_policy_and_all_else_needs_the_token(browser: httpx.AsyncClient) -> None:
    page = await browser.get("/")
    assert (page.status_code, page.headers["x-frame-options"]) == (200, "DENY")
    for path in ("/version", "/events", "/v1/models", "/reload"):
        assert (await browser.get(path)).status_code == 401
    assert (await browser.get("/version", headers=KEY)).status_code == 200


async def test_requests_and_answers_are_handed_on(browser: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "SAY{good morning}END"}], "stream": True}
    async with browser.stream("POST", "/v1/chat/completions", json=body, headers=KEY) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == "good morning"
    assert (await browser.get("/nowhere?x=1", headers=KEY)).json()["error"]["code"] == "http_404"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": f"evil.example:{PORT}"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": f"http://localhost:{PORT}"}, 403),
    ],
)
async def test_other_names_and_other_sites_get_nothing(
    browser: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    assert (await browser.get("/", headers=headers)).status_code == status
    assert (await browser.get("/version", headers=headers | KEY)).status_code == status


async def test_a_daemon_that_has_gone_is_named(tmp_path: Path) -> None:
    passage = DashboardProxy(tmp_path / "none.sock", TOKEN, PORT)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(passage), base_url=f"http://127.0.0.1:{PORT}") as client:
        answer = await client.get("/version", headers=KEY)
    await passage.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "no_daemon")
    assert "none.sock" in answer.json()["error"]["message"]


async def test_a_port_that_is_taken_is_named() -> None:
    with listen(0) as taken, pytest.raises(ServiceError, match="give another --port"):
        listen(taken.getsockname()[1])


async def test_the_command_prints_an_address_and_takes_it_along_when_it_ends(front: Front) -> None:
    command = [sys.executable, "-m", "edgemoe", "dashboard", "--no-open", "--socket", front.settings.api.socket]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        said = "".join([await asyncio.to_thread(process.stdout.readline) for _ in range(5)])
        found = re.search(r"(http://127\.0\.0\.1:\d+)/#(\S+)", said)
        assert found, said
        async with httpx.AsyncClient(base_url=found[1]) as client:
            assert (await client.get("/version", headers={"authorization": f"Bearer {found[2]}"})).status_code == 200
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 20) == 0
            with pytest.raises(httpx.ConnectError):
                await client.get("/")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
