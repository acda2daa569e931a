"""Tells the leader what our engine has to do, whenever that has changed."""

from __future__ import annotations

import asyncio
import time

from edgemoe.cluster.control.plane import ControlPlane
from edgemoe.front.requests.engine_use import EngineMeter

LOOK_S = 0.05  # at most, between looks at what our engine has to do
GAP_S = 0.01  # at least, between words about it
REPEAT_S = 0.5  # after which what has hardly changed is said again


class EngineNews:
    """One owner, one event loop."""

    def __init__(self, plane: ControlPlane, meter: EngineMeter) -> None:
        self._changed = asyncio.Event()
        self._plane, self._meter = plane, meter
        self._reign: tuple[str, int] = ("", 0)  # in which the leader was told last
        self._told: tuple[tuple[object, ...], float] = ((), 0.0)  # what, and when

    def changed(self) -> None:
        """Takes note that our engine has something more or less to do."""
        self._changed.set()

    async def wait(self) -> None:
        """Waits until there may be something to tell."""
        await asyncio.sleep(GAP_S)
        try:
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def tell(self) -> None:
        """Tells the leader, where it has changed or is a while ago."""
        plane, meter, now = self._plane, self._meter, time.monotonic()
        reign = plane.state.obedience.reign
        if not plane.leader or not any(plane.state.members):
            return
        use = meter.use()
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
        else:
            plane.channel.tell(plane.leader, news)
