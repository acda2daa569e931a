"""Clients without a key, or with bad manners, do not keep out a client with a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from support.gate import in_gate
from support.waiting import until

from edgemoe.api.api_keys import KeyRing
from edgemoe.api.http.middleware import RequestMiddleware
from edgemoe.api.metrics import Metrics
from edgemoe.front import http_connection, http_exchange
from edgemoe.front.connections import MOST_UNKNOWN, Server
from edgemoe.front.http_connection import HttpConnection
from edgemoe.front.listen import tcp_socket, unix_socket

KEY = b"Authorization: Bearer 0123456789abcdef\r\n"
STYLE = b"GET /page/style.css HTTP/1.1\r\nHost: x\r\n\r\n"
SOON_S = 5.0  # time in which a client with a key is answered, on a busy machine


async def _style(request: Request) -> Response:
    return PlainTextResponse("s" * 6000)


async def _echo(request: Request) -> Response:
    return PlainTextResponse(
        f"{request.url.path}?{request.url.query} {request.headers['host']} {await request.body()!r}"
    )


async def _late(request: Request) -> Response:
    await asyncio.sleep(0.7)
    return PlainTextResponse("at last")


async def _stream(request: Request) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)

    return StreamingResponse(lines())


class Counted:
    """Counts the requests that are being answered, and the cancelled ones."""

    def __init__(self) -> None:
        self.running = self.given_up = 0

    async def gone(self, request: Request) -> Response:
        self.running += 1
        try:
            await request.body()
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.given_up += 1
        finally:
            self.running -= 1
        return PlainTextResponse("")


@pytest.fixture(autouse=True)
def _files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Serving:
    def __init__(self, server: Server, port: int, counted: Counted, metrics: Metrics) -> None:
        self.server, self.port, self.counted, self.metrics = server, port, counted, metrics

    async def connect(
        self, host: str = "127.0.0.1", source: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(host, self.port, local_addr=(source, 0))

    async def ask(self, data: bytes, source: str = "127.0.0.1") -> tuple[int, bytes]:
        """Returns status and body of the answer to one request that closes its connection."""
        reader, writer = await self.connect(source=source)
        try:
            writer.write(data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            async with asyncio.timeout(SOON_S):
                answer = await reader.read()
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    async def victim(self, source: str = "127.0.0.1") -> None:
        """Asks with a key, by a connection of its own."""
        assert (await self.ask(b"GET /echo HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n", source))[0] == 200


@asynccontextmanager
async def serving(tmp_path: Path, max_connections: int = 1024, path: Path | None = None) -> AsyncIterator[Serving]:
    file = tmp_path / "keys"
    file.write_text("bob 0123456789abcdef\n")
    file.chmod(0o600)
    counted, metrics = Counted(), Metrics()
    routes = [
        Route("/page/style.css", _style),
        Route("/health", _style),
        Route("/echo", _echo, methods=["GET", "POST", "HEAD"]),
        Route("/late", _late),
        Route("/stream", _stream),
        Route("/gone", counted.gone, methods=["GET", "POST"]),
    ]
    app = Starlette(
        routes=routes, middleware=[Middleware(RequestMiddleware, keys=KeyRing(file), metrics=metrics, node="")]
    )
    listeners = [tcp_socket("127.0.0.1:0"), *([unix_socket(path)] if path else [])]
    port = listeners[0].getsockname()[1]
    server = Server(dict.fromkeys(listeners, app), max_connections)
    running = asyncio.ensure_future(server.run_until_stopped())
    try:
        yield Serving(server, port, counted, metrics)
        assert not running.done()
    finally:
        server.stop()
        await running


def deaf(port: int, data: bytes, source: str = "127.0.0.1") -> socket.socket:
    """Opens a connection, sends as many bytes as fit and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.bind((source, 0))
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        client.connect(("127.0.0.1", port))
    with contextlib.suppress(OSError):
        client.send(data)
    return client


