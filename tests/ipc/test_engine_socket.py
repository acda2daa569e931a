"""The two ends of the link between a front and its engine."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from edgemoe.errors import PeerOutdated, ServiceError, WireError
from edgemoe.ipc import engine_socket as ipc
from edgemoe.ipc.engine_socket import IpcClient, IpcServer, private_directory
from edgemoe.ipc.messages import MAGIC, Emissions, MessageRefused, Ping, Stats, Stop, encode
from edgemoe.wire.protocol import PROTOCOL_VERSIONS, Message, Versions

NEXT = Versions(PROTOCOL_VERSIONS.lowest, PROTOCOL_VERSIONS.highest + 1)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[IpcServer]:
    end = IpcServer(tmp_path / "run")
    yield end
    end.close()


async def test_messages_pass_both_ways_and_name_their_sender(front: IpcServer) -> None:
    engine = IpcClient(front.address, "boot-1")
    engine.post(Stats(values={"a": 1.0}))
    assert await anext(front.messages()) == ("boot-1", Stats(values={"a": 1.0}))
    front.send("boot-1", Ping())
    assert await anext(engine.messages()) == Ping()
    await engine.close()


async def test_posts_from_another_thread_arrive_in_order(front: IpcServer) -> None:
    engine = IpcClient(front.address, "boot-1")
    posting = threading.Thread(target=lambda: [engine.post(Stats(values={"n": float(n)})) for n in range(500)])
    posting.start()
    received = []
    async for _, message in front.messages():
        assert isinstance(message, Stats)
        received.append(message.values["n"])
        if len(received) == 500:
            break
    assert received == list(range(500))
    posting.join()
    await engine.close()


async def test_messages_posted_before_close_still_arrive(front: IpcServer) -> None:
    engine = IpcClient(front.address, "boot-1")
    engine.post(Stats(values={}))
    await engine.close()
    assert (await anext(front.messages()))[0] == "boot-1"


async def test_sending_to_an_engine_that_is_not_there_is_an_error(front: IpcServer) -> None:
    with pytest.raises(WireError, match="cannot be reached"):
        front.send("nobody", Stop())


async def test_a_front_that_does_not_read_is_noticed(
    front: IpcServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when it reads at last, nothing that was taken is lost."""
    monkeypatch.setattr(ipc, "HWM_MESSAGES", 100)
    monkeypatch.setattr(ipc, "BACKLOG_MESSAGES", 3)
    front.close()
    engine = IpcClient(front.address, "boot-1")
    taken = 0
    with contextlib.suppress(WireError):
        while taken < 1000:
            engine.post(Stats(values={"n": float(taken)}))
            taken += 1
            await asyncio.sleep(0)
    assert taken == 103  # ZeroMQ's own queue, then ours
    with pytest.raises(WireError, match="unread"):
        engine.post(Stats(values={}))
    again = IpcServer(tmp_path / "run")
    assert again.address == front.address
    received = []
    async for _, message in again.messages():
        assert isinstance(message, Stats)
        received.append(message.values["n"])
        if len(received) == taken:
            break
    assert received == list(range(taken))
    await engine.close()
    again.close()


async def test_a_frame_that_cannot_be_read_is_counted_and_dropped(front: IpcServer) -> None:
    engine = IpcClient(front.address, "boot-1")
    await engine._socket.send(b"noise")
    engine.post(Stats(values={}))
    said = front.messages()
    async with asyncio.timeout(60):
        assert await anext(said) == ("boot-1", None)
        assert await anext(said) == ("boot-1", Stats(values={}))
    assert front.undecodable == 1
    await engine.close()


async def test_the_directory_is_private(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    assert stat.S_IMODE(private_directory(path).stat().st_mode) == 0o700


async def test_a_directory_that_cannot_be_private_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError, match=r"service\.runtime_dir"):
        private_directory(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ServiceError, match="directory"):
        private_directory(tmp_path / "link")


