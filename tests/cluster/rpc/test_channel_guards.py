"""Each guard of the channels, tested with the attack that it stops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio
from support.boxes import Box, Echo, running, secret
from support.waiting import until

from edgemoe.cluster.data.messages import ExpertCall
from edgemoe.cluster.rpc import keys
from edgemoe.cluster.rpc.envelope import Answer, Failure, Question, seal, unseal
from edgemoe.cluster.rpc.keys import Peer, Secret
from edgemoe.cluster.rpc.peer_links import PeerCredits
from edgemoe.cluster.rpc.transport import ENDPOINT
from edgemoe.errors import ConfigError, PeerRefused, ServiceError, WireError
from edgemoe.ipc.engine_socket import private_directory
from edgemoe.types.experts import ExpertGeometry
from edgemoe.wire.protocol import MAX_FRAMES, MAX_TENSOR_BYTES


@asynccontextmanager
async def raw(kind: int, key: Secret, **options: bytes) -> AsyncIterator[zmq.asyncio.Socket]:
    """Opens a socket of a listed box, on which a test sends messages that no channel sends."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.CURVE_PUBLICKEY, key.public)
    socket.set(zmq.CURVE_SECRETKEY, key.secret)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    try:
        yield socket
    finally:
        socket.close(0)
        context.term()


async def test_nobody_takes_over_a_connection_by_guessing_its_name() -> None:
    a_key, b_key, c_key = secret(), secret(), secret()
    listed = {"a": a_key, "b": b_key, "c": c_key}
    a, b = Box("a", a_key, listed), Box("b", b_key, listed)
    async with running(a, b):
        a.channel.connect(b.peer)
        await until(lambda: a.channel.is_up("b"))
        await a.channel.ask("b", Echo("before"), timeout_s=5)
        for guess in (b"a", b"a:boot-of-a", b"a:boot-of-a:"):
            async with raw(zmq.DEALER, c_key, IDENTITY=guess, CURVE_SERVERKEY=b_key.public) as thief:
                thief.connect(f"tcp://127.0.0.1:{b.port}")
                await thief.send_multipart(seal(Echo("I am a"), id=1, remaining_ms=1000))
                rejected = b.channel.mishaps.rejected
                await until(lambda before=rejected: b.channel.mishaps.rejected > before)  # type: ignore[misc]
                assert (await a.channel.ask("b", Echo("after"), timeout_s=5)).message.text == "after"