ATTACKS = {
    "nothing": b"",
    "half a head": b"GET / HT",
    "GET": STYLE * 1000,
    "HEAD": STYLE.replace(b"GET", b"HEAD") * 1000,
    "POST": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx" * 800,
    "a mix": (STYLE + STYLE.replace(b"GET", b"HEAD") + b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n") * 300,
    "upgrades": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" * 500,
    "a body that never comes": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx",
    "no requests": b"\x16\x03\x01\r\n\r\n",
}


GATE = {("half a head", 1), ("GET", 40), ("a mix", 1), ("a body that never comes", 40), ("upgrades", 1)}


@pytest.mark.parametrize(
    "way", in_gate([(attack, sources) for attack in ATTACKS for sources in (1, 40)], GATE), ids=str
)
async def test_a_client_with_a_key_is_served_while_1100_others_read_nothing(
    tmp_path: Path, way: tuple[str, int]
) -> None:
    attack, sources = way
    async with serving(tmp_path) as api:
        reader, writer = await api.connect()  # an idle connection from before stays
        writer.write(b"GET /echo HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n")
        await reader.readuntil(b"b''")
        held = []
        try:
            for number in range(1100):
                held.append(deaf(api.port, ATTACKS[attack], f"127.0.1.{1 + number % sources}"))
                if number % 100 == 99:
                    await asyncio.sleep(0.01)
                    await api.victim()
            for one in held:
                with contextlib.suppress(OSError):
                    one.send(ATTACKS[attack])
            for source in ("127.0.0.1", "127.0.1.1"):  # another address, and the attackers' own
                for _ in range(3):
                    await api.victim(source)
            unknown = [one for one in api.server.connections if not one.owner]
            assert len(unknown) <= MOST_UNKNOWN * sources + 1
            writer.write(b"GET /echo HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n")
            async with asyncio.timeout(SOON_S):
                await reader.readuntil(b"b''")
        finally:
            writer.close()
            for one in held:
                one.close()


async def test_a_burst_of_9000_idle_connects_delays_nobody_with_a_key(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        held = []
        try:
            for number in range(9000):
                held.append(deaf(api.port, b""))
                if len(held) > 4000:
                    held.pop(0).close()
                if number % 1500 == 1499:
                    began = time.monotonic()
                    await api.victim()
                    assert time.monotonic() - began < SOON_S
        finally:
            for one in held:
                one.close()


async def test_with_every_place_taken_a_client_with_a_key_gets_in(tmp_path: Path) -> None:
    async with serving(tmp_path, max_connections=20) as api, contextlib.AsyncExitStack() as held:
        for number in range(60):
            held.callback(deaf(api.port, STYLE, f"127.0.2.{1 + number}").close)
        for _ in range(5):
            await api.victim()
        assert len(api.server.connections) <= 20


async def test_requests_behind_an_answer_that_is_not_read_are_not_begun(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        client = deaf(api.port, STYLE * 500)
        try:
            await until(lambda: api.server.requests > 0)
            for _ in range(50):
                await asyncio.sleep(0.01)
            assert api.server.requests < 100
        finally:
            client.close()


async def test_500_pipelined_requests_of_a_reading_client_are_answered_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        reader, writer = await api.connect()
        ask = b"GET /echo?%d HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n"
        writer.write(b"".join(ask % number for number in range(500)))
        async with asyncio.timeout(60):
            for number in range(500):
                answer = await reader.readuntil(b"b''")
                assert b"/echo?%d x" % number in answer
        writer.close()


async def test_a_stream_that_one_reads_slowly_leaves_the_others_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as api, contextlib.AsyncExitStack() as held:
        for _ in range(20):
            held.callback(deaf(api.port, b"GET /stream HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n").close)
        await until(lambda: api.server.requests == 20)
        for _ in range(5):
            await api.victim()


# --- valid HTTP --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET /echo HTTP/1.1\nHost: x\n\n",
        b"GET /echo HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\r\nA: b\r\n\tc\r\n\r\n",
        b"GET /echo HTTP/1.1\r\n Host: x\r\n\r\n",
        b"GET /echo\n",
        b"GET echo HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http:///echo HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://a@b/echo HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[x/echo HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /echo HTTP/1.1\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    ],
)
async def test_ambiguous_requests_are_refused(tmp_path: Path, data: bytes) -> None:
    async with serving(tmp_path) as api:
        reader, writer = await api.connect()
        writer.write(data)
        async with asyncio.timeout(SOON_S):
            answer = await reader.read()
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"].startswith("http_")
        writer.close()


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (b"http://other/echo?a=b", b"/echo?a=b other "),
        (b"HTTP://other:80/echo", b"/echo? other:80 "),
        (b"https://other/echo", b"/echo? other "),
        (b"/echo?http://y", b"/echo?http://y x "),
    ],
)
async def test_a_target_may_be_a_whole_url_whose_host_counts(tmp_path: Path, target: bytes, told: bytes) -> None:
    async with serving(tmp_path) as api:
        assert (await api.ask(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n")) == (200, told + b"b''")


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"deflate", b"zstd", b"gzip, identity", b"x" * 200])
async def test_a_body_in_another_encoding_is_415(tmp_path: Path, coding: bytes) -> None:
    ask = b"POST /echo HTTP/1.1\r\nHost: x\r\n%bContent-Length: 2\r\nContent-Encoding: %b\r\n\r\n{}"
    async with serving(tmp_path) as api:
        status, body = await api.ask(ask % (KEY, coding))
        assert (status, json.loads(body)["error"]["code"]) == (415, "http_415")
        assert (await api.ask(ask % (KEY, b"identity")))[0] == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("by_unix", [False, True])