async def test_an_engine_refuses_unknown_messages_and_lives(front: IpcServer) -> None:
    engine = IpcClient(front.address, "boot-1")
    heard, said = engine.messages(), front.messages()
    engine.post(Stats(values={}))
    await anext(said)
    frame = bytearray(encode(Ping()))
    await front._socket.send_multipart([b"boot-1", bytes(frame).replace(b"Ping", b"Pong")])
    front.send("boot-1", Ping())
    async with asyncio.timeout(60):
        assert await anext(heard) == Ping()
        _, refused = await anext(said)
    assert isinstance(refused, MessageRefused)
    assert (refused.what, engine.unreadable) == ("Pong", 1)
    await engine.close()


@pytest.mark.parametrize(
    ("changed", "ended"), [({"seed": 0.5}, "r"), ({"seed": 0.5, "id": "r" * 300}, ""), ({"seed": 0.5, "id": ""}, "")]
)
@pytest.mark.parametrize("attempt", [2, 0, 1 << 62, -(1 << 63)])
async def test_the_end_of_a_request_that_cannot_be_read_can_be(
    front: IpcServer, changed: dict[str, Any], ended: str, attempt: int
) -> None:
    engine = IpcClient(front.address, "boot-1")
    heard, said = engine.messages(), front.messages()
    engine.post(Stats(values={}))
    await anext(said)
    body = {"type": "Submit", "request": {"id": "r", "prompt": [1], "sampling": {}} | changed, "attempt": attempt}
    frame = encode(Ping())[: len(MAGIC) + 3] + msgspec.msgpack.encode(body)
    await front._socket.send_multipart([b"boot-1", frame])
    front.send("boot-1", Ping())
    async with asyncio.timeout(60):
        assert await anext(heard) == Ping()
        _, told = await anext(said)
    if ended and attempt == 2:
        assert isinstance(told, Emissions)
        assert [(one.request, one.attempt, one.finish) for one in told.items] == [(ended, 2, "error")]
    else:
        assert isinstance(told, MessageRefused)
    assert front.undecodable == 0
    await engine.close()


async def test_a_front_refuses_unknown_messages(front: IpcServer) -> None:
    engine = IpcClient(front.address, "boot-1")
    await engine._socket.send(encode(Stats(values={})).replace(b"Stats", b"Stets"))
    said = front.messages()
    async with asyncio.timeout(60):
        assert await anext(said) == ("boot-1", None)
        refused = await anext(engine.messages())
    assert isinstance(refused, MessageRefused)
    assert refused.what == "Stets"
    engine.post(Stats(values={}))
    assert (await anext(said))[1] == Stats(values={})
    await engine.close()


async def test_a_request_that_the_engine_cannot_read_ends_alone(front: IpcServer) -> None:
    engine = IpcClient(front.address, "boot-1")
    heard, said = engine.messages(), front.messages()
    engine.post(Stats(values={}))
    await anext(said)
    request = {"id": "r-1", "prompt": "no list", "sampling": {}, "seed": 1}
    head = encode(Ping())[: -len(msgspec.msgpack.encode({"type": "Ping"}))]
    body = {"type": "Submit", "request": request, "attempt": 2, "emitted": [1, 2, 3]}
    await front._socket.send_multipart([b"boot-1", head + msgspec.msgpack.encode(body)])
    front.send("boot-1", Ping())
    async with asyncio.timeout(60):
        assert await anext(heard) == Ping()
        _, told = await anext(said)
    assert isinstance(told, Emissions)
    (end,) = told.items
    assert (end.request, end.attempt, end.index, end.finish) == ("r-1", 2, 3, "error")
    assert end.error_code == "invalid_request"
    await engine.close()


async def test_neither_end_sends_messages_unknown_to_the_other_release(tmp_path: Path) -> None:
    class Wave(Message, frozen=True, tag="Wave"):
        since = NEXT.highest

    front = IpcServer(tmp_path / "run")
    engine = IpcClient(front.address, "boot-1", speaks=NEXT)
    engine.post(cast(Any, Wave()))
    engine.post(Stats(values={}))
    assert (await anext(front.messages()))[1] == Stats(values={})
    assert front.undecodable == 0
    with pytest.raises(PeerOutdated, match="Wave"):
        front.send("boot-1", cast(Any, Wave()))
    await engine.close()
    front.close()