async def test_a_message_that_is_no_answer_answers_no_question() -> None:
    a_key, c_key = secret(), secret()
    a = Box("a", a_key, {"a": a_key, "c": c_key})
    async with raw(zmq.ROUTER, c_key) as router, running(a):
        router.set(zmq.CURVE_SERVER, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        a.channel.connect(Peer("c", f"127.0.0.1:{port}", c_key.public.decode()))
        await until(lambda: a.channel.is_up("c"))
        asked = asyncio.create_task(a.channel.ask("c", Echo("?"), timeout_s=5))
        identity, *frames = await router.recv_multipart()
        number = unseal(frames).id
        await router.send_multipart([identity, *seal(Echo("a question"), id=number)])
        await router.send_multipart([identity, *seal(Echo("of another"), id=number + 1000, answer=True)])
        await router.send_multipart([identity, *seal(Echo("the answer"), id=number, answer=True)])
        assert (await asked).message.text == "the answer"


@pytest.mark.parametrize("frames", [seal(Echo("x"), id=5, answer=True), seal(Failure("busy", "x"), id=5)])
async def test_an_answer_to_nothing_is_served_to_nobody(frames: list[bytes]) -> None:
    served: list[Any] = []

    async def serve(question: Question[Any]) -> Answer[Any]:
        served.append(question.message)
        return Answer(question.message)

    b_key, c_key = secret(), secret()
    b = Box("b", b_key, {"b": b_key, "c": c_key}, serve=serve)
    async with running(b), raw(zmq.DEALER, c_key, IDENTITY=b"c:x:1", CURVE_SERVERKEY=b_key.public) as socket:
        socket.connect(f"tcp://127.0.0.1:{b.port}")
        await socket.send_multipart(frames)
        await socket.send_multipart(seal(Echo("a real one"), id=6, remaining_ms=1000))
        while unseal(await socket.recv_multipart()).id != 6:
            pass
    assert served == [Echo("a real one")]
    assert b.channel.mishaps.rejected == 1


def test_a_question_larger_than_all_credits_goes_alone() -> None:
    credits_, taken = PeerCredits(100), list[int]()
    for size_bytes in (1000, 1, 2, 1000, 3):
        credits_.acquire(size_bytes, taken.append)
    assert taken == [100]
    credits_.release(100)
    assert taken == [100, 1, 2]
    credits_.release(1)
    assert taken == [100, 1, 2]
    credits_.release(2)
    assert taken == [100, 1, 2, 100]
    credits_.release(100)
    assert taken == [100, 1, 2, 100, 3]


def test_any_number_of_questions_may_give_their_credits_back_at_once() -> None:
    credits_, turns = PeerCredits(100), list[int]()

    def fails(taken: int) -> None:
        turns.append(taken)
        credits_.release(taken)

    held: list[int] = []
    credits_.acquire(100, held.append)
    for _ in range(5000):
        credits_.acquire(60, fails)
    credits_.release(100)
    assert turns == [60] * 5000
    credits_.acquire(100, held.append)
    assert held == [100, 100]


@pytest.mark.parametrize("tensors", [[b""] * (MAX_FRAMES + 1), [bytes(MAX_TENSOR_BYTES + 1)]], ids=["many", "large"])
def test_tensors_that_no_peer_would_read_are_not_sealed(tensors: list[bytes]) -> None:
    with pytest.raises(WireError, match="too many or too large"):
        seal(Echo("x"), tensors)
    seal(Echo("x"), tensors[:MAX_FRAMES] if len(tensors) > 1 else [tensors[0][:-1]])


@pytest.mark.parametrize(("mechanism", "status"), [(b"CURVE", b"200"), (b"NULL", b"400"), (b"PLAIN", b"400")])
async def test_a_listed_key_is_good_for_curve_only(mechanism: bytes, status: bytes) -> None:
    key = secret()
    box = Box("a", key, {"a": key})
    async with running(box):
        asking = box.transport.context.socket(zmq.REQ)
        asking.connect(ENDPOINT)
        await asking.send_multipart([b"1.0", b"7", b"", b"127.0.0.1", b"", mechanism, zmq.utils.z85.decode(key.public)])
        assert (await asking.recv_multipart())[1:3] == [b"7", status]
        asking.close(0)


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o610])
def test_a_secret_key_that_anybody_else_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    keys.generate(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.load_secret(tmp_path / "key")


def test_a_directory_of_another_user_is_not_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(0o755)
    owner = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ServiceError, match="owned by the user"):
        private_directory(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("experts", "counts", "rows"),
    [((2, 2), (1, 1), (0, 1)), ((2, 5), (1, 2), (0, 1)), ((2, 5), (1, 0), (0, 1)), ((2, 8), (1, 1), (0, 1))],
    ids=["the same expert twice", "more calls than are there", "an expert without a call", "no such expert"],
)
def test_a_call_that_contradicts_itself_is_refused(experts: Any, counts: Any, rows: Any) -> None:
    sizes = ExpertGeometry(layers=2, experts=8, top_k=2, hidden=4, width=21, dtype="float32")
    index = np.array([*experts, *counts, *rows, 0, 0], np.int32)
    hidden = memoryview(bytes(3 * 16))
    good = np.array([2, 5, 1, 1, 0, 1, 0, 0], np.int32)
    assert ExpertCall(1, 3, 2, 2).work([hidden, good.data.cast("B")], sizes).experts.tolist() == [2, 5]
    with pytest.raises(PeerRefused, match="cannot be"):
        ExpertCall(1, 3, 2, 2).work([hidden, index.data.cast("B")], sizes)