async def test_a_client_that_sends_no_more_is_answered(tmp_path: Path, by_unix: bool, version: bytes) -> None:
    path = tmp_path / "sock"
    async with serving(tmp_path, path=path) as api:
        reader, writer = await (asyncio.open_unix_connection(path) if by_unix else api.connect())
        writer.write(b"GET /late HTTP/%b\r\nHost: x\r\n%b\r\n" % (version, KEY))
        writer.write_eof()
        async with asyncio.timeout(SOON_S):
            assert (await reader.read()).endswith(b"at last")
        writer.close()
        await until(lambda: not api.server.connections)


@pytest.mark.parametrize("by_unix", [False, True])
async def test_an_answer_is_given_up_when_its_client_hangs_up(tmp_path: Path, by_unix: bool) -> None:
    path = tmp_path / "sock"
    async with serving(tmp_path, path=path) as api:
        _, writer = await (asyncio.open_unix_connection(path) if by_unix else api.connect())
        writer.write(b"GET /gone HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n")
        await until(lambda: api.counted.running == 1)
        writer.close()
        await until(lambda: api.counted.given_up == 1)


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_is_given_up_also_where_a_long_body_came_at_once(tmp_path: Path, chunked: bool) -> None:
    body = b"x" * (http_exchange.BUFFER_BYTES + 1)
    framing, data = b"Content-Length: %d" % len(body), body
    if chunked:
        framing, data = b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with serving(tmp_path) as api:
        _, writer = await api.connect()
        writer.write(b"POST /gone HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n" + KEY + b"\r\n" + data)
        await until(lambda: api.counted.running == 1)
        writer.close()
        await until(lambda: api.counted.given_up == 1)


CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
SMALL, LAST = b"1\r\nx\r\n", b"0\r\n\r\n"


@pytest.mark.parametrize("key", [KEY, b""], ids=["with a key", "without"])
async def test_a_body_of_small_chunks_lets_others_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    monkeypatch.setattr(http_exchange, "CHUNK_PAUSE_S", 0.2)
    count = 10 * http_exchange.CHUNKS_AT_ONCE
    async with serving(tmp_path) as api:
        reader, writer = await api.connect()
        writer.write(CHUNKED + key + b"\r\n" + SMALL * count + LAST)
        answered = asyncio.ensure_future(reader.readuntil(b"x" * count if key else b"401"))
        await api.victim()
        assert not key or not answered.done()
        async with asyncio.timeout(SOON_S):
            await answered
        writer.close()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (SMALL * http_exchange.FREE_CHUNKS + LAST, 200),
        ((b"20\r\n" + b"x" * 32 + b"\r\n") * 4 * http_exchange.FREE_CHUNKS + LAST, 200),
        (SMALL * 2 * http_exchange.FREE_CHUNKS + LAST, 400),
        ((b"8;a=b\r\n" + b"x" * 8 + b"\r\n") * 4 * http_exchange.FREE_CHUNKS + LAST, 400),
    ],
    ids=["few small", "many of 32 bytes", "many small", "many of 8 bytes"],
)
async def test_the_chunks_of_a_body_are_bounded_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, status: int
) -> None:
    monkeypatch.setattr(http_exchange, "CHUNK_PAUSE_S", 0.0)
    async with serving(tmp_path) as api:
        assert (await api.ask(CHUNKED + KEY + b"\r\n" + body))[0] == status
        await api.victim()


