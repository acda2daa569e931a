"""The HTTP server's connections: slow, silent and too many clients cost themselves only."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp
from support.waiting import until

from edgemoe.front import connections, http_connection
from edgemoe.front.connections import Server
from edgemoe.front.listen import tcp_socket, unix_socket

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
UPLOAD = b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"  # a ninth of its body
LONG = 8 << 20


async def _hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def _long(request: Request) -> Response:
    return PlainTextResponse("x" * LONG)


async def _read(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def _slow(request: Request) -> Response:
    await asyncio.sleep(0.9)
    return PlainTextResponse("at last")


async def _stream(request: Request) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)

    return StreamingResponse(lines())


APP = Starlette(
    routes=[
        Route("/", _hello),
        Route("/slow", _slow),
        Route("/long", _long),
        Route("/stream", _stream),
        Route("/read", _read, methods=["POST"]),
    ]
)


@asynccontextmanager
async def serving(path: Path, max_connections: int = 100, app: ASGIApp = APP) -> AsyncIterator[Server]:
    server = Server({unix_socket(path): app}, max_connections)
    running = asyncio.ensure_future(server.run_until_stopped())
    try:
        yield server
        assert not running.done()
    finally:
        server.stop()
        await running


async def ask(path: Path, data: bytes = GET) -> tuple[int, bytes]:
    """Returns status and body of the answer, read to its end."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def uploads(server: Server) -> int:
    """Returns the number of requests that wait for their bodies."""
    return sum(one.exchange is not None and one.exchange.more_body for one in server.connections)


