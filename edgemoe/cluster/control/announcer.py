"""What this box says of itself, told to each of the others until it has taken note."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from edgemoe.cluster.control.coordination.store import PlanRef
from edgemoe.cluster.control.members import BEAT_S, Member, Members
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.control_messages import Announce, Beat, ControlMessage
from edgemoe.cluster.rpc.sparing_log import SparingLog
from edgemoe.errors import PeerError, PeerRefused

log = logging.getLogger(__name__)
ASK_S = 2.0
RETRY_S = 0.5


class Announcer:
    """Holds the latest announcement, `card`."""

    def __init__(self, card: Announce, members: Members, channel: Channel[ControlMessage]) -> None:
        self.card = card
        self.model = card.engine.model if card.engine else ""  # digest; of the last engine, where there is none
        self._members, self._channel = members, channel
        self._serial = 1  # of the announcement
        self._say = SparingLog(log)

    def change(self, card: Announce) -> None:
        """Takes this for what the box is from now on."""
        self.card = card
        self.model = card.engine.model if card.engine else self.model
        self._serial += 1

    async def run(self) -> None:
        """Announces this box to whoever has not heard the latest, until cancelled."""
        while True:
            if late := self._late():
                await asyncio.gather(*(self.introduce(member) for member in late))
            await asyncio.sleep(RETRY_S if self._late() else BEAT_S / 4)

    async def introduce(self, member: Member) -> None:
        """Tells one box, once."""
        serial = self._serial
        try:
            await self._channel.ask(member.peer.node, self.card, timeout_s=ASK_S)
        except PeerRefused as error:
            if member.refused != str(error):
                self._say(logging.ERROR, "a box refuses us", member.peer.node, why=str(error))
            member.refused = str(error)
            member.acknowledged = serial
        except PeerError as error:
            log.debug("announcement not delivered", extra={"peer": member.peer.node, "why": str(error)})
        else:
            member.acknowledged = serial

    def beat(self, load: Beat, leading: int, seen: int, plan: PlanRef | None) -> None:
        """Tells everybody how this box is: how busy, in which epoch it leads, and which it has seen."""
        version, digest = (plan.version, plan.digest) if plan else (0, "")
        beat = msgspec.structs.replace(load, leading=leading, seen=seen, plan_version=version, plan_digest=digest)
        for member in self._members:
            self._channel.tell(member.peer.node, msgspec.structs.replace(beat, unmet=member.card is None))

    def _late(self) -> list[Member]:
        return [member for member in self._members if member.up and member.acknowledged != self._serial]
