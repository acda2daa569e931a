"""Channels between boxes: the boxes that may connect, the answers, and the effects of a box's end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from support.boxes import LANGUAGE, Box, Echo, echo, running, secret
from support.waiting import until

from edgemoe.cluster.rpc import keys
from edgemoe.cluster.rpc import transport as rpc_transport
from edgemoe.cluster.rpc.channel import ASKED_AT_ONCE, Channel
from edgemoe.cluster.rpc.envelope import (
    FAILURE_CHARS,
    FRAMING,
    MAGIC,
    MAX_ENVELOPE_BYTES,
    Answer,
    Question,
    seal,
    unseal,
)
from edgemoe.cluster.rpc.keys import AllowList
from edgemoe.cluster.rpc.transport import Transport
from edgemoe.errors import ConfigError, PeerBusy, PeerRefused, PeerUnavailable, WireError, WireVersionError
from edgemoe.types.bounds import MAX_NODES
from edgemoe.wire.protocol import MAX_TENSOR_BYTES, Message


def pair(serve: Any = None, **channel: Any) -> tuple[Box, Box]:
    """Builds a, which asks, and b, which answers; each knows the other's key."""
    a_key, b_key = secret(), secret()
    allowed = {"a": a_key, "b": b_key}
    a = Box("a", a_key, allowed, **channel)
    return a, Box("b", b_key, allowed, **({"serve": serve} if serve else {}), **channel)


async def connected(a: Box, b: Box) -> None:
    a.channel.connect(b.peer)
    await until(lambda: a.channel.is_up(b.node))


async def test_tensors_come_back_as_they_were_sent() -> None:
    a, b = pair()
    tensors = [random.Random(0).randbytes(n) for n in (0, 1, 3 << 20)]
    async with running(a, b):
        await connected(a, b)
        answers = await asyncio.gather(*(a.channel.ask("b", Echo(str(n)), tensors, timeout_s=10) for n in range(20)))
    assert [x.message.text for x in answers] == [str(n) for n in range(20)]
    assert all([bytes(t) for t in x.tensors] == tensors for x in answers)
    assert a.channel.mishaps.rejected == b.channel.mishaps.rejected == 0


async def test_an_unlisted_key_never_gets_a_frame_through_and_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    b_key, known, stranger = secret(), secret(), secret()
    served: list[Question[Any]] = []

    async def serve(question: Question[Any]) -> Answer[Any]:
        served.append(question)
        return Answer(question.message)

    b = Box("b", b_key, {"a": known}, serve=serve)
    a = Box("a", stranger, {"b": b_key})
    async with running(a, b):
        a.channel.connect(b.peer)
        await until(lambda: "a peer refuses our key; list it there" in caplog.text)
        assert b.transport.authenticator.refused > 0
        with pytest.raises(PeerUnavailable):
            await a.channel.ask("b", Echo("let me in"), timeout_s=0.5)
    assert served == []


async def test_a_key_that_is_listed_late_gets_in_then() -> None:
    a, b = pair()
    b.allowed.revoke("a")
    async with running(a, b):
        a.channel.connect(b.peer)
        await until(lambda: b.transport.authenticator.refused > 0)
        b.allowed.allow("a", a.key.public.decode())
        await until(lambda: a.channel.is_up("b"))
        assert (await a.channel.ask("b", Echo("late"), timeout_s=5)).message.text == "late"


async def test_a_listed_key_cannot_speak_under_another_name() -> None:
    b_key, a_key, c_key = secret(), secret(), secret()
    b = Box("b", b_key, {"a": a_key, "c": c_key})
    liar = Box("c", a_key, {"b": b_key})
    async with running(liar, b):
        await connected(liar, b)
        with pytest.raises(PeerUnavailable):
            await liar.channel.ask("b", Echo("I am c"), timeout_s=0.5)
        assert b.channel.mishaps.rejected == 1


async def test_a_revoked_key_is_refused_on_the_connection_that_stands() -> None:
    a, b = pair()
    async with running(a, b):
        await connected(a, b)
        await a.channel.ask("b", Echo("before"), timeout_s=5)
        b.allowed.revoke("a")
        with pytest.raises(PeerUnavailable):
            await a.channel.ask("b", Echo("after"), timeout_s=0.5)
        assert b.channel.mishaps.rejected == 1


