"""Tells the leader what our engine has to do, whenever that has changed."""

from __future__ import annotations

import asyncio
import time

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.coordination.coord_store import wait_event
from edgemoe.front.requests.engine_use import EngineMeter
from edgemoe.ipc.messages import ExpertDemandReport
from edgemoe.ticking import until_tick

LOOK_S = 0.05  # at most, between looks at what our engine has to do, while it has anything
GAP_S = 0.01  # at least, between words about it
REPEAT_S = 0.5  # after which what has hardly changed is said again


class EngineNews:
    """One owner, one event loop."""

    def __init__(self, plane: ControlPlane, meter: EngineMeter) -> None:
        self._changed = asyncio.Event()
        self._plane, self._meter = plane, meter
        self._reign: tuple[str, int] = ("", 0)  # in which the leader was told last
        self._told: tuple[tuple[object, ...], float] = ((), 0.0)  # what, and when
        self._idle = False  # our engine, when looked at last
        self._waited_s = 0.0  # when it was waited for last

    def changed(self) -> None:
        """Takes note that our engine has something more or less to do."""
        self._changed.set()

    def hear(self, message: ExpertDemandReport) -> None:
        """Takes what our engine says of its requests' choices."""
        self._meter.hear(message)
        self._changed.set()

    def look(self) -> None:
        """Takes note of who leads, and which engine is ours."""
        if (self._plane.state.leader_tracker.current, self._meter.engine) != self._told[0][:2]:
            self._changed.set()

    async def wait(self, busy: bool) -> None:
        """Waits until there may be something to tell; not for long if `busy`, or while our engine is."""
        await wait_event(self._changed, LOOK_S if busy or not self._idle else until_tick(REPEAT_S))
        await asyncio.sleep(max(0.0, self._waited_s + GAP_S - time.monotonic()))
        self._waited_s = time.monotonic()

    def tell(self) -> None:
        """Tells the leader, where it has changed or is a while ago."""
        plane, meter, now = self._plane, self._meter, time.monotonic()
        reign = plane.state.leader_tracker.current
        self._idle = True
        if not plane.leader or not any(plane.state.members):
            return
        use = meter.use()
        self._idle = not use.running and not use.waiting
        marks = reign, use.engine, use.running, use.waiting, use.prefill_tokens, meter.choices
        if marks == self._told[0] and now - self._told[1] < REPEAT_S:
            return
        if reign != self._reign:
            self._reign = reign
            meter.retell()
        again, self._told = marks == self._told[0], (marks, now)
        news = meter.news(use, again)
        if plane.leader == plane.state.node:
            plane.desk.hear(plane.leader, news)
        elif not plane.channel.tell(plane.leader, news):
            meter.retell()
