"""Events that a peer can cause at will do not fill the log, and rare ones are logged every time."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from support.planes import card, fronts

from edgemoe.cluster.control.control_state import MessageReceived
from edgemoe.errors import PeerRefused
from edgemoe.telemetry.rate_limited_log import EVERY_S, MAX_KINDS, RateLimitedLog

log = logging.getLogger("edgemoe.test")
FLOOD = 1000


def test_a_flood_is_logged_at_powers_of_two_of_each_peer_and_line(caplog: pytest.LogCaptureFixture) -> None:
    say = RateLimitedLog(log, lambda: 0.0)
    for _ in range(FLOOD):
        say(logging.WARNING, "one", "a", why="w")
        say(logging.WARNING, "one", "b")
        say(logging.WARNING, "two", "a")
    for line, peer in (("one", "a"), ("one", "b"), ("two", "a")):
        found = [vars(r)["times"] for r in caplog.records if r.message == line and vars(r)["peer"] == peer]
        assert found == [2**n for n in range(10)]


def test_events_once_a_minute_are_always_logged(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    say = RateLimitedLog(log, lambda: now_s[0])
    for _ in range(100):
        say(logging.WARNING, "rare", "a")
        now_s[0] += EVERY_S
    assert len(caplog.records) == 100


def test_invented_names_fill_neither_log_nor_memory(caplog: pytest.LogCaptureFixture) -> None:
    say = RateLimitedLog(log, lambda: 0.0)
    for n in range(10 * MAX_KINDS):
        say(logging.WARNING, "line", f"name {n}")
    assert len(caplog.records) < MAX_KINDS + 20
    assert len(say._seen) == MAX_KINDS + 1


async def test_a_peer_that_always_has_another_fault_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fronts(tmp_path) as found:
        plane = found["a"].plane
        said = found["b"].plane.announcement
        plane.state.model = "ours"
        for n in range(FLOOD):
            engine = msgspec.structs.replace(card(f"engine {n}"), model=f"theirs {n}")
            with pytest.raises(PeerRefused):
                plane._handle(MessageReceived("b", "boot", msgspec.structs.replace(said, engine=engine)))
    assert 0 < caplog.text.count("a box cannot take part") < 20