class Wire:
    """A connection that breaks on the asking side alone, as if the other end were stopped or did not notice."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        self._near: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._go(self._accept)

    def _go(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._door.accept()[0], socket.create_connection(("127.0.0.1", self._target))
                self._near.append(near)
                self._go(self._carry, near, far)
                self._go(self._carry, far, near)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        if sink in self._near:  # the far end has closed, and is not told of the near one
            sink.close()
            source.close()

    def break_near_end(self) -> None:
        for near in self._near:
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the threads, once both ends are closed."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


async def test_a_box_that_comes_back_before_its_loss_is_noticed_is_heard_again() -> None:
    a, b = pair()
    wire = Wire(b.port)
    async with running(a, b):
        a.channel.connect(msgspec.structs.replace(b.peer, address=f"127.0.0.1:{wire.port}"))
        await until(lambda: a.channel.is_up("b"))
        for _ in range(3):
            await a.channel.ask("b", Echo("before"), timeout_s=5)
            wire.break_near_end()
            await until(lambda: not a.channel.is_up("b"))
            await until(lambda: a.channel.is_up("b"))
        assert (await a.channel.ask("b", Echo("after"), timeout_s=5)).message.text == "after"
    await asyncio.to_thread(wire.close)


async def test_more_questions_than_a_peer_takes_at_once_wait_and_are_all_answered() -> None:
    under_way, most, go_on = 0, 0, asyncio.Event()

    async def serve(question: Question[Any]) -> Answer[Any]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await go_on.wait()
        under_way -= 1
        return Answer(question.message)

    a, b = pair(serve)
    async with running(a, b):
        await connected(a, b)
        asked = [asyncio.create_task(a.channel.ask("b", Echo(str(n)), timeout_s=60)) for n in range(1000)]
        await until(lambda: under_way == ASKED_AT_ONCE - 1)
        go_on.set()
        answers = await asyncio.gather(*asked)
    assert [answer.message.text for answer in answers] == [str(n) for n in range(1000)]
    assert most == ASKED_AT_ONCE - 1


async def test_a_key_that_was_replaced_is_refused_on_the_connection_that_stands() -> None:
    a, b = pair()
    async with running(a, b):
        await connected(a, b)
        await a.channel.ask("b", Echo("before"), timeout_s=5)
        b.allowed.allow("a", secret().public.decode())
        with pytest.raises(PeerUnavailable):
            await a.channel.ask("b", Echo("after"), timeout_s=0.5)
        assert b.channel.mishaps.rejected == 1


@pytest.mark.parametrize("other_first", [False, True])
async def test_a_box_with_either_of_its_two_keys_is_found_and_let_in(other_first: bool) -> None:
    """Boxes that ask it and boxes that it asks find it, with either key first in the list."""
    a, b = pair()
    other = secret().public.decode()
    first, second = (other, b.key.public.decode()) if other_first else (b.key.public.decode(), other)
    a.allowed.allow("b", first, second)
    async with running(a, b):
        a.channel.connect(msgspec.structs.replace(b.peer, key=first, new_key=second))
        b.channel.connect(a.peer)
        await until(lambda: a.channel.is_up("b") and b.channel.is_up("a"))
        assert (await a.channel.ask("b", Echo("to b"), timeout_s=5)).message.text == "to b"
        assert (await b.channel.ask("a", Echo("from b"), timeout_s=5)).message.text == "from b"


async def test_a_key_beside_another_costs_no_connection_and_one_that_is_taken_back_costs_its_own() -> None:
    a, b = pair()
    downs: list[str] = []
    a.channel.on_down = downs.append
    next_key = secret().public.decode()
    async with running(a, b):
        await connected(a, b)
        a.channel.connect(msgspec.structs.replace(b.peer, new_key=next_key))
        a.channel.connect(msgspec.structs.replace(b.peer, key=next_key, new_key=b.peer.key))
        a.channel.connect(b.peer)
        assert a.channel.is_up("b")
        assert downs == []
        a.channel.connect(msgspec.structs.replace(b.peer, key=next_key))
        assert not a.channel.is_up("b")
        assert downs == ["b"]


async def test_a_connection_that_breaks_fails_its_questions_at_once_and_comes_back() -> None:
    asked = asyncio.Event()

    async def serve(question: Question[Any]) -> Answer[Any]:
        asked.set()
        await asyncio.sleep(30)
        return Answer(question.message)

    a, b = pair(serve)
    downs: list[str] = []
    a.channel.on_down = downs.append
    async with running(a):
        async with running(b):
            await connected(a, b)
            question = asyncio.create_task(a.channel.ask("b", Echo("long"), timeout_s=25))
            await asked.wait()
        with pytest.raises(PeerUnavailable, match="broke"):
            await question
        assert downs == ["b"]
        with pytest.raises(PeerUnavailable, match="not connected"):
            await a.channel.ask("b", Echo("gone"), timeout_s=25)
        again = Box("b", b.key, {"a": a.key})
        again.channel.bind("127.0.0.1", b.port)
        async with running(again):
            await until(lambda: a.channel.is_up("b"))
            assert (await a.channel.ask("b", Echo("back"), timeout_s=5)).message.text == "back"


async def test_a_silent_peer_costs_its_deadline_and_leaves_nothing_waiting() -> None:
    async def serve(_question: Question[Any]) -> None:
        return None

    a, b = pair(serve)
    async with running(a, b):
        await connected(a, b)
        with pytest.raises(PeerUnavailable, match=r"did not answer within 0\.1 s"):
            await a.channel.ask("b", Echo("?"), timeout_s=0.1)
        assert a.channel.waiting() == 0


async def test_refusals_and_shed_load_arrive_as_their_errors() -> None:
    async def serve(question: Question[Any]) -> Answer[Any]:
        raise PeerBusy("later") if question.message.text == "busy" else PeerRefused("never")

    a, b = pair(serve)
    async with running(a, b):
        await connected(a, b)
        with pytest.raises(PeerBusy, match="b: later"):
            await a.channel.ask("b", Echo("busy"), timeout_s=5)
        with pytest.raises(PeerRefused, match="b: never"):
            await a.channel.ask("b", Echo("no"), timeout_s=5)


async def test_bytes_under_way_to_a_peer_are_bounded() -> None:
    under_way, most = 0, 0
    release = asyncio.Event()

    async def serve(question: Question[Any]) -> Answer[Any]:
        nonlocal under_way, most
        under_way += len(question.tensors[0])
        most = max(most, under_way)
        await release.wait()
        under_way -= len(question.tensors[0])
        return Answer(question.message)

    a, b = pair(serve, credits_bytes=250_000)
    async with running(a, b):
        await connected(a, b)
        work = [asyncio.create_task(a.channel.ask("b", Echo(""), [bytes(100_000)], timeout_s=20)) for _ in range(10)]
        await until(lambda: under_way == 200_000)
        release.set()
        await asyncio.gather(*work)
    assert most == 200_000


async def test_a_posted_question_ends_once_by_its_first_outcome() -> None:
    def serve(question: Question[Any]) -> Any:
        return Answer(question.message) if question.message.text == "now" else asyncio.sleep(60)

    a, b = pair(serve, credits_bytes=100_000)
    ends: list[Any] = []
    async with running(a, b):
        await connected(a, b)

        def post(text: str, timeout_s: float = 20.0) -> Any:
            return a.channel.post("b", Echo(text), [bytes(60_000)], timeout_s=timeout_s, done=ends.append)

        withdraw = post("never")
        post("now")  # waits for credits
        await asyncio.sleep(0)
        assert not ends
        for _ in range(2):
            withdraw(PeerUnavailable("enough"))
        await until(lambda: len(ends) == 2)
        assert str(ends[0]) == "enough"
        assert ends[1].message == Echo("now")
        post("never", timeout_s=0.05)
        post("now")
        await until(lambda: len(ends) == 4)
        assert "did not answer within 0.05 s" in str(ends[2])
        assert ends[3].message == Echo("now")
        assert a.channel.waiting() == 0
        post("never")
        a.channel.disconnect("b")
        assert "was closed" in str(ends[4])
        with pytest.raises(PeerUnavailable):
            post("now")


async def test_mutated_frames_are_counted_and_nothing_more() -> None:
    a, b = pair()
    rng = random.Random(1)
    async with running(a, b):
        await connected(a, b)
        raw = a.channel._links["b"].socket
        sent = 0
        for _ in range(2000):
            frames = [bytearray(f) for f in seal(Echo("hello"), [b"x" * 40], id=5, remaining_ms=1000)]
            victim = rng.choice(frames)
            victim[rng.randrange(len(victim))] ^= 1 << rng.randrange(8)
            raw.send_multipart([bytes(f) for f in frames])
            sent += 1
            if sent % 200 == 0:
                await until(lambda sent=sent: b.channel.mishaps.rejected == sent)
        assert b.channel.mishaps.rejected == sent
        assert (await a.channel.ask("b", Echo("still here"), timeout_s=5)).message.text == "still here"


def test_every_single_bit_flip_of_a_message_is_noticed() -> None:
    frames = [bytes(f) for f in seal(Echo("hello"), [b"tensor"], id=3, remaining_ms=5.0)]
    for n, frame in enumerate(frames):
        for bit in range(len(frame) * 8):
            changed = bytearray(frame)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                unseal([*frames[:n], bytes(changed), *frames[n + 1 :]])


def test_another_version_is_told_apart_from_noise() -> None:
    frames = seal(Echo("x"))
    head = bytearray(frames[0])
    head[len(MAGIC)] = FRAMING + 1
    with pytest.raises(WireVersionError, match=f"framing {FRAMING + 1}"):
        unseal([bytes(head)])


async def test_another_version_is_refused_with_a_message_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    a, b = pair()
    async with running(a, b):
        await connected(a, b)
        head = bytearray(seal(Echo("x"))[0])
        head[len(MAGIC)] = FRAMING + 1
        a.channel._links["b"].socket.send_multipart([bytes(head)])
        await until(lambda: bool(a.channel.mishaps.rejected and b.channel.mishaps.rejected))
        told = [str(vars(record)["why"]) for record in caplog.records if record.message == "message dropped"]
        assert len(told) == 2
        assert all(f"framing {FRAMING + 1}" in why for why in told)


def test_a_secret_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    made = keys.generate(path)
    assert keys.load_secret(path) == made
    assert made.secret.decode() not in repr(made)
    with pytest.raises(ConfigError, match="already"):
        keys.generate(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.load_secret(path)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('[[peer]]\nnode = "A"\naddress = "h:1"\nkey = "KEY"', "node name"),
        ('[[peer]]\nnode = "a"\naddress = "h"\nkey = "KEY"', "HOST:PORT"),
        ('[[peer]]\nnode = "a"\naddress = "192.0.2.7 :1"\nkey = "KEY"', "HOST:PORT"),
        ('[[peer]]\nnode = "a"\naddress = "host/:1"\nkey = "KEY"', "HOST:PORT"),
        ('[[peer]]\nnode = "a"\naddress = "::1:1"\nkey = "KEY"', "for IPv6"),
        ('[[peer]]\nnode = "a"\naddress = "h:1"\nkey = "short"', "no public key"),
        (f'[[peer]]\nnode = "a"\naddress = "h:1"\nkey = "{"#" * 40}"', "no public key"),
        (
            '[[peer]]\nnode = "a"\naddress = "h:1"\nkey = "KEY"\n[[peer]]\nnode = "b"\naddress = "h:2"\nkey = "KEY"',
            "twice",
        ),
        ('[[peer]]\nnode = "a"\naddress = "h:1"\nkey = "KEY"\nnew_key = "short"', "no public key"),
        ('[[peer]]\nnode = "a"\naddress = "h:1"\nkey = "KEY"\nnew_key = "KEY"', "key is listed twice"),
        ('[[peer]]\nnode = "a"\nadress = "h:1"\nkey = "KEY"', "adress"),
        ("[[peer", "cannot be read"),
        ("".join(f'[[peer]]\nnode = "n{n}"\naddress = "h:1"\nkey = "{n}"\n' for n in range(MAX_NODES + 1)), "64 are"),
    ],
)
def test_a_wrong_list_of_peers_names_the_fault(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(text.replace("KEY", secret().public.decode()))
    with pytest.raises(ConfigError, match=wrong):
        keys.load_peers(path)


async def test_an_address_that_cannot_be_used_costs_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    a, b = pair()
    async with running(a, b):
        a.channel.connect(keys.Peer("c", "no host:1", b.key.public.decode()))
        await connected(a, b)
        assert not a.channel.is_up("c")
    assert "a box cannot be reached" in caplog.text


@pytest.mark.parametrize("wrong", [WireError, ValueError, RuntimeError("x" * 5000), OverflowError, KeyError])
async def test_an_error_of_a_question_fails_that_question_only(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(question: Question[Any]) -> Answer[Any]:
        if question.message.text == "poison":
            raise wrong
        return Answer(question.message)

    a, b = pair(serve)
    async with running(a, b):
        await connected(a, b)
        with pytest.raises(PeerRefused) as refused:
            await a.channel.ask("b", Echo("poison"), timeout_s=5)
        assert len(str(refused.value)) < FAILURE_CHARS + 20
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
    assert b.channel.mishaps.failed == (wrong is not WireError)
    assert caplog.text.count("a message failed here") == b.channel.mishaps.failed


@pytest.mark.parametrize("answer", ["x" * (MAX_ENVELOPE_BYTES + 1), "x" * (20 << 20)])
async def test_an_answer_that_is_too_large_is_that_questions_failure(answer: str) -> None:
    async def serve(question: Question[Any]) -> Answer[Any]:
        return Answer(Echo(answer if question.message.text == "poison" else "on"))

    a, b = pair(serve)
    async with running(a, b):
        await connected(a, b)
        with pytest.raises(PeerRefused, match="fit into an envelope"):
            await a.channel.ask("b", Echo("poison"), timeout_s=5)
        assert (await a.channel.ask("b", Echo("?"), timeout_s=5)).message.text == "on"


async def test_the_largest_tensor_that_is_sent_is_read() -> None:
    async def serve(question: Question[Any]) -> Answer[Any]:
        return Answer(Echo(str(question.tensors[0].nbytes)))

    a, b = pair(serve, message_bytes=MAX_TENSOR_BYTES + (1 << 20))
    async with running(a, b):
        await connected(a, b)
        answer = await a.channel.ask("b", Echo("?"), [bytes(MAX_TENSOR_BYTES)], timeout_s=30)
    assert answer.message.text == str(MAX_TENSOR_BYTES)


async def test_a_question_that_is_too_large_fails_at_its_sender() -> None:
    a, b = pair()
    async with running(a, b):
        await connected(a, b)
        with pytest.raises(PeerRefused, match="fit into an envelope"):
            await a.channel.ask("b", Echo("x" * (MAX_ENVELOPE_BYTES + 1)), timeout_s=5)
        assert not a.channel.notify_peer("b", Echo("x" * (MAX_ENVELOPE_BYTES + 1)))
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"


async def test_a_word_of_no_use_that_is_long_is_not_repeated_at_length(caplog: pytest.LogCaptureFixture) -> None:
    a, b = pair()
    async with running(a, b):
        await connected(a, b)

        class Noise(Message, frozen=True, tag="n" * 500_000):
            """With the tag of a message that is never an answer."""

        with pytest.raises(PeerRefused):
            await a.channel.ask("b", Noise(), timeout_s=5)
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
    assert "message dropped" in caplog.text
    assert all(len(str(vars(record))) < 10_000 for record in caplog.records)


async def test_an_error_while_reading_a_message_costs_that_message_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyError("nobody has foreseen that")

    a, b = pair()
    async with running(a, b):
        await connected(a, b)
        for reader in (b, a):  # of the question, of the answer
            monkeypatch.setattr(reader.channel.intake, "on_message_read", wrong)
            with pytest.raises(PeerUnavailable):
                await a.channel.ask("b", Echo("?"), timeout_s=0.5)
            assert reader.channel.mishaps.failed == 1
            assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
    assert caplog.text.count("a message failed here") == 2


async def test_an_error_of_a_connection_listener_ends_no_channel(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(*_: str) -> None:
        raise KeyError("nobody has foreseen that")

    a, b = pair()
    a.channel.on_up = a.channel.on_down = b.channel.on_foreign = wrong
    async with running(a, b):
        await connected(a, b)
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
        a.channel.disconnect("b")
    assert a.channel.mishaps.failed >= 1
    assert "a message failed here" in caplog.text


async def test_a_question_is_not_waited_for_longer_here_than_this_box_says() -> None:
    left: list[float] = []

    async def serve(question: Question[Any]) -> Answer[Any]:
        left.append(question.deadline - asyncio.get_running_loop().time())
        return Answer(question.message)

    a, b = pair(serve, longest_s=3.0)
    async with running(a, b):
        await connected(a, b)
        await a.channel.ask("b", Echo(""), timeout_s=500)
    assert 0 < left[0] <= 3.0


async def test_as_many_boxes_as_a_cluster_may_have_can_be_connected_on_both_data_channels() -> None:
    key = secret()
    transport = Transport("a", "boot", key, AllowList({}))
    channels = [Channel(transport, name, LANGUAGE, echo) for name in ("calls", "bulk")]
    public = secret().public.decode()
    try:
        for number in range(MAX_NODES - 1):
            for channel in channels:
                channel.connect(keys.Peer(f"n{number}", f"127.0.0.1:{20_000 + number}", public))
        assert {len(channel._links) for channel in channels} == {MAX_NODES - 1}
    finally:
        for channel in channels:
            channel.close()
        transport.close()


async def test_a_box_that_there_are_no_sockets_for_costs_nobody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Few(zmq.asyncio.Context):
        def __init__(self) -> None:
            super().__init__()
            self.set(zmq.MAX_SOCKETS, 12)

    monkeypatch.setattr(rpc_transport.zmq.asyncio, "Context", Few)
    a, b = pair()
    monkeypatch.undo()
    async with running(a, b):
        await connected(a, b)
        for number in range(9):
            a.channel.connect(keys.Peer(f"n{number}", "127.0.0.1:9", secret().public.decode()))
        assert "a box cannot be reached" in caplog.text
        assert (await a.channel.ask("b", Echo("on"), timeout_s=5)).message.text == "on"
