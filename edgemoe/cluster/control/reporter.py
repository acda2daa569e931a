"""Tells the leader, at intervals, what this box's requests choose and how its links are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgemoe.cluster.control.state import ControlState
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.control_messages import ControlMessage, Report

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
            leader = self._state.obedience.leader
            if leader in self._state.members and (report := self._report()) is not None:
                self._channel.tell(leader, report)
            await asyncio.sleep(REPORT_S)
