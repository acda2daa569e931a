"""Limits of one client: bodies under way, answers unread, time of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from support.waiting import until

from edgemoe.api.http import bodies, responding
from edgemoe.api.http.bodies import HELD
from edgemoe.api.resources import PREPARE_THREADS
from edgemoe.front.main import Front
from edgemoe.policy.shares import most_of
from edgemoe.types.request import uid_principal

pytestmark = pytest.mark.asyncio(loop_scope="session")
MAX = 1 << 20  # of a body, in these tests
BODY = {"prompt": "SAY{hello}END", "max_tokens": 9}
SOMEBODY = uid_principal(1)


def held(front: Front) -> int:
    assert front.api is not None
    return front.api.bodies.held_bytes


@contextlib.asynccontextmanager
async def unfinished(front: Front, size: int) -> AsyncIterator[asyncio.StreamReader]:
    """Returns a request whose body lacks its last byte."""
    reader, writer = await asyncio.open_unix_connection(front.settings.api.socket)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (size + 1))
        writer.write(b" " * size)
        await writer.drain()
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_all_bodies_under_way_share_one_budget_and_the_largest_gives_way(
    front: Front, http: httpx.AsyncClient
) -> None:
    async with contextlib.AsyncExitStack() as many:
        readers = []
        for _ in range(3 * HELD):
            readers.append(await many.enter_async_context(unfinished(front, MAX - 1)))
            assert held(front) <= HELD * MAX
        await until(lambda: held(front) > most_of(HELD * MAX) - MAX)
        assert held(front) <= HELD * MAX
        assert (await http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == "hello"
        small = await http.post("/v1/completions", json={**BODY, "user": "x" * 300})
        assert small.status_code == 200
        refused = []
        for reader in readers:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.05):
                    refused.append(await reader.readline())
        assert len(refused) >= 2 * HELD
        assert set(refused) == {b"HTTP/1.1 429 Too Many Requests\r\n"}
    await until(lambda: held(front) == 0)


async def test_a_body_that_does_not_end_is_waited_for_so_long(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.1)
    async with unfinished(front, 100) as reader, asyncio.timeout(60):
        assert b" 408 " in await reader.readline()
    await until(lambda: held(front) == 0)


async def test_a_body_with_two_lengths_is_refused(front: Front) -> None:
    reader, writer = await asyncio.open_unix_connection(front.settings.api.socket)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"0\r\n\r\n")
    async with asyncio.timeout(60):
        answer = await reader.read()
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert b'"code":"http_400"' in answer
    writer.close()


async def test_a_stream_that_nobody_reads_ends_its_request(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responding, "SEND_S", 0.2)
    assert front.supervisor is not None
    requests = front.supervisor.requests
    body = b'{"prompt": "HANG@3000", "max_tokens": 3500, "n": 30, "stream": true}'
    _, writer = await asyncio.open_unix_connection(front.settings.api.socket, limit=1)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: len(requests) == 30)
    await until(lambda: len(requests) == 0)  # they would hang for ever
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_is_told_where_a_stop_string_ended_a_text(
    front: Front, http: httpx.AsyncClient, stream: bool
) -> None:
    body = {"prompt": "SAY{one two three four five six}END HANG@12", "stop": "two", "max_tokens": 50, "stream": stream}
    async with asyncio.timeout(60):  # the engine says nothing more, and waits for nobody but us
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert front.supervisor is not None
    await until(lambda: front.supervisor.metrics().get("edgemoe_num_requests_running") == 0)  # type: ignore[union-attr]


async def test_many_bodies_wait_for_a_thread_where_they_can_be_cancelled(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert front.api is not None
    api, release = front.api, asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60)

    waiting = [asyncio.ensure_future(api.in_thread(uid_principal(at), work)) for at in range(20)]
    await asyncio.sleep(0)
    await until(lambda: len(api.thread_turns) == 20 - PREPARE_THREADS)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert api.threads._work_queue.qsize() <= PREPARE_THREADS  # principals that had one
    release.set()
    async with asyncio.timeout(60):
        assert await api.in_thread(SOMEBODY, len, "abc") == 3
