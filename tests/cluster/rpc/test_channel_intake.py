"""Limits on the bytes that a connection may send before they form a whole message."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from support.boxes import Box, Echo, running, secret
from support.virtual import VirtualLoop
from support.waiting import until

from edgemoe.cluster.rpc.connection_guard import CALM_S, CONNECTIONS, LOOK_S, SILENT, ConnectionGuard
from edgemoe.cluster.rpc.envelope import Answer, Question, seal
from edgemoe.cluster.rpc.keys import Peer, Secret
from edgemoe.errors import PeerRefused

MESSAGE_BYTES = 1 << 20
ENDLESS = [bytes(256 << 10)] * 8000  # takes far longer to arrive than a busy machine may delay the event loop


def three(**of_b: Any) -> tuple[Box, Box, Secret]:
    """Builds a and b, and a key for c, which both list."""
    keys = {name: secret() for name in "abc"}
    a = Box("a", keys["a"], keys, message_bytes=MESSAGE_BYTES)
    return a, Box("b", keys["b"], keys, message_bytes=MESSAGE_BYTES, **of_b), keys["c"]


def dealer(context: zmq.asyncio.Context, b: Box, key: Secret, identity: bytes = b"c:boot:1") -> zmq.asyncio.Socket:
    """Opens c's own connection to b, over which a test can send any bytes."""
    socket = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IDENTITY, identity),
        (zmq.RECONNECT_IVL, -1),
        (zmq.CURVE_SERVERKEY, b.key.public),
        (zmq.CURVE_PUBLICKEY, key.public),
        (zmq.CURVE_SECRETKEY, key.secret),
    ):
        socket.set(option, value)
    socket.connect(f"tcp://127.0.0.1:{b.port}")
    return socket


async def connected(a: Box, b: Box) -> None:
    a.channel.connect(b.peer)
    await until(lambda: a.channel.is_up(b.node))


async def test_a_message_without_an_end_is_cut_off_and_others_are_heard() -> None:
    a, b, key = three()
    context = zmq.asyncio.Context()
    async with running(a, b):
        await connected(a, b)
        socket = dealer(context, b, key)
        await socket.send_multipart(seal(Echo("c"), id=1, remaining_ms=1000))
        await socket.recv_multipart()
        assert b.channel.intake.cut == 0
        await socket.send_multipart(ENDLESS, copy=False)
        await until(lambda: b.channel.intake.cut == 1)
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
        assert a.channel.is_up("b")
        socket.close(0)
    context.term()


async def test_messages_that_end_are_never_cut_off_however_many_they_are() -> None:
    a, b, _ = three()
    payload = bytes(MESSAGE_BYTES - (64 << 10))
    async with running(a, b):
        await connected(a, b)
        for number in range(40):
            answers = await asyncio.gather(
                *(a.channel.ask("b", Echo(str(number)), [payload], timeout_s=20) for _ in "12")
            )
            assert {answer.tensors[0].nbytes for answer in answers} == {len(payload)}
        assert a.channel.intake.cut == b.channel.intake.cut == 0


@pytest.mark.parametrize(("waiting", "cut"), [(True, 1), (False, 0)])
def test_unread_messages_count_and_read_ones_do_not(waiting: bool, cut: int) -> None:
    with socketpair() as (near, far):
        one = ConnectionGuard("test", 300_000)
        one.on_event(zmq.EVENT_ACCEPTED, far.fileno())
        for _ in range(4):
            near.sendall(bytes(100_000))
            far.recv(100_000, socket.MSG_WAITALL)
            one.on_message_read(far.fileno(), [zmq.Frame(bytes(10_000))], waiting)
            one.cut_overfull()
        assert one.cut == cut


def test_connections_are_looked_at_seldom_until_one_has_much_unread_and_then_often() -> None:
    loop, looks = VirtualLoop(), list[float]()

    class Counted(ConnectionGuard):
        def cut_overfull(self) -> int:
            looks.append(loop.time())
            return super().cut_overfull()

    async def watch(one: ConnectionGuard, seconds: float) -> int:
        looks.clear()
        running = asyncio.ensure_future(one.run())
        await asyncio.sleep(seconds)
        running.cancel()
        return len(looks)

    with socketpair() as (near, far):
        one = Counted("test", 300_000)
        one.on_event(zmq.EVENT_ACCEPTED, far.fileno())
        assert loop.run_until_complete(watch(one, 10.0)) <= 10 / CALM_S + 2
        near.sendall(bytes(30_000))
        far.recv(30_000, socket.MSG_WAITALL)
        assert loop.run_until_complete(watch(one, 10.0)) <= 10 / CALM_S + 2
        near.sendall(bytes(30_000))
        far.recv(30_000, socket.MSG_WAITALL)
        assert loop.run_until_complete(watch(one, 10.0)) >= 10 / LOOK_S - 2
    loop.close()


@contextmanager
def socketpair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Opens the two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as near:
        far, _ = door.accept()
        with far:
            yield near, far