@pytest.fixture
def api(tmp_path: Path) -> Path:
    return tmp_path / "api.sock"


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", GET[:-2], GET + b"GET /"], ids=["nothing", "line", "head", "second"]
)
async def test_a_head_that_never_ends_ends_its_connection(
    api: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_S", 0.3)
    async with serving(api) as server:
        reader, writer = await asyncio.open_unix_connection(api)
        writer.write(sent)
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1 408") == bool(sent)
        if sent:
            assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "http_408"
        writer.close()
        await until(lambda: not server.connections)


async def test_a_head_in_drops_is_no_longer_waited_for_than_one_that_stops(
    api: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_S", 0.3)
    loop = asyncio.get_running_loop()
    async with serving(api):
        with socket.socket(socket.AF_UNIX) as client:  # a stream that fails to write reads nothing more
            client.setblocking(False)
            client.connect(str(api))

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    for letter in GET * 100:
                        await loop.sock_sendall(client, bytes([letter]))
                        await asyncio.sleep(0.05)

            dripping = asyncio.ensure_future(drip())
            async with asyncio.timeout(60):
                assert b" 408 " in await loop.sock_recv(client, 65536)
                await dripping


async def test_a_head_that_has_come_is_timed_no_longer(api: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_S", 0.6)
    async with serving(api) as server:
        assert await ask(api, GET.replace(b" / ", b" /slow ")) == (200, b"at last")
        reader, writer = await asyncio.open_unix_connection(api)
        for parts in ([GET], [GET[:-1], GET[-1:]]):  # the second head in two parts, late as well
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            async with asyncio.timeout(60):
                assert b" 200 " in await reader.readuntil(b"hello")
        writer.write(GET[:9])
        async with asyncio.timeout(60):
            assert b" 408 " in await reader.readline()
        writer.close()
        await until(lambda: not server.connections)


@pytest.mark.parametrize(
    "noise",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(80) + b"\r\n\r\n",
        b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000,
    ],
    ids=["tls", "both lengths", "version", "length", "long head"],
)
async def test_invalid_requests_are_answered_with_the_error_object(api: Path, noise: bytes) -> None:
    async with serving(api):
        reader, writer = await asyncio.open_unix_connection(api)
        writer.write(noise)
        async with asyncio.timeout(60):
            answer = await reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"HTTP/1.1 400" in head
        assert b"application/json" in head
        assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
        writer.close()
        assert (await ask(api))[0] == 200


async def test_one_more_connection_takes_the_place_of_the_one_that_kept_us_waiting_longest(
    api: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.0)
    async with serving(api, max_connections=10) as server, contextlib.AsyncExitStack() as held:
        readers = []
        for number in range(10):
            reader, writer = await asyncio.open_unix_connection(api)
            held.callback(writer.close)
            writer.write((b"", b"GET /", GET, UPLOAD)[number % 4])
            if number % 4 == 2:
                await reader.readuntil(b"hello")
            readers.append(reader)
            await until(lambda count=number + 1: len(server.connections) == count)  # type: ignore[misc]
            await until(lambda count=(number + 1) // 4: uploads(server) == count)  # type: ignore[misc]
        for at in range(5):
            reader, writer = await asyncio.open_unix_connection(api)
            held.callback(writer.close)
            writer.write(GET)
            async with asyncio.timeout(60):
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                assert len(server.connections) <= 10
                with contextlib.suppress(ConnectionResetError):
                    await readers[at].read()  # ends: another connection has its place
            assert not readers[at + 1].at_eof()


async def test_an_upload_s_waiting_time_starts_at_its_head_not_at_its_connection(
    api: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.0)
    async with serving(api, max_connections=2) as server, contextlib.AsyncExitStack() as held:
        reader, writer = await asyncio.open_unix_connection(api)
        held.callback(writer.close)
        async with asyncio.timeout(60):
            writer.write(GET)
            await reader.readuntil(b"hello")
            silent, door = await asyncio.open_unix_connection(api)
            held.callback(door.close)
            await until(lambda: len(server.connections) == 2)
            writer.write(UPLOAD)
            await until(lambda: uploads(server) == 1)
            assert await ask(api) == (200, b"hello")
            assert await silent.read() == b""  # another connection has its place
            writer.write(b"y" * 8)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")


async def test_without_room_for_any_it_waits_says_so_sparingly_and_goes_on(
    api: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "PAUSE_S", 0.01)
    loop, full = asyncio.get_running_loop(), [OSError(errno.EMFILE, "Too many open files")] * 20
    accept: Callable[[socket.socket], Any] = loop.sock_accept

    async def accept_or_not(listener: socket.socket) -> Any:
        if full:
            raise full.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", accept_or_not)
    with caplog.at_level(logging.WARNING):
        async with serving(api):
            assert await ask(api) == (200, b"hello")
    assert not full
    assert {record.message for record in caplog.records} == {"no connection can be accepted: Too many open files"}
    assert len(caplog.records) < 6


async def test_an_answer_that_is_never_read_is_not_kept(api: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "UNREAD_S", 0.5)
    async with serving(api) as server:
        reader, writer = await asyncio.open_unix_connection(api, limit=1)
        writer.write(GET.replace(b" / ", b" /long "))
        await until(lambda: server.requests == 1)
        await until(lambda: not server.connections)
        writer.close()
        reader, writer = await asyncio.open_unix_connection(api)
        writer.write(GET.replace(b" / ", b" /long "))
        async with asyncio.timeout(60):  # a slow reader gets all of it
            body = await reader.readuntil(b"\r\n\r\n")
            received, started = 0, time.monotonic()
            while received < LONG:
                received += len(await reader.read(1 << 20))
                await asyncio.sleep(0.03)
        assert (received, body[:12]) == (LONG, b"HTTP/1.1 200")
        assert time.monotonic() - started > 0.5
        writer.close()


async def test_a_stream_that_is_never_read_is_not_kept(api: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "UNREAD_S", 0.5)
    async with serving(api) as server:
        _, writer = await asyncio.open_unix_connection(api, limit=1)
        writer.write(GET.replace(b" / ", b" /stream "))
        await until(lambda: server.requests == 1)
        await until(lambda: not server.connections)
        writer.close()
        reader, writer = await asyncio.open_unix_connection(api, limit=1 << 16)
        writer.write(GET.replace(b" / ", b" /stream "))
        received = 0
        async with asyncio.timeout(60):  # one that reads now and then continues
            while received < LONG:
                received += len(await reader.read(1 << 18))
                await asyncio.sleep(0.02)
        writer.close()
        await until(lambda: not server.connections)


async def test_a_uid_comes_with_a_unix_socket_only(api: Path) -> None:
    uids: list[int | None] = []

    async def noting(request: Request) -> Response:
        uids.append(request.state.peer_uid)
        return PlainTextResponse("")

    listeners = [unix_socket(api), tcp_socket("127.0.0.1:0")]
    port = listeners[1].getsockname()[1]
    server = Server(dict.fromkeys(listeners, Starlette(routes=[Route("/", noting)])), 10)
    running = asyncio.ensure_future(server.run_until_stopped())
    assert (await ask(api))[0] == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    async with asyncio.timeout(60):
        await reader.readuntil(b"\r\n\r\n")
    writer.close()
    server.stop()
    await running
    assert uids[0] is not None
    assert uids[1] is None


async def test_an_ipv4_client_of_a_listener_for_both_has_its_own_address(api: Path) -> None:
    addresses: list[Any] = []

    async def noting(request: Request) -> Response:
        addresses.append(request.scope["client"][0])
        return PlainTextResponse("")

    listener = tcp_socket("[::]:0")
    server = Server({listener: Starlette(routes=[Route("/", noting)])}, 10)
    running = asyncio.ensure_future(server.run_until_stopped())
    for host in ("127.0.0.1", "::1"):
        reader, writer = await asyncio.open_connection(host, listener.getsockname()[1])
        writer.write(GET)
        async with asyncio.timeout(60):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
    server.stop()
    await running
    assert addresses == ["127.0.0.1", "::1"]


async def test_a_request_whose_application_fails_is_answered_with_500(
    api: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(*_: Any) -> None:
        raise RuntimeError("unforeseen")

    async with serving(api, app=failing):
        assert (await ask(api))[0] == 500
    assert "a request failed unexpectedly" in caplog.text
