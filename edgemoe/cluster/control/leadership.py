"""Leadership: `Election` keeps this box the leader while it can, `Obedience` tracks which leader this box obeys."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from edgemoe.cluster.control.coordination.election_rules import ElectionRules
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.store import CoordStore
from edgemoe.cluster.control.membership import Member
from edgemoe.cluster.control.messages import Beat
from edgemoe.errors import CoordError, CoordUnavailable, EpochLeap, PeerRefused, StaleEpoch
from edgemoe.telemetry.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
MARGIN = 0.1  # share of the lease by which a leader steps down early, for clocks that run apart
RENEWALS = 4  # per lease


class Election:
    """Runs for leader as `node` for as long as `run` runs. `epoch` answers whether it leads now."""

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
        """`above` is the highest epoch that is known of: the ones claimed here are higher, none while `hindered`.

        `changed` is called where it leads, or no longer; not where that is only by the clock.
        """
        self._store, self._node, self._clock, self._rng = store, node, clock, rng
        self._above, self._hindered, self._changed = above, is_hindered, changed
        self._epoch = 0
        self._until = float("-inf")

    def epoch(self) -> int:
        """Returns the epoch in which this box leads at this moment; 0 when it does not, or can no longer be sure."""
        return self._epoch if self._clock() < self._until else 0

    async def run(self) -> None:
        """Claims and renews until cancelled; then resigns."""
        try:
            while True:
                await (self._lead() if self._epoch else self._follow())
        finally:
            if epoch := self.epoch():
                self._until = float("-inf")
                await self._resign(epoch)

    async def _follow(self) -> None:
        if self._store.view().leader or self._hindered():
            await self._store.changed(self._store.lease_s / RENEWALS)
            return
        await asyncio.sleep(self._rng.uniform(0, self._store.lease_s / 10))
        if self._store.view().leader:
            return
        sent = self._clock()
        try:
            self._hold(await self._store.claim(self._node, self._above()), sent)
        except (StaleEpoch, CoordUnavailable) as error:
            log.debug("claim refused", extra={"why": str(error)})
            await asyncio.sleep(self._store.lease_s / 10)

    async def _lead(self) -> None:
        sent = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._until - sent)):
                await self._store.renew(self._epoch)
            self._hold(self._epoch, sent)
            await asyncio.sleep(self._store.lease_s / RENEWALS)
        except StaleEpoch:
            self._step_down()
        except (CoordUnavailable, TimeoutError):
            if self._clock() >= self._until:
                self._step_down()
            else:
                await asyncio.sleep(self._store.lease_s / 20)

    def _hold(self, epoch: int, sent: float) -> None:
        known, self._epoch = self._epoch, epoch
        self._until = sent + self._store.lease_s * (1 - MARGIN)
        if epoch != known:
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


MAX_HEARSAY = 1000  # epochs above what is known: so often no leader starts without keeping its state


class LeaderTracker:
    """`leader` is the node that is obeyed, this one perhaps; "" while there is none."""

    def __init__(self, fence: EpochFence, agreement: ElectionRules, refuse: Callable[[str, str], None]) -> None:
        """`refuse` is told of a box whose epoch cannot be right, and why."""
        self.leader = ""
        self.stale = 0  # leaders of an epoch that is over, not obeyed
        self.unentitled_beats = 0  # beats of boxes that lead though they may not, not obeyed
        self._fence, self._agreement, self._refuse = fence, agreement, refuse
        self.epoch = 0  # in which it obeyed last
        self._say = RateLimitedLog(log)

    @property
    def current(self) -> tuple[str, int]:
        """Returns who is obeyed, and in which epoch: of what it was told in another one it knows nothing any more."""
        return self.leader, self.epoch

    def obey(self, node: str, epoch: int) -> None:
        """Obeys that box, this one perhaps, from now on."""
        self.leader, self.epoch = node, epoch

    def hear(self, member: Member, before: Beat) -> None:
        """Takes note of whether that box leads, by its beat; `before` is the one before it."""
        node, epoch = member.peer.node, member.beat.leading
        if self._obeys(member, before):
            if (node, epoch) != (self.leader, self.epoch):
                log.info("leader", extra={"node": node, "epoch": epoch})
            self.obey(node, epoch)
        else:
            self.leave(node)

    def leave(self, node: str) -> None:
        """Obeys that box no longer."""
        if self.leader == node:
            self.leader = ""

    def _is_told(self, epoch: int) -> bool:
        """Returns whether to believe that epoch of a box that may not lead, whose word would end whoever leads.

        A fixed leader that lost its state has nobody else to ask.
        """
        return self._agreement.is_fixed and epoch <= self._fence.highest + MAX_HEARSAY

    def _obeys(self, member: Member, before: Beat) -> bool:
        node, beat = member.peer.node, member.beat
        if member.refused or member.card is None or member.card_boot != member.boot:
            return False
        may_lead = self._agreement.may_lead(node, member.card.agreement)
        try:
            if self._fence.highest < beat.seen and (may_lead or self._is_told(beat.seen)):
                self._fence.admit(beat.seen)
            if not beat.leading:
                return False
            if not may_lead:
                self.unentitled_beats += 1
                raise PeerRefused(f"{node} is none of those that may lead")
            self._fence.admit(beat.leading)
            return True
        except EpochLeap as error:
            self._refuse(node, str(error))
        except (CoordError, PeerRefused) as error:
            self.stale += isinstance(error, StaleEpoch)
            if before.leading != beat.leading:
                self._say(logging.WARNING, "a leader is not obeyed", node, why=str(error))
        return False
