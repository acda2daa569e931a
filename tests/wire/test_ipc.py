"""The two ends of the link between a front and its engine."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edgemoe.cluster.wire import ipc
from edgemoe.cluster.wire.ipc import EngineEnd, FrontEnd, private_directory
from edgemoe.cluster.wire.messages import Ping, Stats, Stop
from edgemoe.errors import ServiceError, WireError


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[FrontEnd]:
    end = FrontEnd(tmp_path / "run")
    yield end
    end.close()


async def test_messages_pass_both_ways_and_name_their_sender(front: FrontEnd) -> None:
    engine = EngineEnd(front.address, "boot-1")
    engine.post(Stats(values={"a": 1.0}))
    assert await anext(front.messages()) == ("boot-1", Stats(values={"a": 1.0}))
    front.send("boot-1", Ping())
    assert await anext(engine.messages()) == Ping()
    await engine.close()


async def test_posts_from_another_thread_arrive_in_order(front: FrontEnd) -> None:
    engine = EngineEnd(front.address, "boot-1")
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


async def test_what_was_posted_before_close_still_arrives(front: FrontEnd) -> None:
    engine = EngineEnd(front.address, "boot-1")
    engine.post(Stats(values={}))
    await engine.close()
    assert (await anext(front.messages()))[0] == "boot-1"


async def test_sending_to_an_engine_that_is_not_there_is_an_error(front: FrontEnd) -> None:
    with pytest.raises(WireError, match="cannot be reached"):
        front.send("nobody", Stop())


async def test_a_front_that_does_not_read_is_noticed(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "BACKLOG_MESSAGES", 3)
    engine = EngineEnd("ipc:///nowhere/at/all", "boot-1")
    for _ in range(3):
        engine._backlog.append(b"")
    with pytest.raises(WireError, match="unread"):
        engine.post(Stats(values={}))
    engine._backlog.clear()
    await engine.close(timeout_s=0.0)


async def test_a_frame_that_cannot_be_read_is_counted_and_dropped(front: FrontEnd) -> None:
    engine = EngineEnd(front.address, "boot-1")
    await engine._socket.send(b"noise")
    engine.post(Stats(values={}))
    async with asyncio.timeout(5):
        assert (await anext(front.messages()))[1] == Stats(values={})
    assert front.undecodable == 1
    await engine.close()


async def test_the_directory_is_private(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    assert stat.S_IMODE(private_directory(path).stat().st_mode) == 0o700


async def test_a_directory_that_cannot_be_private_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError):
        private_directory(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ServiceError, match="directory"):
        private_directory(tmp_path / "link")
