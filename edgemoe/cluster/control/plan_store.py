"""The placement plan that this box follows: fetched from the leader, checked, kept on disk, sent to others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgemoe.cluster.control.coordination.coord_store import PlanRef, wait_event
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.cluster.control.messages import ControlMessage, Heartbeat, PlanReply, PlanRequest
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.durable import replace_file
from edgemoe.errors import PeerError, PeerRefused
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.bounds import MAX_NODES
from edgemoe.types.placement import PlacementPlan, digest_of

log = logging.getLogger(__name__)
MAX_PLAN_BYTES = 4 << 20


class PlanStore:
    """Holds `plan` and its name `ref`, None without a plan, in memory and on disk. Lives on one event loop."""

    def __init__(self, path: Path) -> None:
        self.plan: PlacementPlan | None = None
        self.ref: PlanRef | None = None
        self._data, self._path = b"", path
        try:
            data = path.read_bytes()
            plan = read_plan(data)
        except FileNotFoundError:
            return
        except PeerRefused as error:
            log.warning("the plan kept on disk is not used", extra={"file": str(path), "why": str(error)})
            return
        self._hold(plan, data)

    def is_newer_than(self, plan: PlacementPlan) -> bool:
        """Whether a later plan for the same model is held."""
        held = self.plan
        return held is not None and held.model == plan.model and (held.epoch, held.version) > (plan.epoch, plan.version)

    def adopt(self, plan: PlacementPlan, data: bytes = b"") -> None:
        """Holds this plan from now on, even if the disk fails. `data` are its encoded bytes, if received."""
        data = data or msgspec.msgpack.encode(plan)
        self._hold(plan, data)
        try:
            replace_file(self._path, data)
        except OSError as error:
            log.error("the plan is forgotten at the next start", extra={"file": str(self._path), "why": error.strerror})

    def bytes_of(self, digest: str) -> bytes:
        """Returns the encoded plan of that digest, to be sent. Raises PeerRefused if another plan is held."""
        if self.plan is None or self.ref is None or self.ref.digest != digest:
            raise PeerRefused(f"the plan {digest[:12]} is not held here")
        return self._data

    def _hold(self, plan: PlacementPlan, data: bytes) -> None:
        """Keeps the bytes as received: a later release may have written fields that this one does not read."""
        self.plan, self.ref, self._data = plan, PlanRef(plan.version, digest_of(data)), data


def read_plan(data: bytes | memoryview, digest: str = "") -> PlacementPlan:
    """Decodes and checks a plan; `digest`, if given, must be its digest. Raises PeerRefused."""
    if len(data) > MAX_PLAN_BYTES:
        raise PeerRefused(f"a plan of {len(data)} bytes; {MAX_PLAN_BYTES} are read")
    try:
        plan = msgspec.msgpack.decode(data, type=PlacementPlan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerRefused(f"a plan that cannot be read: {error}") from error
    size = -(-plan.layers * plan.experts // 8)
    parts = (*plan.homes, *plan.goal, *plan.disk)
    numbers_fit = len(plan.nodes) == len(plan.homes) <= MAX_NODES
    numbers_fit = numbers_fit and {len(plan.goal), len(plan.disk)} <= {0, len(plan.nodes)}
    sizes_fit = numbers_fit and all(len(homes) == size for homes in parts)
    if not sizes_fit or len(set(plan.nodes)) != len(plan.nodes) or min(plan.layers, plan.experts, plan.version) < 1:
        raise PeerRefused("a plan whose parts do not fit together")
    if digest and digest_of(data) != digest:
        raise PeerRefused(f"a plan of digest {digest_of(data)[:12]} instead of {digest[:12]}")
    return plan


ASK_S = 2.0
RETRY_S = 0.5


class PlanExchange:
    """Fetches plans over the channel, and adopts each plan that the epoch fence admits."""

    def __init__(
        self,
        plans: PlanStore,
        fence: EpochFence,
        channel: Channel[ControlMessage],
        on_plan: Callable[[PlacementPlan], None],
    ) -> None:
        """Calls `on_plan` with each adopted plan."""
        self._plans, self._fence, self._channel, self._on_plan = plans, fence, channel, on_plan
        self._say = RateLimitedLog(log)

    async def run(self, due: asyncio.Event, leader: Callable[[], tuple[str, Heartbeat] | None]) -> None:
        """Fetches the plan that the leader's last beat names, whenever another one is held, until cancelled."""
        while True:
            await wait_event(due, BEAT_S)
            if (named := leader()) is not None and not await self.fetch_if_new(*named):
                await asyncio.sleep(RETRY_S)

    async def fetch_if_new(self, leader: str, named: Heartbeat) -> bool:
        """Adopts the plan that the leader's beat names, unless it is held. Returns whether it is held now."""
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
        """Returns the plan of that digest from that box, and its encoded bytes. Raises PeerError."""
        answer = await self._channel.ask(node, PlanRequest(digest), timeout_s=ASK_S)
        if not isinstance(answer.message, PlanReply) or len(answer.tensors) != 1:
            raise PeerRefused(f"{node} answered with something else than a plan")
        data = bytes(answer.tensors[0])
        return read_plan(data, digest), data

    def adopt(self, plan: PlacementPlan, epoch: int, data: bytes = b"") -> None:
        """Adopts the plan of a leader of this epoch. `data` are the bytes it was received as, if it was.

        Raises PeerRefused for a plan of a later epoch, of a deposed leader, or older than the plan held.
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
        self._on_plan(plan)
