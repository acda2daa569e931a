"""The voters' agreement in one process, with the clock and the partitions of a test, in place of their etcd members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from edgemoe.cluster.control import control_plane
from edgemoe.cluster.control.coordination import store_factory
from edgemoe.cluster.control.coordination.coord_store import (
    AgreementView,
    CoordState,
    PlanRef,
    plan_outcome,
    since_boot,
    wait_event,
)
from edgemoe.cluster.rpc.roster import Roster
from edgemoe.errors import CoordUnavailable, RosterConflict, StaleEpoch


class FakeAgreement:
    """One state, which a member reads and changes while it reaches a majority of the voters.

    It begins once all voters run.
    """

    def __init__(self, clock: Callable[[], float] = since_boot, delay_s: float = 0.0) -> None:
        """Takes `delay_s` for each call."""
        self.clock, self.delay_s = clock, delay_s
        self.state, self.renewed_s, self.lease_s = CoordState(), float("-inf"), 0.0
        self.begun = False
        self.roster: Roster | None = None
        self.voters: set[str] = set()
        self.running: dict[str, FakeMember] = {}
        self.stores: list[FakeStore] = []
        self.is_cut: Callable[[str, str], bool] = lambda _one, _other: False

    def reaches(self, node: str) -> bool:
        """Whether the voter reaches a majority."""
        self.begun = self.begun or set(self.running) >= self.voters
        there = [each for each in self.running if each == node or not self.is_cut(node, each)]
        return self.begun and node in self.running and 2 * len(there) > len(self.voters)

    def lives(self) -> bool:
        """Whether the leader's lease has not lapsed."""
        return self.clock() - self.renewed_s < self.lease_s

    def publish(self) -> None:
        """Wakes the members that reach a majority."""
        for store in self.stores:
            if self.reaches(store.node):
                store.event.set()


class FakeMember:
    """Stands for a voter's etcd member."""

    agreement: FakeAgreement

    def __init__(self, settings: Any, state: Any, *_rest: Any) -> None:
        self.node = settings.node
        self.state = state
        self.process, self.resident_bytes, self.fsyncs = SimpleNamespace(starts=1), 0, 0
        self.agreement.voters = set(state.voters)

    @property
    def is_healthy(self) -> bool:
        takes_part = self.agreement.running.get(self.node) is self and not self.state.incarnations.is_copy
        return takes_part and self.agreement.reaches(self.node)

    @property
    def has_agreement(self) -> bool:
        return self.is_healthy

    @property
    def blocker(self) -> str:
        return "" if self.is_healthy else "etcd reaches no majority of the voters"

    async def run(self) -> None:
        """Runs unless another box runs as this voter, as far as the other boxes tell."""
        running = self.agreement.running
        try:
            while True:
                if self.state.incarnations.is_copy:
                    self._leave()
                elif self.node not in running:
                    running[self.node] = self
                await asyncio.sleep(0.5)
        finally:
            self._leave()

    async def remove_member(self, node: str) -> None:
        """Takes a voter out of the agreement."""
        self.agreement.voters.discard(node)

    def forget(self) -> None:
        """Does nothing: this member keeps no token."""

    def _leave(self) -> None:
        if self.agreement.running.get(self.node) is self:
            del self.agreement.running[self.node]


class FakeStore:
    """CoordStore over a FakeAgreement."""

    def __init__(self, member: FakeMember, lease_s: float) -> None:
        self.node, self.agreement, self.member = member.node, member.agreement, member
        self.lease_s = self.agreement.lease_s = lease_s
        self.event = asyncio.Event()
        self._seen = AgreementView()
        self.agreement.stores.append(self)

    @property
    def blocker(self) -> str:
        return self.member.blocker

    async def start(self) -> None:
        await self._reach()

    async def close(self) -> None:
        if self in self.agreement.stores:
            self.agreement.stores.remove(self)

    def view(self) -> AgreementView:
        if self.agreement.reaches(self.node):
            view = self.agreement.state.view(self.agreement.lives())
            self._seen = msgspec.structs.replace(view, roster=self.agreement.roster)
        return self._seen

    async def changed(self, timeout_s: float) -> None:
        await wait_event(self.event, timeout_s)

    async def claim(self, node: str, above: int) -> int:
        await self._reach()
        state, view = self.agreement.state, self.view()
        if view.leader not in ("", node):
            raise StaleEpoch(f"{view.leader} leads already, in epoch {view.epoch}")
        epoch = state.claim(node, max(state.epoch, above) + 1, state.epoch, state.renewals)
        if not epoch:
            raise StaleEpoch("another box claimed an epoch first")
        self.agreement.renewed_s = self.agreement.clock()
        self.agreement.publish()
        return epoch

    async def renew(self, epoch: int) -> None:
        await self._reach()
        if not self.agreement.lives() or not self.agreement.state.renew(epoch):
            raise StaleEpoch(f"epoch {epoch} is over")
        self.agreement.renewed_s = self.agreement.clock()

    async def resign(self, epoch: int) -> None:
        await self._reach()
        self.agreement.state.resign(epoch)
        self.agreement.publish()

    async def commit_plan(self, epoch: int, plan: PlanRef) -> None:
        await self._reach()
        state = self.agreement.state
        if not self.agreement.lives():
            raise StaleEpoch(f"plan {plan.version} was not committed: the lease of epoch {epoch} has lapsed")
        plan_outcome(state.commit_plan(epoch, plan.version, plan.digest), epoch, plan, state.plan)
        self.agreement.publish()

    async def change_roster(self, before: Roster | None, after: Roster) -> None:
        await self._reach()
        if self.agreement.roster not in (before, after):
            raise RosterConflict("another change of the members was agreed first")
        self.agreement.roster = after
        self.agreement.publish()

    async def _reach(self) -> None:
        await asyncio.sleep(self.agreement.delay_s)
        if not self.member.is_healthy:
            raise CoordUnavailable(self.blocker)


@contextmanager
def agreed_by(agreement: FakeAgreement, store: type[FakeStore] = FakeStore) -> Iterator[FakeAgreement]:
    """Gives control planes that are made meanwhile this agreement in place of etcd members."""
    member = type("FakeMember", (FakeMember,), {"agreement": agreement})
    with (
        mock.patch.object(control_plane, "EtcdMember", member),
        mock.patch.object(store_factory, "MemberStore", store),
    ):
        yield agreement
