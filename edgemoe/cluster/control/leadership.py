"""Leadership: `Election` makes this box the leader and keeps it so; `LeaderTracker` knows the leader to follow."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from edgemoe.cluster.control.coordination.coord_store import CoordStore
from edgemoe.cluster.control.coordination.election_rules import ElectionRules
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.membership import Member
from edgemoe.cluster.control.messages import Heartbeat
from edgemoe.errors import CoordError, CoordUnavailable, EpochLeap, PeerRefused, StaleEpoch
from edgemoe.telemetry.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
MARGIN = 0.1  # share of the lease by which a leader steps down early, as clocks differ
RENEWALS = 4  # per lease
MAX_UNVERIFIED_LEAP = 1000  # epochs; no leader restarts that often without its state


class Election:
    """Runs for leader as `node` while `run` runs. Works with every CoordStore."""

    def __init__(
        self,
        store: CoordStore,
        node: str,
        clock: Callable[[], float],
        rng: random.Random,
        above: Callable[[], int] = lambda: 0,
        is_hindered: Callable[[], bool] = lambda: False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Claims epochs above that of `above()`, the highest known, and none while `is_hindered()`.

        Calls `changed` when this box starts or stops leading, except when its lease runs out by the clock alone.
        """
        self._store, self._node, self._clock, self._rng = store, node, clock, rng
        self._above, self._is_hindered, self._changed = above, is_hindered, changed
        self._epoch = 0
        self._until = float("-inf")

    def epoch(self) -> int:
        """Returns the epoch in which this box leads at this moment; 0 once it does not, or cannot be sure."""
        return self._epoch if self._clock() < self._until else 0

    async def run(self) -> None:
        """Claims and renews the leadership until cancelled; then resigns."""
        try:
            while True:
                await (self._lead() if self._epoch else self._await_vacancy())
        finally:
            if epoch := self.epoch():
                self._until = float("-inf")
                await self._resign(epoch)

    async def _await_vacancy(self) -> None:
        if self._store.view().leader or self._is_hindered():
            await self._store.changed(self._store.lease_s / RENEWALS)
            return
        await asyncio.sleep(self._rng.uniform(0, self._store.lease_s / 10))
        if self._store.view().leader:
            return
        sent = self._clock()
        try:
            self._extend(await self._store.claim(self._node, self._above()), sent)
        except (StaleEpoch, CoordUnavailable) as error:
            log.debug("claim refused", extra={"why": str(error)})
            await asyncio.sleep(self._store.lease_s / 10)

    async def _lead(self) -> None:
        sent = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._until - sent)):
                await self._store.renew(self._epoch)
            self._extend(self._epoch, sent)
            await asyncio.sleep(self._store.lease_s / RENEWALS)
        except StaleEpoch:
            self._step_down()
        except (CoordUnavailable, TimeoutError):
            if self._clock() >= self._until:
                self._step_down()
            else:
                await asyncio.sleep(self._store.lease_s / 20)

    def _extend(self, epoch: int, sent: float) -> None:
        """Leads in `epoch` for a lease from `sent`, when the claim or renewal was sent."""
        before, self._epoch = self._epoch, epoch
        self._until = sent + self._store.lease_s * (1 - MARGIN)
        if epoch != before:
            self._changed()

    def _step_down(self) -> None:
        self._epoch, self._until = 0, float("-inf")
        self._changed()

    async def _resign(self, epoch: int) -> None:
        try:
            async with asyncio.timeout(self._store.lease_s):
                await self._store.resign(epoch)
        except (CoordUnavailable, StaleEpoch, TimeoutError) as error:
            log.info("could not resign; the lease will lapse", extra={"epoch": epoch, "why": str(error)})


class LeaderTracker:
    """Tracks the leader that this box follows: one that may lead, in an epoch not below the highest ever seen.

    `leader` is its node, perhaps this one; "" while there is none.
    """

    def __init__(self, fence: EpochFence, rules: ElectionRules) -> None:
        self.leader = ""
        self.epoch = 0  # in which it last followed a leader
        self.stale = 0  # leading beats of epochs that are over
        self.unentitled_beats = 0  # leading beats of boxes that may not lead
        self._fence, self._rules = fence, rules
        self._say = RateLimitedLog(log)

    @property
    def current(self) -> tuple[str, int]:
        """The leader and its epoch. A leader of a new epoch has forgotten earlier offers."""
        return self.leader, self.epoch

    def follow_leader(self, node: str, epoch: int) -> None:
        """Sets the leader to follow, perhaps this box itself."""
        self.leader, self.epoch = node, epoch

    def unfollow(self, node: str) -> None:
        """Stops following that box."""
        if self.leader == node:
            self.leader = ""

    def on_beat(self, member: Member, before: Heartbeat) -> str:
        """Follows the member if its beat says that it leads and it may, else not. `before` is the beat before.

        Returns why the box cannot take part: its epoch is impossible. Otherwise "".
        """
        node, epoch = member.peer.node, member.beat.leading
        try:
            leads = self._admits(member)
        except EpochLeap as error:
            self.unfollow(node)
            return str(error)
        except (CoordError, PeerRefused) as error:
            self.stale += isinstance(error, StaleEpoch)
            if before.leading != epoch:
                self._say(logging.WARNING, "a leader is not obeyed", node, why=str(error))
            leads = False
        if not leads:
            self.unfollow(node)
            return ""
        if (node, epoch) != self.current:
            log.info("leader", extra={"node": node, "epoch": epoch})
        self.follow_leader(node, epoch)
        return ""

    def _admits(self, member: Member) -> bool:
        """Whether the member leads and may. Keeps the epochs that it names. Raises CoordError, PeerRefused."""
        node, beat = member.peer.node, member.beat
        if not member.can_take_part or member.announcement is None or member.announced_boot != member.boot:
            return False
        may_lead = self._rules.may_lead(node, member.announcement.agreement)
        if self._fence.highest < beat.seen and (may_lead or self._accepts_epoch(beat.seen)):
            self._fence.admit(beat.seen)
        if not beat.leading:
            return False
        if not may_lead:
            self.unentitled_beats += 1
            raise PeerRefused(f"{node} is none of the boxes that may lead")
        self._fence.admit(beat.leading)
        return True

    def _accepts_epoch(self, epoch: int) -> bool:
        """Whether to accept a higher epoch from a box that may not lead.

        A fixed leader that lost its state learns its epoch from nobody else. With an elected leader, one lie would end
        its leadership.
        """
        return self._rules.is_fixed and epoch <= self._fence.highest + MAX_UNVERIFIED_LEAP