async def test_an_answer_without_an_end_is_cut_off_too() -> None:
    key, c_key = secret(), secret()
    keys = {"a": key, "c": c_key}
    a = Box("a", key, keys, message_bytes=MESSAGE_BYTES)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.CURVE_SERVER, 1)
    router.set(zmq.CURVE_SECRETKEY, c_key.secret)
    router.set(zmq.CURVE_PUBLICKEY, c_key.public)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with running(a):
        a.channel.connect(Peer("c", f"127.0.0.1:{port}", c_key.public.decode()))
        await until(lambda: a.channel.is_up("c"))
        asked = asyncio.create_task(a.channel.ask("c", Echo("?"), timeout_s=20))
        identity, *_ = await router.recv_multipart()
        await router.send_multipart([identity, *ENDLESS], copy=False)
        await until(lambda: a.channel.intake.cut == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    router.close(0)
    context.term()


async def test_a_peer_that_connects_on_and_on_loses_its_own_oldest_connections_and_costs_no_other_peer() -> None:
    a, b, key = three()
    context = zmq.asyncio.Context()
    async with running(a, b):
        await connected(a, b)
        await a.channel.ask("b", Echo("before"), timeout_s=5)
        sockets = []
        for number in range(3 * CONNECTIONS):
            sockets.append(dealer(context, b, key, b"c:boot:%d" % number))
            await said(sockets[-1])
        await until(lambda: len(b.channel.intake._known) == CONNECTIONS + 1)
        assert b.channel.intake.cut == 2 * CONNECTIONS
        for one in sockets[-CONNECTIONS:]:
            await said(one)
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
        for one in sockets:
            one.close(0)
    context.term()


async def said(socket: zmq.asyncio.Socket) -> None:
    """Waits for the answer to a message that is sent there."""
    await socket.send_multipart(seal(Echo("c"), id=1, remaining_ms=1000))
    await socket.recv_multipart()


def test_of_connections_that_say_nothing_so_many_are_held_by_address_and_none_that_has_spoken_is_cut() -> None:
    one = ConnectionGuard("test", 300_000)
    with ExitStack() as stack:
        pairs = [stack.enter_context(socketpair()) for _ in range(SILENT + 10)]
        one.on_identified(pairs[0][1].fileno(), "c")  # a message may be read before the connection's event
        one.on_event(zmq.EVENT_CONNECTED, pairs[1][1].fileno())
        for _, far in (pairs[0], *pairs[2:]):
            one.on_event(zmq.EVENT_ACCEPTED, far.fileno())
        assert one.cut == 8
        one.on_event(zmq.EVENT_ACCEPTED, pairs[0][1].fileno())
        for near, _ in pairs[2:10]:
            assert near.recv(1) == b""
        for near, far in (pairs[0], pairs[1], *pairs[10:]):
            far.sendall(b"x")
            assert near.recv(1) == b"x"


async def test_a_message_that_no_peer_would_take_in_is_not_sent() -> None:
    a, b, _ = three()
    async with running(a, b):
        await connected(a, b)
        with pytest.raises(PeerRefused, match="pass over test"):
            await a.channel.ask("b", Echo("x"), [bytes(MESSAGE_BYTES)], timeout_s=5)


async def test_questions_of_one_peer_are_bounded_in_number_and_bytes_and_cost_no_other_peer() -> None:
    served: list[str] = []
    open_: asyncio.Event = asyncio.Event()

    async def serve(question: Question[Any]) -> Answer[Any]:
        served.append(question.peer)
        if question.peer == "c":
            await open_.wait()
        return Answer(question.message)

    a, b, key = three(serve=serve, credits_bytes=100_000)
    context = zmq.asyncio.Context()
    async with running(a, b):
        await connected(a, b)
        socket = dealer(context, b, key)
        for number in range(100):
            await socket.send_multipart(seal(Echo("c"), id=number + 1, remaining_ms=10_000))
        failures = [await socket.recv_multipart() for _ in range(100 - 64)]
        assert len(failures) == 36
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
        assert served.count("c") == 64
        open_.set()
        await asyncio.gather(*(socket.recv_multipart() for _ in range(64)))
        open_.clear()
        for number in range(3):
            await socket.send_multipart(seal(Echo("c"), [bytes(90_000)], id=number + 1, remaining_ms=10_000))
        assert b"too many questions" in bytes((await socket.recv_multipart())[0])
        assert served.count("c") == 66
        open_.set()
        await asyncio.gather(*(socket.recv_multipart() for _ in range(2)))
        socket.close(0)
    context.term()


@pytest.mark.parametrize("what", ["an app's connection", "a file", "nothing"])
def test_a_connection_whose_number_another_file_has_by_now_is_not_noted(what: str, tmp_path: Path) -> None:
    """A probe connected and closed while the loop was busy; its descriptor then belongs to something else."""
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("w") as file:
        number = {"an app's connection": ours.fileno(), "a file": file.fileno(), "nothing": 1 << 20}[what]
        intake, opened = ConnectionGuard("test", 1 << 20), len(os.listdir("/proc/self/fd"))
        for _ in range(SILENT + 2):
            intake.on_event(zmq.EVENT_ACCEPTED, number)
        assert intake.cut_overfull() == 0
        assert intake.cut == 0
        assert len(os.listdir("/proc/self/fd")) == opened
        theirs.sendall(b"still open")


async def test_an_error_in_recording_a_connection_ends_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = three()

    def fail(*_: object) -> None:
        raise ValueError("an event that nobody foresaw")

    monkeypatch.setattr(a.channel.intake, "on_event", fail)
    monkeypatch.setattr(b.channel.intake, "on_event", fail)
    async with running(a, b):
        socket.create_connection(("127.0.0.1", b.port)).close()
        a.channel.connect(b.peer)
        await until(lambda: a.channel.mishaps.failed and b.channel.mishaps.failed)
        socket.create_connection(("127.0.0.1", b.port)).close()
        await until(lambda: b.channel.mishaps.failed > 1)


async def test_boxes_meet_by_ipv6() -> None:
    a, b, _ = three()
    port = b.channel.bind("::1")
    async with running(a, b):
        a.channel.connect(Peer("b", f"[::1]:{port}", b.key.public.decode()))
        await until(lambda: a.channel.is_up("b"))
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
