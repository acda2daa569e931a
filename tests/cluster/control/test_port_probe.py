"""Boxes that try each other's ports and compare their clocks, on real channels."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest
from support.planes import Front, card, fronts
from support.waiting import until

from edgemoe.cluster.control.messages import PortProbeReply

AHEAD_S = 300.0


def listening() -> socket.socket:
    """Opens a port: the kernel accepts connections, the process does not."""
    return socket.create_server(("127.0.0.1", 0))


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def heard(front: Front, other: str) -> bool:
    """Whether it has the other's announcement with an engine."""
    members = front.plane.state.members
    known = members[other].announcement
    return members.is_alive(other) and known is not None and known.engine is not None


async def test_a_port_that_is_dead_is_told_by_lane_and_direction_and_clocks_are_compared(tmp_path: Path) -> None:
    with listening() as calls, listening() as bulk:
        async with fronts(tmp_path) as found:
            a, b, c = found.values()
            alive = {"calls_port": port_of(calls), "bulk_port": port_of(bulk)}
            a.has(msgspec.structs.replace(card("one"), **alive | {"bulk_port": 1}))
            b.has(msgspec.structs.replace(card("two"), **alive | {"calls_port": 1}))
            b.plane.port_prober.wall = lambda: time.time() + AHEAD_S
            await until(lambda: heard(a, "b") and heard(b, "a") and heard(c, "a"))
            await until(lambda: a.plane.state.members.is_alive("c"))
            row, other = await a.plane.port_prober.probe_all()
            assert (other["node"], other["from_here"], other["from_there"]) == ("c", [], ["bulk"])
            assert (row["node"], row["from_here"], row["from_there"]) == ("b", ["calls"], ["bulk"])
            assert abs(row["ahead_s"] - AHEAD_S) <= row["within_s"] + 0.05
            await b.die()
            await c.die()
            await until(lambda: not any(map(a.plane.state.members.is_alive, "bc")))
            assert await a.plane.port_prober.probe_all() == []


def test_a_box_s_announcement_is_bounded() -> None:
    for wrong in ({"came_s": -1.0}, {"came_s": 1e300}, {"unreached": ["x"] * 17}):
        told = {"type": "Reached", "came_s": 1.0, "answered_s": 1.0, "unreached": []} | wrong
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(told, PortProbeReply)
