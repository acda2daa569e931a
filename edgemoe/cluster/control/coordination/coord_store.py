"""The agreement between boxes: leader, epoch, and the plan's version and digest.

`CoordStore` is the interface, with two implementations: one box, and etcd, whether the boxes or the owner run it.
An epoch only rises; every change names its leader's epoch and is refused once a higher one exists. A leader deposes
itself when its last successful renewal was sent longer ago than the lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from edgemoe.cluster.control.coordination.epoch_fence import MAX_LEAP
from edgemoe.cluster.rpc.roster import Roster
from edgemoe.errors import CoordUnavailable, PlanConflict, StaleEpoch
from edgemoe.types.bounds import Count, Text, Word


def since_boot() -> float:
    """Returns seconds since boot, suspend included: a leader that wakes finds its lease lapsed."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class PlanRef(msgspec.Struct, frozen=True):
    """Names a placement plan by content; the plan itself travels between the boxes."""

    version: Count  # from 1, rises by one with each plan
    digest: Text


class AgreementView(msgspec.Struct, frozen=True):
    """The agreement as this box knows it. `leader` is "" while there is none or its lease has lapsed."""

    epoch: Count = 0
    leader: Word = ""
    plan: PlanRef | None = None
    roster: Roster | None = None  # once the members are agreed


class CoordStore(Protocol):
    """The agreement. Every call has a deadline of its own; CoordUnavailable means that the outcome is unknown."""

    lease_s: float

    @property
    def blocker(self) -> str:
        """Why this box cannot take part at the moment; "" while it can."""

    async def start(self) -> None:
        """Joins the agreement. Raises CoordUnavailable if it cannot be reached."""

    async def close(self) -> None:
        """Leaves the agreement, which keeps its state."""

    def view(self) -> AgreementView:
        """Returns the last known state; never waits."""

    async def changed(self, timeout_s: float) -> None:
        """Returns when the view may have changed, or after `timeout_s`."""

    async def claim(self, node: str, above: int) -> int:
        """Becomes leader; the new epoch, higher than `above`. Raises StaleEpoch while another's lease lives."""

    async def renew(self, epoch: int) -> None:
        """Extends the lease of `epoch`. Raises StaleEpoch once deposed."""

    async def resign(self, epoch: int) -> None:
        """Gives the lease of `epoch` back at once. Not an error when already deposed."""

    async def commit_plan(self, epoch: int, plan: PlanRef) -> None:
        """Makes `plan` the plan. Raises StaleEpoch, or PlanConflict unless its version follows the present one."""

    async def change_roster(self, before: Roster | None, after: Roster) -> None:
        """Makes `after` the roster in place of `before`. Raises RosterConflict where there is another one."""


@dataclass(slots=True)
class CoordState:
    """An agreement's state and its transitions.

    A claim names the last renewal that the claimant knows of and fails if there was another: so nobody claims while the
    lease lives. Repeating an operation whose first try went through, outcome unknown, answers the same again.
    """

    epoch: Count = 0
    leader: Word = ""
    plan: PlanRef | None = None
    renewals: Count = 0  # of leases, all told

    def claim(self, node: str, epoch: int, expect_epoch: int, expect_renewals: int) -> int:
        """Returns `epoch`; 0 if epoch or renewals are not the expected ones, or the epoch leaps."""
        expected = (self.epoch, self.renewals) == (expect_epoch, expect_renewals)
        if expected and expect_epoch < epoch <= expect_epoch + MAX_LEAP:
            self.epoch, self.leader = epoch, node
        return self.epoch if (self.epoch, self.leader) == (epoch, node) else 0

    def renew(self, epoch: int) -> bool:
        held = self._holds(epoch)
        self.renewals += held
        return held

    def resign(self, epoch: int) -> bool:
        if epoch == self.epoch:
            self.leader = ""
        return True

    def commit_plan(self, epoch: int, version: int, digest: str) -> str:
        """Commits a plan; answers "ok", "stale" or "conflict"."""
        if not self._holds(epoch):
            return "stale"
        plan = PlanRef(version, digest)
        if plan != self.plan and version != (self.plan.version if self.plan else 0) + 1:
            return "conflict"
        self.plan = plan
        return "ok"

    def view(self, lease_lives: bool) -> AgreementView:
        return AgreementView(self.epoch, self.leader if lease_lives else "", self.plan)

    def _holds(self, epoch: int) -> bool:
        return epoch == self.epoch and self.leader != ""


def plan_outcome(outcome: str, epoch: int, plan: PlanRef, present: PlanRef | None) -> None:
    """Raises the error that an answer of `CoordState.commit_plan` stands for, if any."""
    if outcome == "stale":
        raise StaleEpoch(f"plan {plan.version} was not committed: epoch {epoch} is over")
    if outcome == "conflict":
        raise PlanConflict(f"plan {plan.version} does not follow the present plan {present and present.version}")


class SingleBoxStore:
    """The agreement of one box with itself, which always leads."""

    def __init__(self, epoch: int, on_epoch: Callable[[int], None] = lambda _: None) -> None:
        """Begins above `epoch`, the highest that this box has seen; calls `on_epoch` with each higher one."""
        self.lease_s = 10.0  # no other box waits for it
        self._state = CoordState(epoch=epoch)
        self._on_epoch = on_epoch
        self._event = asyncio.Event()
        self.blocker = ""

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def view(self) -> AgreementView:
        return self._state.view(lease_lives=True)

    async def changed(self, timeout_s: float) -> None:
        await wait_event(self._event, timeout_s)

    async def claim(self, node: str, above: int) -> int:
        state = self._state
        if state.leader not in ("", node):
            raise StaleEpoch(f"{state.leader} leads already, in epoch {state.epoch}")
        epoch = state.claim(node, max(state.epoch, above) + 1, state.epoch, state.renewals)
        self._on_epoch(epoch)
        self._event.set()
        return epoch

    async def renew(self, epoch: int) -> None:
        if not self._state.renew(epoch):
            raise StaleEpoch(f"epoch {epoch} is over; the present one is {self._state.epoch}")

    async def resign(self, epoch: int) -> None:
        self._state.resign(epoch)
        self._event.set()

    async def commit_plan(self, epoch: int, plan: PlanRef) -> None:
        plan_outcome(self._state.commit_plan(epoch, plan.version, plan.digest), epoch, plan, self._state.plan)
        self._event.set()

    async def change_roster(self, before: Roster | None, after: Roster) -> None:
        raise CoordUnavailable("one box alone agrees with nobody on members")


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for `event` and clears it; returns after `timeout_s` at the latest."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
