"""This box's part in the agreement, and what it does while it leads: it cares for the plan.

A plan is made when one is due (`placement.why_anew`) and that has stood for a moment, agreed by version and digest, and
from then on named in the leader's beats. What was agreed before is kept, whoever agreed on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Protocol

from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.raft import RaftStore
from edgemoe.cluster.control.coordination.store import CoordStore, PlanRef
from edgemoe.cluster.control.election import Election
from edgemoe.cluster.control.members import BEAT_S, Members
from edgemoe.cluster.control.obedience import Obedience
from edgemoe.cluster.control.placement import ExpertHome, make_plan, why_anew
from edgemoe.cluster.control.plan_exchange import PlanExchange
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.rpc.control_messages import Announce, EngineCard
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import CoordError, CoordUnavailable, PeerError, PlacementInfeasible
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import PlacementPlan, unpack_bits

log = logging.getLogger(__name__)
SETTLE_S = 1.0  # for which what asks for a new plan must have stood
RESIGN_S = 2.0


class ClusterView(Protocol):
    """The cluster as the leader sees it."""

    node: str
    fence: EpochFence
    plans: PlanStore
    exchange: PlanExchange
    obedience: Obedience
    members: Members
    clock: Callable[[], float]

    @property
    def announce(self) -> Announce:
        """Returns what this box says of itself."""

    def beat(self) -> None:
        """Tells everybody how this box is."""


class Leader:
    """`run` until cancelled, then `close`. Leads or not, as the agreement has it."""

    def __init__(self, settings: ClusterSettings, store: CoordStore, cluster: ClusterView, *, electable: bool) -> None:
        self.settled = False  # it goes by the plan that is agreed, and may name it
        self._settings, self._store, self._cluster = settings, store, cluster
        self._epoch = 0  # in which this box has taken over
        self._no_plan = ""  # why there is none
        self._hindrance = ""  # what kept the last step from going through
        self._election: Election | None = None
        if electable:
            fence = cluster.fence
            self._election = Election(
                store, settings.node, cluster.clock, random.Random(), lambda: fence.highest, lambda: bool(self._leaps())
            )
        self._electing: asyncio.Task[None] | None = None
        self._joined = False  # the agreement
        self._due = ("", 0.0)  # why a new plan is due, and since when
        self._bare: dict[str, float] = {}  # since when boxes have been without an engine

    @property
    def epoch(self) -> int:
        """Returns the epoch in which this box leads; 0 while it does not, or cannot be sure."""
        if self._election is None or self._epoch < self._cluster.fence.highest:
            return 0
        return self._epoch if self._election.epoch() == self._epoch else 0

    @property
    def trouble(self) -> str:
        """Returns why nobody is elected with this box's vote, or there is no new plan."""
        return self._leaps() or (self._joined and self._store.trouble) or self._no_plan

    @property
    def agreed(self) -> tuple[int, str] | None:
        """Counts the entries of the embedded agreement applied here; with the digest of the state they made."""
        return self._store.agreed() if self._joined and isinstance(self._store, RaftStore) else None

    def _leaps(self) -> str:
        return self._cluster.fence.objection(self._store.view().epoch) if self._joined else ""

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._electing = group.create_task(self._agree())
            group.create_task(self._lead())

    async def resign(self) -> None:
        """Gives leadership back, and does not run for it again."""
        if self._electing is not None:
            self._electing.cancel()
            await asyncio.wait([self._electing], timeout=RESIGN_S)

    async def close(self) -> None:
        """Frees what it holds; after `run` has ended."""
        await self._store.close()

    async def _agree(self) -> None:
        """Joins the agreement, as soon as it can be reached, and runs for leader."""
        while not self._joined:
            try:
                await self._store.start()
                self._joined = True
            except CoordUnavailable as error:
                log.warning("the agreement cannot be reached; trying again", extra={"why": str(error)})
                await asyncio.sleep(self._store.lease_s)
        if self._election is not None:
            await self._election.run()

    async def _lead(self) -> None:
        cluster = self._cluster
        while True:
            await asyncio.sleep(BEAT_S / 2)
            epoch = self._election.epoch() if self._election is not None else 0
            try:
                if self._joined and self._store.view().epoch > cluster.fence.highest:
                    cluster.fence.admit(self._store.view().epoch)
                if epoch and epoch < cluster.fence.highest:
                    log.warning("leadership is given back", extra={"epoch": epoch, "seen": cluster.fence.highest})
                    await self._store.resign(epoch)
                elif epoch and epoch != self._epoch:
                    await self._take_over(epoch)
                elif not epoch and self._epoch:
                    log.info("no longer leading", extra={"epoch": self._epoch})
                    self._epoch, self._no_plan = 0, ""
                    cluster.obedience.leave(cluster.node)
                if self._epoch:
                    await self._care_for_plan(self._epoch)
                self._hindrance = ""
            except (CoordError, PeerError) as error:
                if self._hindrance != str(error):
                    log.warning("the agreement did not follow", extra={"why": str(error)})
                self._hindrance = str(error)

    async def _take_over(self, epoch: int) -> None:
        try:
            self._cluster.fence.admit(epoch)
        except CoordError as error:  # without remembering its epoch nobody leads
            log.warning("leadership is given back", extra={"epoch": epoch, "why": str(error)})
            await self._store.resign(epoch)
            return
        log.info("leading", extra={"epoch": epoch})
        self._epoch, self._cluster.obedience.leader = epoch, self._cluster.node
        self._due, self.settled = ("", 0.0), False
        self._bare.clear()
        self._cluster.beat()

    async def _care_for_plan(self, epoch: int) -> None:
        plans, agreed = self._cluster.plans, self._store.view().plan
        if agreed is None and plans.ref is not None:
            await self._store.commit_plan(epoch, PlanRef(1, plans.ref.digest))  # an agreement that begins anew
            return
        held = (
            plans.plan if plans.ref is not None and agreed is not None and plans.ref.digest == agreed.digest else None
        )
        self.settled = held is not None
        found = await self._look_for(agreed) if agreed is not None and held is None else None
        if found is not None and not plans.is_newer_than(found[0]):
            self._cluster.exchange.adopt(found[0], epoch, found[1])
            return
        if (serving := self._serving()) is None:
            return
        boxes = self._boxes(serving)
        why = why_anew(held, serving, boxes, self._settings.absent_s)
        if why != self._due[0]:
            self._due = (why, self._cluster.clock())
        if why and self._cluster.clock() - self._due[1] >= SETTLE_S:
            await self._plan_anew(why, serving, boxes, epoch, agreed.version + 1 if agreed else 1)

    async def _plan_anew(
        self, why: str, serving: EngineCard, boxes: list[ExpertHome], epoch: int, version: int
    ) -> None:
        try:
            plan = make_plan(serving, boxes, self._settings.replicas, epoch, version)
        except PlacementInfeasible as error:
            if self._no_plan != str(error):
                log.warning("no plan", extra={"because": why, "why": str(error)})
            self._no_plan = str(error)
            return
        await self._store.commit_plan(epoch, PlanRef(version, plan.digest()))
        self._no_plan, self.settled = "", True
        log.info("new plan", extra={"because": why, "version": version})
        self._cluster.exchange.adopt(plan, epoch)
        self._cluster.beat()

    async def _look_for(self, agreed: PlanRef) -> tuple[PlacementPlan, bytes] | None:
        """The agreed plan, from whoever has it; None where nobody has."""
        members = self._cluster.members
        for member in members:
            if member.beat.plan_digest == agreed.digest and members.is_alive(member.peer.node):
                with contextlib.suppress(PeerError):
                    return await self._cluster.exchange.fetch(member.peer.node, agreed.digest)
        return None

    def _serving(self) -> EngineCard | None:
        """An engine that serves the cluster's model: this box's, or another's while this one has none."""
        cards = [self._cluster.announce, *(m.card for m in self._cluster.members if m.card and not m.refused)]
        return next((card.engine for card in cards if card.engine is not None), None)

    def _boxes(self, serving: EngineCard) -> list[ExpertHome]:
        """Every box that is or could be a home."""
        cluster, members = self._cluster, self._cluster.members
        cards = {cluster.node: cluster.announce} | {m.peer.node: m.card for m in members if not m.refused}
        boxes = []
        for node, card in cards.items():
            engine = card.engine if card is not None else None
            if card is not None and (card.role == "witness" or (engine is not None and not engine.shares)):
                continue
            absent_s = members.absent_s(node) if node in members else 0.0
            disk, ram = _has(engine, serving) if engine is not None else (None, None)
            if disk is not None:
                self._bare.pop(node, None)
            else:  # nothing to go by: as good as away
                now = self._cluster.clock()
                absent_s = max(absent_s, now - self._bare.setdefault(node, now), 1e-3)
            room = engine.budget_experts if engine is not None else 0
            leaving = card is not None and card.leaving
            boxes.append(ExpertHome(node, room, disk, ram, absent_s, leaving))
        return boxes


def _has(engine: EngineCard, serving: EngineCard) -> tuple[BoolArray | None, BoolArray | None]:
    """Experts [L, E] on the engine's disk and in its memory; None where it serves another model."""
    if engine.model != serving.model:
        return None, None
    try:
        disk, ram = (unpack_bits(bits, serving.layers, serving.experts) for bits in (engine.disk, engine.ram))
        return disk, ram
    except ValueError:
        return None, None