HEADERS = http_connection.MOST_HEADERS - 3  # beside a host, a key, and that the connection ends


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /echo HTTP/1.1\r\nHost: x\r\n" + KEY + b"a: b\r\n" * HEADERS + b"\r\n", 200),
        (b"GET /echo HTTP/1.1\r\nHost: x\r\n" + KEY + b"a: b\r\n" * (HEADERS + 1) + b"\r\n", 400),
        (b"\r\nGET /echo HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n", 200),
        (b"\r\n" * 5000 + b"GET /echo HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n", 400),
        (b"\r\n" * 99_999, 400),
    ],
    ids=["128 headers", "129 headers", "an empty line", "many empty lines", "nothing but empty lines"],
)
async def test_headers_and_empty_lines_before_a_head_are_bounded(tmp_path: Path, data: bytes, status: int) -> None:
    async with serving(tmp_path) as api:
        head = data if data.startswith(b"\r\n\r\n") else data.replace(KEY, KEY + b"Connection: close\r\n")
        reader, writer = await api.connect()
        writer.write(head)
        async with asyncio.timeout(SOON_S):
            assert int((await reader.readline()).split()[1]) == status
        writer.close()
        await api.victim()


async def test_a_body_in_drops_and_one_in_chunks_arrive(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        reader, writer = await api.connect()
        head = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + KEY
        for data in (
            head + b"Content-Length: 3\r\n\r\nabc",
            head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        ):
            for letter in data:
                writer.write(bytes([letter]))
                await asyncio.sleep(0)
            async with asyncio.timeout(SOON_S):
                await reader.readuntil(b"b'abc'")
        writer.close()


# --- log messages -----------------------------------------------------------------------------------------------


async def test_events_that_anyone_can_cause_are_logged_sparingly_with_the_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serving(tmp_path) as api:
            for _ in range(60):
                for data in (
                    b"\x16\x03\r\n\r\n",
                    b"GET /echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n",
                ):
                    await api.ask(data, "127.0.3.1")
            reader, writer = await api.connect()
            writer.write(ATTACKS["upgrades"])
            async with asyncio.timeout(60):
                while (await reader.readuntil(b"\r\n\r\n")) and api.server.requests < 200:
                    await reader.readexactly(6000)
            writer.close()
            figures = api.metrics.figures()
    told = [record for record in caplog.records if record.name != "asyncio"]
    assert 0 < len(told) < 40
    assert not [record for record in told if "uvicorn" in record.getMessage() or record.name.startswith("uvicorn")]
    assert {getattr(record, "peer", "") for record in told if "refused" in record.getMessage()} == {"127.0.3.1"}
    assert figures["edgemoe_refused_keys_total"] == 60


async def test_wrong_keys_are_slowed_by_address_and_nobody_else(tmp_path: Path) -> None:
    from edgemoe.api.http.middleware import AT_ONCE, LONGEST_S, MOST_ADDRESSES, PER_S, REFUSED, Slowdown

    now = [0.0]
    slow = Slowdown(lambda: now[0])
    assert [slow.delay_s("a", REFUSED) for _ in range(int(AT_ONCE / REFUSED))][-1] == 0
    assert slow.delay_s("a", REFUSED) == REFUSED / PER_S
    assert slow.delay_s("b") == 0
    assert max(slow.delay_s("a", REFUSED) for _ in range(200)) == LONGEST_S
    now[0] = 3 * LONGEST_S
    assert slow.delay_s("a") == 0
    for number in range(3 * MOST_ADDRESSES):
        slow.delay_s(f"{number}")
    assert len(slow._left) == MOST_ADDRESSES


async def test_one_key_with_many_connections_gives_way_before_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgemoe.front.connections.GRACE_S", 0.0)
    monkeypatch.setattr(HttpConnection, "owner", property(lambda one: "few" if one.opened_at == first else "many"))
    first = 0.0
    async with serving(tmp_path, max_connections=5) as api, contextlib.AsyncExitStack() as held:
        for number in range(8):
            _, writer = await api.connect()
            held.callback(writer.close)
            await until(lambda: any(one.transport is not None for one in api.server.connections))
            if number == 0:
                (one,) = api.server.connections
                first = one.opened_at
        await until(lambda: len(api.server.connections) == 5)
        assert first in {one.opened_at for one in api.server.connections}


def test_waits_for_clients_have_ends() -> None:
    assert max(http_connection.HEAD_S, http_connection.LINGER_S) < http_connection.UNREAD_S <= http_connection.IDLE_S
