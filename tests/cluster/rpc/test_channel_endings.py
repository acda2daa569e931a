"""A listed peer's broken connections never end the process that they lead to, here one of its own.

libzmq 4.3.5 aborts if a connection breaks from which it does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from support.boxes import Box, Echo, running, secret
from support.waiting import until

from edgemoe.cluster.rpc.envelope import seal
from edgemoe.cluster.rpc.keys import Peer, Secret
from edgemoe.errors import PeerUnavailable

BOX = """
import asyncio, sys
from support.boxes import Box, running
from edgemoe.cluster.rpc.keys import Secret
from edgemoe.cluster.rpc.envelope import Answer

async def serve(question):
    if question.message.text == "stall":
        print("stalled", flush=True)
        sys.stdin.readline()
    return Answer(question.message)

async def main(own, own_secret, a, c, heartbeat_s):
    key = Secret(secret=own_secret.encode(), public=own.encode())
    allowed = {name: Secret(b"", public.encode()) for name, public in (("a", a), ("c", c))}
    box = Box("b", key, allowed, serve=serve, heartbeat_s=float(heartbeat_s), message_bytes=1 << 20)
    print(box.port, flush=True)
    async with running(box):
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""
FLOODED = """
import asyncio, socket
from support.boxes import Box, secret

async def main():
    key = secret()
    box = Box("b", key, {"b": key})
    for _ in range(1500):
        with socket.create_connection(("127.0.0.1", box.port), timeout=60) as one:
            one.recv(1)
    box.channel.close()
    box.transport.close()
    print("closed")

asyncio.run(main())
"""
BEAT_S = 0.3  # of the box's heartbeats
MOMENT_S = 0.3  # in which it handles all that has arrived
SOME = 400  # more messages than a bounded queue may hold


class Victim:
    """A box in a process of its own; `c` attacks it, and `a` asks whether it is still alive."""

    def __init__(self, process: subprocess.Popen[bytes], key: Secret, a_key: Secret, c_key: Secret) -> None:
        self.process, self.key, self.a_key, self.c_key = process, key, a_key, c_key
        self.port = int(self._line())

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    async def stall(self, by: zmq.asyncio.Socket) -> None:
        """Stops the box's reading."""
        await by.send_multipart(seal(Echo("stall"), id=1, remaining_ms=1000))
        assert await asyncio.to_thread(self._line) == b"stalled\n"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    async def answers(self) -> None:
        """Fails if the process has died or no longer answers."""
        a = Box("a", self.a_key, {"b": self.key})
        async with running(a):
            a.channel.connect(Peer("b", f"127.0.0.1:{self.port}", self.key.public.decode()))
            await until(lambda: a.channel.is_up("b") or self.process.poll() is not None)
            assert self.process.poll() is None
            with contextlib.suppress(PeerUnavailable):  # it has much to read first
                await a.channel.ask("b", Echo("there"), timeout_s=20)
                return
        raise AssertionError(f"no answer; it ended with {self.process.poll()}")


