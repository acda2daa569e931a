"""Tells the leader, at intervals, what this box's requests choose and how its links are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgemoe.cluster.control.members import Members
from edgemoe.cluster.control.obedience import Obedience
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.control_messages import ControlMessage, Report

REPORT_S = 10.0


class Reporter:
    """`run` until cancelled."""

    def __init__(self, members: Members, obedience: Obedience, channel: Channel[ControlMessage]) -> None:
        self.report: Callable[[], Report | None] = lambda: None  # there is no engine
        self._members, self._obedience, self._channel = members, obedience, channel

    async def run(self) -> None:
        """Reports to whoever leads, while that is another box."""
        while True:
            leader = self._obedience.leader
            if leader in self._members and (report := self.report()) is not None:
                self._channel.tell(leader, report)
            await asyncio.sleep(REPORT_S)
