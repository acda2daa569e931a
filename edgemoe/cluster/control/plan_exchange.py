"""How a box comes to the plan that it goes by: from the leader that it obeys, checked, kept on disk and handed on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.store import wait_event
from edgemoe.cluster.control.members import BEAT_S
from edgemoe.cluster.control.plan_store import PlanStore, read_plan
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.control_messages import Beat, ControlMessage, GetPlan, PlanIs
from edgemoe.cluster.rpc.sparing_log import SparingLog
from edgemoe.errors import PeerError, PeerRefused
from edgemoe.types.placement import PlacementPlan

log = logging.getLogger(__name__)
ASK_S = 2.0
RETRY_S = 0.5


class PlanExchange:
    """Fetches plans over the channel, and goes by those that the fence lets through."""

    def __init__(
        self,
        plans: PlanStore,
        fence: EpochFence,
        channel: Channel[ControlMessage],
        follow: Callable[[PlacementPlan], None],
    ) -> None:
        """`follow` is told of each plan that is gone by."""
        self._plans, self._fence, self._channel, self._follow = plans, fence, channel, follow
        self._say = SparingLog(log)

    async def run(self, news: asyncio.Event, leader: Callable[[], tuple[str, Beat] | None]) -> None:
        """Fetches the plan that the leader names, by its last beat, whenever it is not the one held."""
        while True:
            await wait_event(news, BEAT_S)
            if (named := leader()) is not None and not await self.follow(*named):
                await asyncio.sleep(RETRY_S)

    async def follow(self, leader: str, named: Beat) -> bool:
        """Goes by the plan that the leader's beat names, where it is not the one held; False where it cannot be had."""
        held = self._plans.ref.digest if self._plans.ref else ""
        if not named.plan_digest or named.plan_digest == held:
            return True
        try:
            plan, data = await self.fetch(leader, named.plan_digest)
            self.adopt(plan, named.leading, data)
        except PeerError as error:
            self._say(logging.WARNING, "the leader's plan cannot be had", leader, why=str(error))
            return False
        return True

    async def fetch(self, node: str, digest: str) -> tuple[PlacementPlan, bytes]:
        """Returns the plan of that digest from that box, and the bytes that it is of. Raises PeerError."""
        answer = await self._channel.ask(node, GetPlan(digest), timeout_s=ASK_S)
        if not isinstance(answer.message, PlanIs) or len(answer.tensors) != 1:
            raise PeerRefused(f"{node} answered with something else than a plan")
        data = bytes(answer.tensors[0])
        return read_plan(data, digest), data

    def adopt(self, plan: PlacementPlan, epoch: int, data: bytes = b"") -> None:
        """Goes by the plan of a leader of this epoch; `data` is what it was read from, where it was received.

        Raises PeerRefused for a plan of a later epoch, one of a deposed leader, and one older than what is held.
        """
        if not plan.epoch <= epoch or epoch < self._fence.highest:
            raise PeerRefused(
                f"plan {plan.version} of epoch {plan.epoch} came in epoch {epoch}; the highest seen is "
                f"{self._fence.highest}"
            )
        if self._plans.is_newer_than(plan):
            raise PeerRefused(f"plan {plan.version} of epoch {plan.epoch} is older than the one held")
        self._plans.adopt(plan, data)
        assert self._plans.ref is not None
        fields = {"version": plan.version, "epoch": plan.epoch, "digest": self._plans.ref.digest, "leading": epoch}
        log.info("plan", extra=fields | {"nodes": ",".join(plan.nodes)})
        self._follow(plan)