def environment() -> dict[str, str]:
    """Returns the environment of a process that can import all that the tests import."""
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3]), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@asynccontextmanager
async def victim(heartbeat_s: float) -> AsyncIterator[Victim]:
    keys = [secret() for _ in range(3)]
    words = [keys[0].public, keys[0].secret, keys[1].public, keys[2].public]
    process = subprocess.Popen(
        [sys.executable, "-c", BOX, *(word.decode() for word in words), str(heartbeat_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    with process:
        try:
            yield await asyncio.to_thread(Victim, process, *keys)
        finally:
            process.kill()


class Wire:
    """A proxy for one connection, which can reset it."""

    def __init__(self, port: int) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        self.carried = 0
        self.open = threading.Event()  # data for the box is held back while this is not set
        self.open.set()
        self._ends: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()

    def _run(self, port: int) -> None:
        with self._door, self._door.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            self._ends = [near, far]
            with contextlib.suppress(OSError), selectors.DefaultSelector() as ready:
                for end in self._ends:
                    ready.register(end, selectors.EVENT_READ)
                while True:
                    for key, _ in ready.select():
                        source = near if key.fd == near.fileno() else far
                        if not (data := source.recv(1 << 16)):
                            return
                        self.open.wait(60)
                        (near if source is far else far).sendall(data)
                        self.carried += len(data) * (source is near)

    def reset(self) -> None:
        """Resets the connection with RST."""
        near, far = self._ends
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.shutdown(socket.SHUT_RDWR)
        self.join()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@asynccontextmanager
async def hostile(box: Victim, **options: Any) -> AsyncIterator[tuple[zmq.asyncio.Socket, Wire]]:
    """Opens a connection of c to the box, through a proxy."""
    context, wire = zmq.asyncio.Context(), Wire(box.port)
    one = context.socket(zmq.DEALER)
    for name, value in {
        "LINGER": 0,
        "SNDHWM": 0,
        "RECONNECT_IVL": -1,
        "IDENTITY": b"c:boot:1",
        "CURVE_SERVERKEY": box.key.public,
        "CURVE_PUBLICKEY": box.c_key.public,
        "CURVE_SECRETKEY": box.c_key.secret,
        **options,
    }.items():
        one.set(getattr(zmq, name), value)
    one.connect(f"tcp://127.0.0.1:{wire.port}")
    try:
        yield one, wire
    finally:
        one.close(0)
        context.term()
        await asyncio.to_thread(wire.join)


async def heard(one: zmq.asyncio.Socket) -> None:
    await one.send_multipart(seal(Echo("c"), id=1, remaining_ms=1000))
    await asyncio.wait_for(one.recv_multipart(), 20)


async def carried(wire: Wire, size: int) -> None:
    """Waits until `size` bytes have passed, and for a moment in which the box handles them."""
    await until(lambda: wire.carried >= size)
    await asyncio.sleep(MOMENT_S)


async def test_a_connection_that_breaks_while_its_messages_wait_ends_nothing() -> None:
    async with victim(BEAT_S) as box, hostile(box) as (one, wire):
        await box.stall(one)
        for _ in range(SOME):
            await one.send_multipart([b"not read"])
        await carried(wire, SOME * 40)
        await asyncio.to_thread(wire.reset)
        await asyncio.sleep(2 * BEAT_S)  # it sends heartbeats meanwhile
        box.go_on()
        await box.answers()


async def test_heartbeats_that_wait_behind_messages_on_a_broken_connection_end_nothing() -> None:
    async with victim(0) as box, hostile(box, HEARTBEAT_IVL=1, HEARTBEAT_TIMEOUT=60_000) as (one, wire):
        await box.stall(one)
        wire.open.clear()
        for _ in range(SOME):
            await one.send_multipart([b"not read"])
            await asyncio.sleep(0.002)  # for heartbeats in between
        wire.open.set()
        await carried(wire, SOME * 40)
        await asyncio.to_thread(wire.reset)
        await asyncio.sleep(MOMENT_S)
        box.go_on()
        await box.answers()


async def test_two_connections_of_one_name_of_which_one_breaks_end_nothing() -> None:
    async with victim(BEAT_S) as box, hostile(box) as (one, wire):
        await heard(one)
        async with hostile(box) as (two, _):
            await two.send_multipart(seal(Echo("c"), id=1, remaining_ms=1000))
            await two.send_multipart(seal(Echo("c"), id=1, remaining_ms=1000))
            await asyncio.sleep(MOMENT_S)
            before = wire.carried
            await one.send_multipart([b"not read"])
            await carried(wire, before + 40)
            await asyncio.to_thread(wire.reset)
            await asyncio.sleep(2 * BEAT_S)
            await box.answers()


async def test_other_protocols_end_no_process() -> None:
    async with victim(BEAT_S) as box:
        for _ in range(20):
            for said in _openings():
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", box.port)) as raw:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    raw.sendall(said)
            await box.answers()


def _openings() -> Iterator[bytes]:
    """Yields broken openings of a connection: wrong or unfinished ZMTP greetings, and other protocols."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    greeting = signature + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    yield from (b"", b"\0", b"\xff", b"GET / HTTP/1.1\r\n\r\n", bytes(300), b"\xff" * 300, signature)
    yield from (signature + bytes((version, 0)) + bytes(60) for version in (0, 1, 2, 3, 4, 255))
    yield from (greeting[:cut] for cut in (9, 10, 11, 12, 32, 63, 64))
    yield greeting.replace(b"CURVE", b"NULL\0")
    for command in (b"\x05HELLO", b"\x05HELLO" + bytes(194), b"\x08INITIATE" + bytes(248), b"\x04PING\0\0", b""):
        yield greeting + b"\x04" + bytes((len(command) % 256,)) + command
    yield greeting + b"\x06" + b"\xff" * 8 + bytes(100)
    yield greeting + b"\x02" + b"\x7f" + b"\xff" * 7 + bytes(100)


def test_a_channel_closes_however_many_connections_it_has_not_taken_note_of() -> None:
    done = subprocess.run([sys.executable, "-c", FLOODED], env=environment(), capture_output=True, timeout=60)
    assert done.stdout == b"closed\n", done.stderr
