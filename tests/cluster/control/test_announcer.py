"""Announcements: to each box, even if another does not answer, and again each hour."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.planes import fronts, led
from support.waiting import until

from edgemoe.cluster.control import announcer
from edgemoe.cluster.control.control_state import AnnouncementAnswered
from edgemoe.cluster.control.messages import Welcome
from edgemoe.cluster.rpc.envelope import Answer


async def test_a_box_that_does_not_answer_keeps_no_news_from_the_others() -> None:
    members = {node: SimpleNamespace(peer=SimpleNamespace(node=node), acknowledged=0) for node in "bc"}
    state = SimpleNamespace(serial=1, announcement=None)
    state.unacknowledged = lambda: [one for one in members.values() if one.acknowledged != state.serial]
    heard: list[tuple[str, int]] = []

    async def ask(node: str, *_: Any, **__: Any) -> Answer[Any]:
        heard.append((node, state.serial))
        await asyncio.sleep(3600.0 if node == "c" else 0.0)
        return Answer(Welcome())

    def on_answer(told: AnnouncementAnswered) -> None:
        members[told.node].acknowledged = told.serial

    telling = announcer.BeatSender(state, SimpleNamespace(ask=ask), on_answer)  # type: ignore[arg-type]
    running = asyncio.create_task(telling.run())
    for serial in (1, 2, 3):
        state.serial = serial
        telling.wake()
        await until(lambda: ("b", serial) in heard and members["b"].acknowledged == serial)  # noqa: B023
    assert heard.count(("c", 1)) == len(heard) - 3 == 1
    running.cancel()
    await asyncio.wait([running])


async def test_something_is_read_on_every_connection_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise unread heartbeats add up to the limit of unread bytes of a connection."""
    monkeypatch.setattr(announcer, "REANNOUNCE_S", 0.2)
    async with fronts(tmp_path, ("a", "b"), ("a",), coordination="single", leader="a") as found:
        await led([*found.values()])
        intakes = [one.plane.channel.intake for one in found.values()]

        def read() -> dict[tuple[int, int], int]:
            return {(n, fd): known.read for n, intake in enumerate(intakes) for fd, known in intake._known.items()}

        await until(lambda: len(read()) == 8)  # two by each to the other, at both ends
        before = read()
        await until(lambda: all(now > before[one] for one, now in read().items()))
