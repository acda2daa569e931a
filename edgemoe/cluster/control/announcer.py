"""Sends to the other boxes: this box's announcement until each acknowledges it, beats to all, reports to the leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from edgemoe.cluster.control.control_state import AnnouncementAnswered, ControlState
from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.membership import Member
from edgemoe.cluster.control.messages import BoxReport, ControlMessage, Heartbeat, Welcome
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.errors import PeerError, PeerRefused

log = logging.getLogger(__name__)
ASK_S = 2.0  # for an answer to an announcement
RETRY_S = 0.5
REANNOUNCE_S = 3600.0
REPORT_S = 10.0


class BeatSender:
    """Sends this box's announcement and its beats."""

    def __init__(
        self,
        state: ControlState,
        channel: Channel[ControlMessage],
        on_answer: Callable[[AnnouncementAnswered], None],
    ) -> None:
        """Calls `on_answer` with each box's answer to an announcement."""
        self._state, self._channel, self._on_answer = state, channel, on_answer
        self._due = asyncio.Event()
        self._announcing: set[str] = set()

    async def run(self) -> None:
        """Announces to each box that has not acknowledged the latest, until cancelled. No box waits for another."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._due.wait()
                self._due.clear()
                for member in self._state.unacknowledged():
                    if member.peer.node not in self._announcing:
                        self._announcing.add(member.peer.node)
                        group.create_task(self._keep_announcing(member.peer.node))

    async def _keep_announcing(self, node: str) -> None:
        """Announces to one box until it has acknowledged the latest, or is gone."""
        while (waiting := [each for each in self._state.unacknowledged() if each.peer.node == node]) != []:
            member, serial = waiting[0], self._state.serial
            await self.announce_to(member)
            if member.acknowledged != serial:
                await asyncio.sleep(RETRY_S)
        self._announcing.discard(node)

    def wake(self) -> None:
        """Starts announcing if a box has not acknowledged the latest announcement."""
        if self._state.unacknowledged():
            self._due.set()

    async def reannounce(self) -> None:
        """Announces to all boxes each hour, on each connection, until cancelled.

        Heartbeats count as unread bytes until a message is read. A connection without messages is cut after days.
        """
        while True:
            await asyncio.sleep(REANNOUNCE_S)
            members = [member for member in self._state.members if member.up]
            await asyncio.gather(*(self.announce_to(member, aside) for member in members for aside in (False, True)))

    async def announce_to(self, member: Member, aside: bool = False) -> None:
        """Sends the announcement to one box once, and passes its answer on."""
        node, serial = member.peer.node, self._state.serial
        try:
            answer = await self._channel.ask(node, self._state.announcement, timeout_s=ASK_S, aside=aside)
        except PeerRefused as error:
            self._on_answer(AnnouncementAnswered(node, serial, str(error)))
        except PeerError as error:
            log.debug("announcement not delivered", extra={"peer": node, "why": str(error)})
        else:
            welcome = answer.message if isinstance(answer.message, Welcome) else Welcome()
            self._on_answer(AnnouncementAnswered(node, serial, welcome=welcome))

    def send_beats(self, load: Heartbeat, leading: int, seen: int, plan: PlanRef | None) -> None:
        """Sends a beat to all boxes: load, the epoch in which this box leads, the highest epoch seen, its plan."""
        version, digest = (plan.version, plan.digest) if plan else (0, "")
        beat = msgspec.structs.replace(load, leading=leading, seen=seen, plan_version=version, plan_digest=digest)
        for member in self._state.members:
            is_met = member.announcement is not None and member.announced_boot == member.boot
            self._channel.notify_peer(member.peer.node, msgspec.structs.replace(beat, unmet=not is_met))


class ActivityReporter:
    """Reports to the leader, at intervals, the experts that this box's requests choose and the state of its links."""

    def __init__(
        self, state: ControlState, channel: Channel[ControlMessage], make_report: Callable[[], BoxReport | None]
    ) -> None:
        """Calls `make_report`, which returns None while there is nothing to report."""
        self._state, self._channel, self._make_report = state, channel, make_report

    async def run(self) -> None:
        """Reports every REPORT_S to another box that leads, until cancelled."""
        while True:
            leader = self._state.leader_tracker.leader
            if leader in self._state.members and (report := self._make_report()) is not None:
                self._channel.notify_peer(leader, report)
            await asyncio.sleep(REPORT_S)
