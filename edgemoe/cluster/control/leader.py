"""This box's part in the agreement, and, while it leads, the upkeep of the placement plan.

`plan_controller` decides; this module reads the agreed plan, has placements solved, commits plans and adopts them. A
plan agreed earlier stays in force, whichever leader committed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.coordination.coord_store import CoordStore, PlanRef, wait_event
from edgemoe.cluster.control.leadership import Election
from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.cluster.control.messages import BoxReport
from edgemoe.cluster.control.plan_controller import (
    ClusterObserved,
    CommitPlacement,
    Instruction,
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


class LeaderTasks:
    """Takes part in the agreement and leads when elected. Call `close` after `run` has ended."""

    def __init__(
        self,
        settings: ClusterSettings,
        store: CoordStore,
        state: ControlState,
        exchange: PlanExchange,
        solver: PlanSolver,
        *,
        send_beat: Callable[[], None],
        make_report: Callable[[], BoxReport | None],
    ) -> None:
        """Uses `make_report` for the report that this box would send to another leader."""
        self.follows_agreed_plan = False  # while it leads; only then may its beats name the plan
        self._store, self._state, self._exchange, self._solver = store, state, exchange, solver
        self._send_beat, self._make_report = send_beat, make_report
        self._controller, self._homes = PlanController(settings), HomeInventory()
        self._epoch = 0  # in which this box has taken over
        self._last_error = ""  # of the last round
        self._due = asyncio.Event()  # a placement was solved, or leadership was won or lost
        self._election: Election | None = None
        if state.announcement.role == "box":
            fence = state.fence
            self._election = Election(
                store,
                settings.node,
                state.clock,
                random.Random(),
                lambda: fence.highest,
                lambda: bool(self._epoch_error() or state.why_cut_off()),
                self._due.set,
            )
        self._electing: asyncio.Task[None] | None = None
        self._joined = False  # the agreement
        self._proposed: PlacementPlan | None = None  # the last plan to commit; perhaps no other box has it
        self._solved: list[PlacementSolved] = []
        self._solving: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        """The epoch in which this box leads; 0 while it does not, or cannot be sure."""
        if self._election is None or self._epoch < self._state.fence.highest:
            return 0
        return self._epoch if self._election.epoch() == self._epoch else 0

    @property
    def blocker(self) -> str:
        """Why this box has no vote, or why there is no new plan; "" if nothing is wrong."""
        return self._epoch_error() or (self._joined and self._store.blocker) or self._controller.blocker

    def _epoch_error(self) -> str:
        return self._state.fence.reject_reason(self._store.view().epoch) if self._joined else ""

    async def run(self) -> None:
        """Takes part, and leads when elected, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._electing = group.create_task(self._join_and_run_for_leader())
            group.create_task(self._lead(group))

    async def resign(self) -> None:
        """Gives up leadership, and does not run for it again."""
        if self._electing is not None:
            self._electing.cancel()
            await asyncio.wait([self._electing], timeout=RESIGN_S)

    async def close(self) -> None:
        """Closes the agreement's files and connections."""
        await self._store.close()

    async def _join_and_run_for_leader(self) -> None:
        """Joins the agreement as soon as it can be reached, then runs for leader."""
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
        while True:
            await wait_event(self._due, until_tick(BEAT_S / 2 if self._epoch else BEAT_S))
            try:
                await self._follow_election()
                if self._epoch:
                    await self._update_plan(group, self._epoch)
                self._last_error = ""
            except (CoordError, PeerError) as error:
                if self._last_error != str(error):
                    log.warning("the agreement did not follow", extra={"why": str(error)})
                self._last_error = str(error)
            except Exception as error:  # caused by another box's message, which must not end the leader
                if self._last_error != repr(error):
                    log.exception("the plan could not be updated")
                self._last_error = repr(error)

    async def _follow_election(self) -> None:
        """Takes over when this box is elected, and stops leading when its epoch is over. Raises CoordError."""
        state, epoch = self._state, self._election.epoch() if self._election is not None else 0
        if self._joined and self._store.view().epoch > state.fence.highest:
            state.fence.admit(self._store.view().epoch)
        if epoch and epoch < state.fence.highest:
            log.warning("leadership is given back", extra={"epoch": epoch, "seen": state.fence.highest})
            await self._store.resign(epoch)
        elif epoch and (why := state.why_cut_off()):
            log.error("leadership is given back: the others cut this box off", extra={"epoch": epoch, "why": why})
            await self._store.resign(epoch)
        elif epoch and epoch != self._epoch:
            await self._take_over(epoch)
        elif not epoch and self._epoch:
            log.info("no longer leading", extra={"epoch": self._epoch})
            self._reset(0)
            state.leader_tracker.unfollow(state.node)

    async def _take_over(self, epoch: int) -> None:
        try:
            self._state.fence.admit(epoch)
        except CoordError as error:  # no box leads in an epoch that it cannot keep on disk
            log.warning("leadership is given back", extra={"epoch": epoch, "why": str(error)})
            await self._store.resign(epoch)
            return
        log.info("leading", extra={"epoch": epoch})
        self._reset(epoch)
        self.follows_agreed_plan = False
        self._state.leader_tracker.follow_leader(self._state.node, epoch)
        self._send_beat()

    def _reset(self, epoch: int) -> None:
        self._epoch = epoch
        self._stop_solving()
        self._homes.reset()
        self._controller.handle(LeadershipTaken(epoch))

    async def _update_plan(self, group: asyncio.TaskGroup, epoch: int) -> None:
        """Adopts the agreed plan, or lets the controller change it."""
        state, plans, agreed = self._state, self._state.plans, self._store.view().plan
        if agreed is None and plans.ref is not None:  # the agreement is new, or was lost
            await self._store.commit_plan(epoch, PlanRef(1, plans.ref.digest))
            return
        held = (
            plans.plan if plans.ref is not None and agreed is not None and plans.ref.digest == agreed.digest else None
        )
        self.follows_agreed_plan = held is not None
        found = await self._find_plan(agreed) if agreed is not None and held is None else None
        if found is not None and not plans.is_newer_than(found[0]):
            self._exchange.adopt(found[0], epoch, found[1])
            return
        if (serving := state.serving()) is None:
            return
        now_s = state.clock()
        boxes = self._homes.update(state.announcements(), state.absent_s, serving, now_s)
        event: ClusterObserved | PlacementSolved | None
        event = ClusterObserved(now_s, agreed, held, serving, boxes, self._reports())
        while event is not None:
            for instruction in self._controller.handle(event):
                if await self._perform(instruction, group, epoch):
                    return  # placements solved meanwhile are handled in the next round
            event = self._solved.pop(0) if self._solved else None

    def _reports(self) -> dict[str, BoxReport]:
        own, members = self._make_report(), self._state.members
        reports = {m.peer.node: m.report for m in members if m.report is not None and m.can_take_part}
        return reports if own is None else {self._state.node: own, **reports}

    async def _perform(self, instruction: Instruction, group: asyncio.TaskGroup, epoch: int) -> bool:
        """Returns whether the plan has changed, so that the cluster must be observed again."""
        match instruction:
            case PrepareSolver():
                await self._solver.prepare()
                return False
            case SolvePlacement(number, task):
                self._stop_solving()
                solving = group.create_task(self._solve(number, task))
                self._solving.add(solving)
                solving.add_done_callback(self._solving.discard)
                return False
            case CommitPlacement(plan, why):
                self._proposed = plan  # the outcome may become known later
                await self._store.commit_plan(epoch, PlanRef(plan.version, plan.digest()))
                self.follows_agreed_plan = True
                log.info("new plan", extra={"because": why, "version": plan.version, "moving": bool(plan.goal)})
                self._exchange.adopt(plan, epoch)
                self._send_beat()
                return True

    async def _solve(self, number: int, task: PlacementTask) -> None:
        try:
            solved = PlacementSolved(number, await self._solver.solve(task))
        except (PlacementInfeasible, CoordError) as error:
            solved = PlacementSolved(number, None, str(error))
        except Exception as error:  # caused by another box's message, which must not end the leader
            log.exception("no plan could be worked out")
            solved = PlacementSolved(number, None, f"no plan could be worked out: {error!r}")
        self._solved.append(solved)
        self._due.set()

    def _stop_solving(self) -> None:
        self._solved.clear()
        for solving in self._solving:
            solving.cancel()

    async def _find_plan(self, agreed: PlanRef) -> tuple[PlacementPlan, bytes] | None:
        """Returns the agreed plan and its bytes from a box that has it; None if no box does."""
        if self._proposed is not None and self._proposed.digest() == agreed.digest:
            return self._proposed, b""
        for member in self._state.members.alive():
            if member.beat.plan_digest == agreed.digest:
                with contextlib.suppress(PeerError):
                    return await self._exchange.fetch(member.peer.node, agreed.digest)
        return None
