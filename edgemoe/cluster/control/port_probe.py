"""Probes whether boxes reach each other's ports, in both directions, and how far apart their clocks are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.membership import Member
from edgemoe.cluster.control.messages import ControlMessage, PortProbeReply, PortProbeRequest
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.errors import EdgemoeError
from edgemoe.types.bounds import is_port

TRY_S, ASK_S = 2.0, 5.0
FRESH_S = 5.0  # within which a result is used again


class PortProber:
    """Probes the ports that members have announced, and no others. Lives on one event loop."""

    def __init__(self, state: ControlState, channel: Channel[ControlMessage]) -> None:
        self._state, self._channel = state, channel
        self.wall: Callable[[], float] = time.time
        self._tried: dict[str, tuple[float, tuple[str, ...]]] = {}  # by node: time, lanes that did not answer
        self._locks: dict[str, asyncio.Lock] = {}

    async def answer(self, node: str) -> PortProbeReply:
        """Answers a box that asks whether its ports can be reached from here."""
        came_s = self.wall()
        unreached = await self._try(node)
        return PortProbeReply(came_s=came_s, answered_s=self.wall(), unreached=unreached)

    async def probe_all(self) -> list[dict[str, Any]]:
        """Returns, for each box that is alive, the lanes dead from here and from there, and its clock offset."""
        alive = self._state.members.alive()
        return list(await asyncio.gather(*(self._probe(member.peer.node) for member in alive)))

    async def _probe(self, node: str) -> dict[str, Any]:
        unreached = self._try(node)
        asked_s, began_s = self.wall(), time.monotonic()
        trying = asyncio.ensure_future(unreached)
        try:
            answer = (await self._channel.ask(node, PortProbeRequest(), timeout_s=ASK_S)).message
            there: dict[str, Any] = {"why": "its answer is of another kind"}
            if isinstance(answer, PortProbeReply):
                there = {"from_there": list(answer.unreached)}
                there |= clock_offset(asked_s, answer, asked_s + time.monotonic() - began_s)
        except EdgemoeError as error:
            there = {"why": str(error)}
        return {"node": node, "from_here": list(await trying)} | there

    async def _try(self, node: str) -> tuple[str, ...]:
        """Returns the lanes of that box that do not answer; one probe at a time, at most one in FRESH_S."""
        async with self._locks.setdefault(node, asyncio.Lock()):
            tried_s, found = self._tried.get(node, (float("-inf"), ()))
            if time.monotonic() - tried_s >= FRESH_S and node in self._state.members:
                lanes = lanes_of(self._state.members[node])
                answers = await asyncio.gather(*(is_open(*place) for place in lanes.values()))
                found = tuple(lane for lane, answer in zip(lanes, answers, strict=True) if not answer)
                self._tried[node] = time.monotonic(), found
            return found


def clock_offset(asked_s: float, answer: PortProbeReply, heard_s: float) -> dict[str, float]:
    """Returns how far the other clock is ahead, and the error bound: half of the round trip."""
    ahead_s = ((answer.came_s - asked_s) + (answer.answered_s - heard_s)) / 2
    way_s = (heard_s - asked_s) - (answer.answered_s - answer.came_s)
    return {"ahead_s": ahead_s, "within_s": max(0.0, way_s) / 2}


def lanes_of(member: Member) -> dict[str, tuple[str, int]]:
    """Returns host and port of each lane that the box has announced."""
    host, _, port = member.address.rpartition(":")
    host = host.strip("[]")
    engine = member.announcement.engine if member.announcement is not None else None
    lanes = {"control": (host, int(port))} if is_port(port) and host else {}
    if lanes and engine is not None:
        lanes |= {"calls": (host, engine.calls_port), "bulk": (host, engine.bulk_port)}
    return lanes


async def is_open(host: str, port: int) -> bool:
    """Whether a process listens there; sends nothing."""
    try:
        async with asyncio.timeout(TRY_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
