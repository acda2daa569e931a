"""Sends to the other boxes: this box's announcement until each acknowledges it, beats to all, reports to the leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from edgemoe.cluster.control.control_state import AnnouncementAnswered, ControlState
from edgemoe.cluster.control.coordination.store import PlanRef
from edgemoe.cluster.control.membership import Member
from edgemoe.cluster.control.messages import Beat, ControlMessage, Report
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.errors import PeerError, PeerRefused

log = logging.getLogger(__name__)
ASK_S = 2.0
RETRY_S = 0.5
REMIND_S = 3600.0


class Announcer:
    """Tells the others of the state's card."""

    def __init__(
        self, state: ControlState, channel: Channel[ControlMessage], tell: Callable[[AnnouncementAnswered], None]
    ) -> None:
        """`tell` gets what came of it."""
        self._state, self._channel, self._tell = state, channel, tell
        self._due = asyncio.Event()
        self._telling: set[str] = set()

    async def run(self) -> None:
        """Announces this box to whoever has not heard the latest, until cancelled. Nobody waits for another."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._due.wait()
                self._due.clear()
                for member in self._state.unacknowledged():
                    if member.peer.node not in self._telling:
                        self._telling.add(member.peer.node)
                        group.create_task(self._keep_telling(member.peer.node))

    async def _keep_telling(self, node: str) -> None:
        """Tells one box until it has taken note of the latest, or is gone."""
        while (
            member := next((one for one in self._state.unacknowledged() if one.peer.node == node), None)
        ) is not None:
            serial = self._state.serial
            await self.announce_to(member)
            if member.acknowledged != serial:
                await asyncio.sleep(RETRY_S)
        self._telling.discard(node)

    def look(self) -> None:
        """Takes note that something has happened, after which there may be somebody to tell."""
        if self._state.unacknowledged():
            self._due.set()

    async def reannounce(self) -> None:
        """Tells everybody again each hour, by each connection, until cancelled.

        What heartbeats bring counts as unread until a message is read, and one without messages is cut after days.
        """
        while True:
            await asyncio.sleep(REMIND_S)
            members = [member for member in self._state.members if member.up]
            await asyncio.gather(*(self.announce_to(member, aside) for member in members for aside in (False, True)))

    async def announce_to(self, member: Member, aside: bool = False) -> None:
        """Tells one box, once."""
        node, serial = member.peer.node, self._state.serial
        try:
            await self._channel.ask(node, self._state.card, timeout_s=ASK_S, aside=aside)
        except PeerRefused as error:
            self._tell(AnnouncementAnswered(node, serial, str(error)))
        except PeerError as error:
            log.debug("announcement not delivered", extra={"peer": node, "why": str(error)})
        else:
            self._tell(AnnouncementAnswered(node, serial))

    def beat(self, load: Beat, leading: int, seen: int, plan: PlanRef | None) -> None:
        """Tells everybody how this box is: how busy, in which epoch it leads, and which it has seen."""
        version, digest = (plan.version, plan.digest) if plan else (0, "")
        beat = msgspec.structs.replace(load, leading=leading, seen=seen, plan_version=version, plan_digest=digest)
        for member in self._state.members:
            self._channel.tell(member.peer.node, msgspec.structs.replace(beat, unmet=member.card is None))


REPORT_S = 10.0


class Reporter:
    """`run` until cancelled."""

    def __init__(
        self, state: ControlState, channel: Channel[ControlMessage], report: Callable[[], Report | None]
    ) -> None:
        """`report` returns None while there is nothing to report."""
        self._state, self._channel, self._report = state, channel, report

    async def run(self) -> None:
        """Reports to whoever leads, while that is another box."""
        while True:
            leader = self._state.leader_tracker.leader
            if leader in self._state.members and (report := self._report()) is not None:
                self._channel.tell(leader, report)
            await asyncio.sleep(REPORT_S)
