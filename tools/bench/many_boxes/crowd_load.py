"""Messages from the other boxes to the measured one."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

from edgemoe.cluster.control.messages import BoxReport, LoadReport, PlanRequest, RequestGrant, RequestOffer
from edgemoe.errors import PeerError
from edgemoe.types.expert_signatures import ExpertDemand, ExpertSignature
from tools.bench.many_boxes.crowd import Crowd
from tools.bench.many_boxes.measured_box import EXPERTS, LAYERS, MODEL, OWN, Box, bits, engine_card

WINDOW_S = 1.0


async def idle() -> int:
    await asyncio.sleep(WINDOW_S)
    return 1


class Load:
    """The crowd's messages to the measured box."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd, self.numbers = crowd, itertools.count(1)
        self.rng = np.random.default_rng(1)
        table = self.rng.integers(0, 255, LAYERS * EXPERTS, np.uint8).tobytes()
        places = self.rng.integers(0, 4, LAYERS * EXPERTS, np.uint8).tobytes()
        self.choices = ExpertDemand(table, places, (1e-4, 1e-3, 1e-2), 0.01, 1e-5)
        self.signature = ExpertSignature(500, self.rng.integers(0, 4000, LAYERS * EXPERTS, np.uint16).tobytes())
        self.report = BoxReport(
            model=MODEL, tokens=1e4, chosen=bytes(2 * LAYERS * EXPERTS), pairs=bytes(192 << 10), resident=bits(0.5)
        )

    @property
    def fronts(self) -> list[Box]:
        return [box for box in self.crowd.boxes.values() if box.plane.announcement.engine is not None]

    def use(self, box: Box, **fields: Any) -> None:
        use = LoadReport(
            f"engine-{box.node}", 32, 64, running=4, blocks=4000, free_blocks=3000, tokens_per_s=2000.0, **fields
        )
        box.plane.channel.notify_peer(OWN, use)

    async def each(self, count: int, say: Callable[[Box], Any]) -> int:
        """Sends messages from boxes in turn, spread evenly over a window."""
        fronts = self.fronts
        for at in range(count):
            said = say(fronts[at % len(fronts)])
            if said is not None:
                await said
            if at % 5 == 4:
                await asyncio.sleep(5 * WINDOW_S / count)
        await asyncio.sleep(0.2)
        return count

    async def request(self, box: Box, signature: ExpertSignature | None) -> None:
        """Sends an offer, and the reports of the engine that gets it: accepted, first token, end."""
        offer = RequestOffer(
            next(self.numbers),
            MODEL,
            prompt_tokens=600,
            max_tokens=400,
            expected_tokens=200,
            user=int(self.rng.integers(1, 1000)),
            prefix=self.rng.integers(0, 1 << 62, 9, np.int64).tobytes(),
            remaining_ms=20_000.0,
            signature=signature,
        )
        try:
            answer = (await box.plane.channel.ask(OWN, offer, timeout_s=5.0)).message
        except PeerError as error:
            print(f"not answered: {error}", file=sys.stderr)
            return
        assert isinstance(answer, RequestGrant)
        taker = self.crowd.boxes.get(answer.place.partition(":")[0], box)
        for _ in range(3):
            self.use(taker, taken=((box.node, offer.number),))

    async def reannounce(self) -> int:
        """Sends changed announcements from boxes; returns the number that the measured box has handled."""
        before = await self.crowd.sample()
        await self.each(
            60, lambda box: box.says(engine_card(box.node, len(self.crowd.peers), bits(0.05, next(self.numbers))))
        )
        return int((await self.crowd.sample())["looks"] - before["looks"])

    async def fetch(self) -> int:
        """Fetches the plan from all boxes at once."""
        digest = (await self.crowd.sample())["digest"]
        fronts = self.fronts
        asked = (box.plane.channel.ask(OWN, PlanRequest(digest), timeout_s=10.0) for box in fronts)
        await asyncio.gather(*asked)
        return len(fronts)

    async def announced(self) -> int:
        """Sends a changed announcement of the measured box to all."""
        await self.crowd.say()
        await self.crowd.until(lambda now: not now["untold"])
        return len(self.crowd.peers) - 1

    def cases(self) -> dict[str, Callable[[], Awaitable[int]]]:
        return {
            "use": lambda: self.each(400, self.use),
            "use and choices": lambda: self.each(100, lambda box: self.use(box, choices=self.choices)),
            "request": lambda: self.each(100, lambda box: self.request(box, None)),
            "request and forecast": lambda: self.each(80, lambda box: self.request(box, self.signature)),
            "announcement heard": self.reannounce,
            "announcement told": self.announced,
            "report": lambda: self.each(40, lambda box: self.crowd_tell(box, self.report)),
            "plan": self.fetch,
        }

    def crowd_tell(self, box: Box, message: msgspec.Struct) -> None:
        box.plane.channel.notify_peer(OWN, message)
