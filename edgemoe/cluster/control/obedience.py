"""Whom this box obeys: a leader that may lead, of an epoch not below the highest ever seen."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.fingerprint import Agreement
from edgemoe.cluster.control.members import Member
from edgemoe.cluster.rpc.control_messages import Beat
from edgemoe.cluster.rpc.sparing_log import SparingLog
from edgemoe.errors import CoordError, EpochLeap, PeerRefused, StaleEpoch

log = logging.getLogger(__name__)
MAX_HEARSAY = 1000  # epochs above what is known: so often no leader starts without keeping its state


class Obedience:
    """`leader` is the node that is obeyed, this one perhaps; "" while there is none."""

    def __init__(self, fence: EpochFence, agreement: Agreement, refuse: Callable[[str, str], None]) -> None:
        """`refuse` is told of a box whose epoch cannot be right, and why."""
        self.leader = ""
        self.stale = 0  # leaders of an epoch that is over, not obeyed
        self.unentitled = 0  # beats of boxes that lead though they may not, not obeyed
        self._fence, self._agreement, self._refuse = fence, agreement, refuse
        self.epoch = 0  # in which it obeyed last
        self._say = SparingLog(log)

    @property
    def reign(self) -> tuple[str, int]:
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
        may_lead = self._agreement.lets_lead(node, member.card.agreement)
        try:
            if self._fence.highest < beat.seen and (may_lead or self._is_told(beat.seen)):
                self._fence.admit(beat.seen)
            if not beat.leading:
                return False
            if not may_lead:
                self.unentitled += 1
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
