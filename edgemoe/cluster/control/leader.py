"""This box's part in the agreement, and what it does while it leads: it cares for the plan.

What is decided about the plan, `plan_care` decides; here it is found out what is agreed, and what was decided is done:
solved, agreed by version and digest, and from then on named in the leader's beats. What was agreed before is kept,
whoever agreed on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.coordination.raft import RaftStore
from edgemoe.cluster.control.coordination.store import CoordStore, PlanRef, wait_event
from edgemoe.cluster.control.leadership import Election
from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.cluster.control.messages import Report
from edgemoe.cluster.control.plan_controller import (
    Action,
    ClusterObserved,
    CommitPlacement,
    LeadershipTaken,
    PlacementSolved,
    PlanController,
    PrepareSolver,
    SolvePlacement,
)
from edgemoe.cluster.control.plan_store import PlanExchange
from edgemoe.cluster.control.planning.solver import PlanSolver
from edgemoe.cluster.control.planning.targets import HomeInventory, PlacementTask
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import CoordError, CoordUnavailable, PeerError, PlacementInfeasible
from edgemoe.ticking import until_tick
from edgemoe.types.placement import PlacementPlan

log = logging.getLogger(__name__)
RESIGN_S = 2.0


class Leader:
    """`run` until cancelled, then `close`. Leads or not, as the agreement has it."""

    def __init__(
        self,
        settings: ClusterSettings,
        store: CoordStore,
        state: ControlState,
        exchange: PlanExchange,
        solver: PlanSolver,
        *,
        beat: Callable[[], None],
        report: Callable[[], Report | None],
    ) -> None:
        """`beat` tells everybody how this box is; `report` is what it would report to another leader."""
        self.settled = False  # it goes by the plan that is agreed, and may name it
        self._store, self._state, self._exchange, self._solver = store, state, exchange, solver
        self._beat, self._report = beat, report
        self._care, self._homes = PlanController(settings), HomeInventory()
        self._epoch = 0  # in which this box has taken over
        self._hindrance = ""  # what kept the last step from going through
        self._answered = asyncio.Event()  # there is a solution, or this box leads, or no longer
        self._election: Election | None = None
        if state.card.role == "box":
            fence = state.fence
            self._election = Election(
                store,
                settings.node,
                state.clock,
                random.Random(),
                lambda: fence.highest,
                lambda: bool(self._leaps()),
                self._answered.set,
            )
        self._electing: asyncio.Task[None] | None = None
        self._joined = False  # the agreement
        self._proposed: PlacementPlan | None = None  # the last one, of which nobody may have heard yet
        self._solved: list[PlacementSolved] = []
        self._solving: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        """Returns the epoch in which this box leads; 0 while it does not, or cannot be sure."""
        if self._election is None or self._epoch < self._state.fence.highest:
            return 0
        return self._epoch if self._election.epoch() == self._epoch else 0

    @property
    def blocker(self) -> str:
        """Returns why nobody is elected with this box's vote, or there is no new plan."""
        return self._leaps() or (self._joined and self._store.blocker) or self._care.blocker

    @property
    def agreed(self) -> tuple[int, str] | None:
        """Counts the entries of the embedded agreement applied here; with the digest of the state they made."""
        return self._store.agreed() if self._joined and isinstance(self._store, RaftStore) else None

    def _leaps(self) -> str:
        return self._state.fence.reject_reason(self._store.view().epoch) if self._joined else ""

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._electing = group.create_task(self._agree())
            group.create_task(self._lead(group))

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

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        state = self._state
        while True:
            await wait_event(self._answered, until_tick(BEAT_S / 2 if self._epoch else BEAT_S))
            epoch = self._election.epoch() if self._election is not None else 0
            try:
                if self._joined and self._store.view().epoch > state.fence.highest:
                    state.fence.admit(self._store.view().epoch)
                if epoch and epoch < state.fence.highest:
                    log.warning("leadership is given back", extra={"epoch": epoch, "seen": state.fence.highest})
                    await self._store.resign(epoch)
                elif epoch and epoch != self._epoch:
                    await self._take_over(epoch)
                elif not epoch and self._epoch:
                    log.info("no longer leading", extra={"epoch": self._epoch})
                    self._begin(0)
                    state.leader_tracker.leave(state.node)
                if self._epoch:
                    await self._care_for_plan(group, self._epoch)
                self._hindrance = ""
            except (CoordError, PeerError) as error:
                if self._hindrance != str(error):
                    log.warning("the agreement did not follow", extra={"why": str(error)})
                self._hindrance = str(error)
            except Exception as error:  # of what one box has said, which must not end the leader
                if self._hindrance != repr(error):
                    log.exception("the plan could not be cared for")
                self._hindrance = repr(error)

    async def _take_over(self, epoch: int) -> None:
        try:
            self._state.fence.admit(epoch)
        except CoordError as error:  # without remembering its epoch nobody leads
            log.warning("leadership is given back", extra={"epoch": epoch, "why": str(error)})
            await self._store.resign(epoch)
            return
        log.info("leading", extra={"epoch": epoch})
        self._begin(epoch)
        self.settled = False
        self._state.leader_tracker.obey(self._state.node, epoch)
        self._beat()

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._stop_solving()
        self._homes.forget()
        self._care.handle(LeadershipTaken(epoch))

    async def _care_for_plan(self, group: asyncio.TaskGroup, epoch: int) -> None:
        state, plans, agreed = self._state, self._state.plans, self._store.view().plan
        if agreed is None and plans.ref is not None:
            await self._store.commit_plan(epoch, PlanRef(1, plans.ref.digest))  # an agreement that begins anew
            return
        held = (
            plans.plan if plans.ref is not None and agreed is not None and plans.ref.digest == agreed.digest else None
        )
        self.settled = held is not None
        found = await self._look_for(agreed) if agreed is not None and held is None else None
        if found is not None and not plans.is_newer_than(found[0]):
            self._exchange.adopt(found[0], epoch, found[1])
            return
        if (serving := state.serving()) is None:
            return
        now_s = state.clock()
        boxes = self._homes.look(state.cards(), state.absent_s, serving, now_s)
        look = ClusterObserved(now_s, agreed, held, serving, boxes, self._reports())
        event: ClusterObserved | PlacementSolved | None = look
        while event is not None:
            for action in self._care.handle(event):
                if await self._perform(action, group, epoch):
                    return  # what was solved meanwhile is heard at the next look
            event = self._solved.pop(0) if self._solved else None

    def _reports(self) -> dict[str, Report]:
        own, members = self._report(), self._state.members
        reports = {m.peer.node: m.report for m in members if m.report is not None and not m.refused}
        return reports if own is None else {self._state.node: own, **reports}

    async def _perform(self, action: Action, group: asyncio.TaskGroup, epoch: int) -> bool:
        """Returns whether there is another plan now, and all is to be looked at again."""
        match action:
            case PrepareSolver():
                await self._solver.prepare()
                return False
            case SolvePlacement(number, task):
                self._stop_solving()
                solving = group.create_task(self._find(number, task))
                self._solving.add(solving)
                solving.add_done_callback(self._solving.discard)
                return False
            case CommitPlacement(plan, why):
                self._proposed = plan  # whether it was agreed on may become known later
                await self._store.commit_plan(epoch, PlanRef(plan.version, plan.digest()))
                self.settled = True
                log.info("new plan", extra={"because": why, "version": plan.version, "moving": bool(plan.goal)})
                self._exchange.adopt(plan, epoch)
                self._beat()
                return True

    async def _find(self, number: int, task: PlacementTask) -> None:
        try:
            solved = PlacementSolved(number, await self._solver.solve(task))
        except (PlacementInfeasible, CoordError) as error:
            solved = PlacementSolved(number, None, str(error))
        except Exception as error:  # of what one box has said, which must not end the leader
            log.exception("no plan could be worked out")
            solved = PlacementSolved(number, None, f"no plan could be worked out: {error!r}")
        self._solved.append(solved)
        self._answered.set()

    def _stop_solving(self) -> None:
        self._solved.clear()
        for solving in self._solving:
            solving.cancel()

    async def _look_for(self, agreed: PlanRef) -> tuple[PlacementPlan, bytes] | None:
        """The agreed plan, from whoever has it; None where nobody has."""
        if self._proposed is not None and self._proposed.digest() == agreed.digest:
            return self._proposed, b""
        for member in self._state.members.alive():
            if member.beat.plan_digest == agreed.digest:
                with contextlib.suppress(PeerError):
                    return await self._exchange.fetch(member.peer.node, agreed.digest)
        return None
