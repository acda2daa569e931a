"""A relay that repeats, exchanges or changes encrypted frames ends the connection; no question is served twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.boxes import Box, Echo, running, secret
from support.waiting import until

from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.errors import PeerError

GREETING_BYTES = 64
ENCRYPTED = b"\x07MESSAGE"  # at the start of each frame after the handshake
LONG = 0x02  # flag of a frame: eight bytes of length

Attack = Callable[["Relay", bytes], list[bytes]]


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Returns one ZMTP frame: flags, length and body."""
    flags = await reader.readexactly(1)
    length = await reader.readexactly(8 if flags[0] & LONG else 1)
    return flags + length + await reader.readexactly(int.from_bytes(length, "big"))


def is_encrypted(frame: bytes) -> bool:
    return frame[9 if frame[0] & LONG else 2 :].startswith(ENCRYPTED)


class Relay:
    """Passes on frames to a port; the next encrypted ones to the server go through `attack`, if there is one."""

    def __init__(self, target: int) -> None:
        self.attack: Attack | None = None
        self.seen: list[bytes] = []  # encrypted frames that a client has sent
        self.held: list[bytes] = []
        self.connections = self.ended = 0
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:  # the connection came before the server was closed
            writer.transport.abort()
            return
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        back, there = await asyncio.open_connection("127.0.0.1", self._target)
        answers = asyncio.create_task(self._carry(back, writer))
        try:
            await self._pass_on(reader, there)
        finally:
            self.ended += 1
            answers.cancel()
            for each in (there, writer):
                each.transport.abort()
            self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        """Passes on frames to the server until an end closes the connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            left = GREETING_BYTES
            while left and (data := await reader.read(left)):  # its parts are answered one by one
                there.write(data)
                left -= len(data)
            while True:
                frame = await read_frame(reader)
                out = [frame]
                if is_encrypted(frame):
                    self.seen.append(frame)
                    if self.attack is not None:
                        out = self.attack(self, frame)
                there.writelines(out)
                await there.drain()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()  # as the server has

    async def close(self) -> None:
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def repeated(relay: Relay, frame: bytes) -> list[bytes]:
    relay.attack = None
    return [frame, frame]


def exchanged(relay: Relay, frame: bytes) -> list[bytes]:
    relay.held.append(frame)
    if len(relay.held) < 2:
        return []
    relay.attack = None
    return relay.held[::-1]


def changed(relay: Relay, frame: bytes) -> list[bytes]:
    relay.attack = None
    return [frame[:-1] + bytes([frame[-1] ^ 1])]


def an_old_one_again(relay: Relay, frame: bytes) -> list[bytes]:
    relay.attack = None
    return [relay.seen[0], frame]


ATTACKS: dict[str, Attack] = {
    "repeated": repeated,
    "exchanged": exchanged,
    "changed": changed,
    "an old one again": an_old_one_again,
}


@asynccontextmanager
async def relayed(served: list[str]) -> AsyncIterator[tuple[Box, Relay]]:
    """Runs box a, which is connected to box b through a relay. Box b notes the questions that it serves."""

    async def serve(question: Question[Any]) -> Answer[Any]:
        served.append(question.message.text)
        return Answer(question.message)

    keys = {"a": secret(), "b": secret()}
    a, b = Box("a", keys["a"], keys), Box("b", keys["b"], keys, serve=serve)
    async with running(a, b):
        relay = Relay(b.port)
        server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        a.channel.connect(Peer("b", f"127.0.0.1:{port}", keys["b"].public.decode()))
        await until(lambda: a.channel.is_up("b"))
        try:
            yield a, relay
        finally:
            a.channel.disconnect("b")
            server.close()
            await relay.close()


async def ask(a: Box, text: str) -> str:
    try:
        answer = await a.channel.ask("b", Echo(text), timeout_s=5)
    except PeerError:
        return ""
    return str(answer.message.text)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attacked_connection_ends_and_no_question_is_served_twice(attack: str) -> None:
    served: list[str] = []
    async with relayed(served) as (a, relay):
        assert await ask(a, "first") == "first"
        relay.attack = ATTACKS[attack]
        await asyncio.gather(*(ask(a, f"attacked {n}") for n in range(4)))
        assert relay.attack is None
        await until(lambda: relay.ended >= 1)
        await until(lambda: relay.connections >= 2 and a.channel.is_up("b"))
        assert await ask(a, "last") == "last"
    assert len(served) == len(set(served))
    assert {"first", "last"} <= set(served)


async def test_frames_of_an_earlier_connection_are_worth_nothing_on_the_next() -> None:
    """Each connection has keys of its own."""
    served: list[str] = []
    async with relayed(served) as (a, relay):
        assert await ask(a, "first") == "first"
        recorded = list(relay.seen)
        relay.attack = changed
        await ask(a, "ends it")
        await until(lambda: relay.connections >= 2 and a.channel.is_up("b"))

        def replayed(relay: Relay, _frame: bytes) -> list[bytes]:
            relay.attack = None
            return recorded

        relay.attack, ended = replayed, relay.ended
        await ask(a, "replaced")
        await until(lambda: relay.ended > ended and a.channel.is_up("b"))
        assert await ask(a, "last") == "last"
    assert served == ["first", "last"]
