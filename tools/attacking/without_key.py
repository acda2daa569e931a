"""Attacks of a client without a key, by sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

MAX_OPEN = 900  # sockets of one attack at once
VERY_MANY = 10_000  # sockets of the attacks by number alone, as far as the process may open files
SITES = 250 * 250  # addresses of loopback
STYLE = b"GET /page/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Deed = Callable[[Streams, Counter[str]], Awaitable[None]]


async def connect(address: str, receive_bytes: int = 0, source: str = "") -> Streams:
    """Connects to HOST:PORT, with a receive buffer of that size if it is not 0, and from `source`."""
    host, _, port = address.rpartition(":")
    one = socket.socket()
    one.setblocking(False)
    if source:
        one.bind((source, 0))
    if receive_bytes:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
    return await asyncio.open_connection(sock=one)


async def _repeat(
    address: str, seen: Counter[str], at_once: int, deed: Deed, receive_bytes: int = 0, sites: int = 0
) -> None:
    async def again(number: int) -> None:
        source = f"127.9.{number % sites // 250}.{number % sites % 250 + 1}" if sites else ""
        while True:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                streams = await connect(address, receive_bytes, source)
                seen["connections"] += 1
                try:
                    await deed(streams, seen)
                finally:
                    streams[1].close()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(again(number))


async def _status(reader: asyncio.StreamReader, seen: Counter[str]) -> None:
    line = (await reader.readline()).split()
    seen[line[1].decode() if len(line) > 1 else "closed"] += 1


async def unread_answers(address: str, seen: Counter[str]) -> None:
    """Sends 1,000 requests on each of many connections and reads no answer."""

    async def deed(streams: Streams, _: Counter[str]) -> None:
        streams[1].write(STYLE * 1000)
        await asyncio.sleep(20)

    await _repeat(address, seen, 300, deed, 4096)


async def idle_connections(address: str, seen: Counter[str]) -> None:
    """Opens as many connections as it may and sends nothing."""

    async def deed(streams: Streams, _: Counter[str]) -> None:
        await asyncio.wait_for(streams[0].read(1), 20)

    await _repeat(address, seen, MAX_OPEN, deed)


async def _hold(streams: Streams, _: Counter[str]) -> None:
    await asyncio.wait_for(streams[0].read(1), 600)


def _more_files() -> int:
    """Lets this process open as many files as it may; returns how many sockets it should have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return min(VERY_MANY, most - 100)


async def very_many_connections(address: str, seen: Counter[str]) -> None:
    """Holds 10,000 connections of one address, and opens each again that is closed."""
    await _repeat(address, seen, _more_files(), _hold)


async def connections_of_many_addresses(address: str, seen: Counter[str]) -> None:
    """Holds 10,000 connections of as many addresses, and opens each again that is closed; on loopback only."""
    await _repeat(address, seen, _more_files(), _hold, sites=SITES)


async def churn_of_many_addresses(address: str, seen: Counter[str]) -> None:
    """Opens and closes connections of many addresses without a pause; on loopback only."""

    async def deed(streams: Streams, _: Counter[str]) -> None:
        streams[1].transport.abort()

    await _repeat(address, seen, 256, deed, sites=SITES)


async def churn(address: str, seen: Counter[str]) -> None:
    """Opens and closes connections without a pause."""

    async def deed(streams: Streams, _: Counter[str]) -> None:
        streams[1].transport.abort()

    await _repeat(address, seen, 32, deed)


async def slow_heads(address: str, seen: Counter[str]) -> None:
    """Sends a head a letter a second."""

    async def deed(streams: Streams, seen: Counter[str]) -> None:
        for letter in HEAD:
            streams[1].write(bytes([letter]))
            await streams[1].drain()
            await asyncio.sleep(1)
        await _status(streams[0], seen)

    await _repeat(address, seen, 200, deed)


async def slow_bodies(address: str, seen: Counter[str]) -> None:
    """Announces large bodies and sends ten bytes a second."""

    async def deed(streams: Streams, seen: Counter[str]) -> None:
        streams[1].write(HEAD + b"Content-Length: 8000000\r\n\r\n")
        for _ in range(60):
            streams[1].write(b" " * 10)
            await streams[1].drain()
            await asyncio.sleep(1)
            if streams[0].at_eof():
                break
        await _status(streams[0], seen)

    await _repeat(address, seen, 200, deed)


async def small_chunks(address: str, seen: Counter[str]) -> None:
    """Sends bodies of chunks of one byte."""

    async def deed(streams: Streams, seen: Counter[str]) -> None:
        streams[1].write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 40_000)
        await asyncio.wait_for(_status(streams[0], seen), 20)

    await _repeat(address, seen, 4, deed)


async def wrong_keys(address: str, seen: Counter[str]) -> None:
    """Asks with keys by chance."""

    async def deed(streams: Streams, seen: Counter[str]) -> None:
        key = f"Authorization: Bearer em-{random.randbytes(16).hex()}\r\n".encode()
        streams[1].write(HEAD + key + b"Content-Length: 2\r\n\r\n{}")
        await asyncio.wait_for(_status(streams[0], seen), 20)

    await _repeat(address, seen, 64, deed)


async def malformed_requests(address: str, seen: Counter[str]) -> None:
    """Sends heads that are no HTTP, and requests to change the protocol."""

    async def deed(streams: Streams, seen: Counter[str]) -> None:
        upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        streams[1].write(random.choice([b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01\x02\r\n\r\n", upgrade * 50]))
        await asyncio.wait_for(_status(streams[0], seen), 20)

    await _repeat(address, seen, 64, deed)


KEYLESS: dict[str, Callable[[str, Counter[str]], Awaitable[None]]] = {
    "unread answers": unread_answers,
    "idle connections": idle_connections,
    "churn": churn,
    "very many connections": very_many_connections,
    "connections of many addresses": connections_of_many_addresses,
    "churn of many addresses": churn_of_many_addresses,
    "slow heads": slow_heads,
    "slow bodies": slow_bodies,
    "small chunks": small_chunks,
    "wrong keys": wrong_keys,
    "malformed requests": malformed_requests,
}
