"""Frames between two fronts over a real channel: long ones go over a second connection, and may fail there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from support.boxes import Box, running, secret
from support.waiting import until

from edgemoe.cluster.control.messages import (
    CONTROL,
    KEY_BYTES,
    PARCEL_PART_BYTES,
    FetchParcel,
    ForwardedFrame,
    FrameAccepted,
    Heartbeat,
    Parcel,
    ParcelPart,
)
from edgemoe.cluster.control.requests import parcels as parcels_module
from edgemoe.cluster.control.requests.parcels import MOST_PARCELS, SHORT_BYTES, RequestParcels
from edgemoe.cluster.rpc.channel import ASKED_AT_ONCE
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.errors import PeerBusy, PeerError, PeerRefused
from edgemoe.wire.protocol import Versions

LONG = bytes(range(256)) * (2 * PARCEL_PART_BYTES // 256) + b"end"
Spoil = Callable[[FetchParcel, Answer[Any]], Any]


class Front:
    """One front: it serves forwarded frames, and forwards its own."""

    def __init__(self, node: str, keys: dict[str, Any], speaks: Versions | None = None) -> None:
        self.spoil: Spoil = lambda _asked, answer: answer
        self.busy = False
        self.taken: list[bytes] = []
        self.heard: list[str] = []  # in order
        self.box = Box(node, keys[node], keys, self.serve, CONTROL, speaks, aside=True)
        self.parcels = RequestParcels(self.box.channel, self.check_room)

    def check_room(self) -> None:
        if self.busy:
            raise PeerBusy("there is no room")

    async def serve(self, question: Question[Any]) -> Answer[Any]:
        self.heard.append(type(question.message).__name__)
        match question.message:
            case FetchParcel() as asked:
                answer = self.spoil(asked, self.parcels.serve(question.peer, asked))
                return await answer if asyncio.iscoroutine(answer) else answer
            case ForwardedFrame(parcel=Parcel() as parcel):
                question = await self.parcels.fetch(question, parcel)
        if isinstance(question.message, ForwardedFrame):
            self.taken.append(bytes(question.tensors[0]))
        return Answer(FrameAccepted())

    def hold_back(self) -> asyncio.Event:
        """Sends no part until the event is set."""
        go_on = asyncio.Event()

        async def halting(answer: Answer[Any]) -> Answer[Any]:
            await go_on.wait()
            return answer

        self.spoil = lambda _asked, answer: halting(answer)
        return go_on

    async def send(self, frame: bytes, wanted: Callable[[], bool] = lambda: True) -> None:
        await self.parcels.forward("b", ForwardedFrame("m", 3), frame, wanted)


@asynccontextmanager
async def pair(speaks: Versions | None = None) -> AsyncIterator[tuple[Front, Front]]:
    """Fronts a and b, and at the end nothing is on its way between them."""
    keys = {node: secret() for node in "ab"}
    a, b = Front("a", keys), Front("b", keys, speaks)
    async with running(a.box, b.box):
        a.box.channel.connect(b.box.peer)
        b.box.channel.connect(a.box.peer)
        await until(lambda: all(links.is_up("b") for links in a.box.channel._all_links))
        await until(lambda: all(links.is_up("a") for links in b.box.channel._all_links))
        await a.box.channel.ask("b", Heartbeat(), timeout_s=5)  # any answer states the versions that its sender speaks
        await until(lambda: not b.box.channel.waiting())
        a.heard, b.heard = [], []
        yield a, b
        assert (len(a.parcels), len(b.parcels)) == (0, 0)
        assert a.box.channel.waiting() == b.box.channel.waiting() == 0
        await a.send(b"x")  # the channel is unaffected


async def test_short_frames_go_in_the_message_and_long_ones_in_parts_beside_it() -> None:
    async with pair() as (a, b):
        for size in (1, SHORT_BYTES, SHORT_BYTES + 1, PARCEL_PART_BYTES, PARCEL_PART_BYTES + 1, len(LONG)):
            await a.send(LONG[-size:])
            assert b.taken[-1] == LONG[-size:]
        assert a.heard == ["FetchParcel"] * (1 + 1 + 2 + 3)
        assert b.parcels.fetched_bytes == SHORT_BYTES + 1 + 2 * PARCEL_PART_BYTES + 1 + len(LONG)


async def test_a_message_overtakes_a_long_frame_that_is_on_its_way() -> None:
    async with pair() as (a, b):
        go_on = asyncio.Event()

        async def halting(answer: Answer[Any]) -> Answer[Any]:
            await go_on.wait()
            return answer

        a.spoil = lambda asked, answer: halting(answer) if asked.offset else answer
        sending = asyncio.create_task(a.send(LONG))
        await until(lambda: len(a.heard) == 2)
        for _ in range(3):
            await b.box.channel.ask("a", Heartbeat(), timeout_s=5)
            await a.box.channel.ask("b", Heartbeat(), timeout_s=5)
        assert (b.taken, sending.done()) == ([], False)
        go_on.set()
        await sending
        assert b.taken == [LONG]


async def test_short_messages_overtake_however_many_long_frames_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ASK_S", "PART_S"):
        monkeypatch.setattr(parcels_module, name, 30.0)
    async with pair() as (a, b):
        go_on, frames = a.hold_back(), 3 * ASKED_AT_ONCE // 2
        sending = [asyncio.create_task(a.send(LONG)) for _ in range(frames)]
        await until(lambda: len(a.heard) == MOST_PARCELS)
        await a.box.channel.ask("b", Heartbeat(), timeout_s=5)
        await a.send(b"x")
        assert b.taken == [b"x"]
        go_on.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*sending)
        assert b.taken[1:] == [LONG] * frames


async def test_a_long_frame_waits_for_its_turn_no_longer_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels_module, "MOST_PARCELS", 1)
    async with pair() as (a, b):
        go_on = a.hold_back()
        sending = asyncio.create_task(a.send(LONG))
        await until(lambda: len(a.heard) == 1)
        with monkeypatch.context() as context:
            context.setattr(parcels_module, "ASK_S", 0.0)
            with pytest.raises(PeerBusy, match="too many long requests are on their way to b"):
                await a.send(LONG)
        go_on.set()
        await sending
        assert b.taken == [LONG]


def flipped(_asked: FetchParcel, answer: Answer[Any]) -> Answer[Any]:
    changed = bytearray(answer.tensors[0])
    changed[-1] ^= 4
    return Answer(answer.message, [memoryview(changed)])


def short(_asked: FetchParcel, answer: Answer[Any]) -> Answer[Any]:
    return Answer(answer.message, [answer.tensors[0][:-1]])


def another(_asked: FetchParcel, answer: Answer[Any]) -> Answer[Any]:
    return Answer(FrameAccepted(), answer.tensors)


def again(asked: FetchParcel, answer: Answer[Any]) -> Answer[Any]:
    """Answers every part with the first one: the right bytes at the wrong place."""
    return Answer(answer.message, [memoryview(LONG)[: asked.bytes]])


async def silent(_asked: FetchParcel, answer: Answer[Any]) -> Answer[Any]:
    await asyncio.Event().wait()
    return answer


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (flipped, "another checksum"),
        (again, "another checksum"),
        (short, "something else"),
        (another, "something else"),
        (silent, "did not"),
    ],
)
async def test_a_frame_that_does_not_come_as_it_is_is_not_taken(
    spoil: Spoil, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels_module, "PART_S", 0.3)
    async with pair() as (a, b):
        a.spoil = spoil
        with pytest.raises(PeerError, match=why):
            await a.send(LONG)
        assert not b.taken


async def test_a_frame_is_given_up_where_nobody_wants_it_or_has_room_or_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (a, b):
        asked: list[bool] = []

        def only_once() -> bool:
            asked.append(True)
            return len(asked) == 1

        with pytest.raises(PeerRefused, match="nobody waits"):
            await a.send(LONG, only_once)
        b.busy = True
        a.heard = []
        with pytest.raises(PeerBusy, match="no room"):
            await a.send(LONG)
        assert not a.heard, "nothing is fetched in vain"
        b.busy = False
        monkeypatch.setattr(parcels_module, "MOST_BYTES", len(LONG) - 1)
        with pytest.raises(PeerBusy, match="too many"):
            await a.send(LONG)
        assert not b.taken


async def test_a_sender_that_gives_up_hands_out_nothing_more() -> None:
    async with pair() as (a, b):
        halt, seen = asyncio.Event(), list[FetchParcel]()

        async def halting(asked: FetchParcel, answer: Answer[Any]) -> Answer[Any]:
            seen.append(asked)
            await halt.wait()
            return answer

        a.spoil = halting
        sending = asyncio.create_task(a.send(LONG))
        await until(lambda: seen)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        halt.set()
        await until(lambda: a.heard.count("FetchParcel") == 2 and not b.box.channel.waiting())
        assert (b.taken, len(seen)) == ([], 1)


async def test_only_a_parcel_s_receiver_gets_it_and_no_bytes_beyond_it() -> None:
    async with pair() as (a, _b):
        go_on = a.hold_back()
        sending = asyncio.create_task(a.send(LONG))
        await until(lambda: a.heard)
        (key,) = a.parcels._waiting
        for wrong in (
            FetchParcel(bytes(KEY_BYTES), 0, 1),
            FetchParcel(key, len(LONG), 1),
            FetchParcel(key, len(LONG) - 1, 2),
            FetchParcel(key, 1 << 59, 1),
        ):
            with pytest.raises(PeerRefused, match="there is no such"):
                a.parcels.serve("b", wrong)
        with pytest.raises(PeerRefused, match="for this box"):
            a.parcels.serve("c", FetchParcel(key, 0, 1))
        assert isinstance(a.parcels.serve("b", FetchParcel(key, len(LONG) - 1, 1)).message, ParcelPart)
        go_on.set()
        await sending


@pytest.mark.parametrize("size", [0, (64 << 20) + 1])
def test_a_parcel_of_a_size_that_cannot_be_is_not_read(size: int) -> None:
    told = {"key": bytes(KEY_BYTES), "bytes": size, "checksum": "0" * 32}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(told, Parcel)
    assert msgspec.convert({**told, "bytes": 64 << 20}, Parcel).bytes == 64 << 20


async def test_one_box_takes_no_more_room_than_it_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels_module, "MOST_BYTES", 8 * SHORT_BYTES)
    come = asyncio.Event()

    class Slow:
        async def ask(self, *_: Any, **__: Any) -> Answer[Any]:
            await come.wait()
            raise PeerRefused("there is no such parcel")

    parcels = RequestParcels(Slow(), lambda: None)  # type: ignore[arg-type]

    def fetch(node: str) -> asyncio.Task[Any]:
        deadline = asyncio.get_running_loop().time() + 60
        question = Question(node, "boot", None, ForwardedFrame("m", 3), [], deadline)  # type: ignore[arg-type]
        return asyncio.create_task(parcels.fetch(question, Parcel.of(bytes(KEY_BYTES), bytes(SHORT_BYTES))))

    hostile = [fetch("a") for _ in range(20)]
    await asyncio.sleep(0.01)
    assert sum(not task.done() for task in hostile) == 4
    other = fetch("b")
    await asyncio.sleep(0.01)
    assert not other.done()
    come.set()
    found = await asyncio.gather(*hostile, other, return_exceptions=True)
    assert [type(error) for error in found].count(PeerBusy) == 16
    again = await asyncio.gather(*(fetch("a") for _ in range(4)), return_exceptions=True)
    assert {type(error) for error in again} == {PeerRefused}, "nothing is held any more"
