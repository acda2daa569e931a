"""Decides whether a voter's etcd may start on its data. docs/design/coordination.md has the rules."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.etcd_run import is_older, latest, next_run
from edgemoe.cluster.control.messages import EtcdCard, EtcdRun
from edgemoe.errors import CoordUnavailable

log = logging.getLogger(__name__)
ANSWERS_S = 3.0  # that boxes which are away may delay a start on data
OLDER = "the data of etcd is older than others remember: a backup, or a copy of this box"


class StartCheck:
    """The check of one front's first start of etcd on its data. Lives on one event loop."""

    def __init__(self, state: ControlState) -> None:
        self.is_announced = False  # the next start
        self.is_done = False
        self._state, self._began_s = state, time.monotonic()

    def is_older(self, own: EtcdRun, voters: Sequence[str], cards: Mapping[str, EtcdCard | None]) -> bool:
        """Whether the data of that start must be given up. `cards` belong to the other voters.

        Raises CoordUnavailable until the others have answered, and while too few could take this box in again.
        """
        self._await_answers(voters)
        if self.is_announced or not is_older(own, self._remembered()):
            return False
        if not cards:
            log.error(f"{OLDER}; there is no other voter, so it counts")
            return False
        members = [node for node, card in cards.items() if card is not None and card.cluster]
        if 2 * len(members) <= len(voters):
            raise CoordUnavailable(f"no vote: {OLDER}; most voters are gone")
        log.error(f"{OLDER}; this box comes back as a learner")
        return True

    def begin(self, own: EtcdRun) -> EtcdRun:
        """Returns the next start, to be announced."""
        self.is_announced = True
        return next_run(own, self._remembered())

    def wait(self, voters: Sequence[str]) -> None:
        """Ends the check once the others have heard of the start. Raises CoordUnavailable before that."""
        self._await_answers(voters)
        self.is_done = True

    def _remembered(self) -> EtcdRun | None:
        return latest(member.remembers for member in self._state.members)

    def _await_answers(self, voters: Sequence[str]) -> None:
        """Raises CoordUnavailable until the other boxes, or most voters after ANSWERS_S, confirm the announcement."""
        members, serial = list(self._state.members), self._state.serial
        answered = {member.peer.node for member in members if member.up and member.acknowledged == serial}
        late = {member.peer.node for member in members} - answered
        here = answered.union([self._state.node]).intersection(voters)
        is_patient = time.monotonic() - self._began_s < ANSWERS_S
        if (late and is_patient) or 2 * len(here) <= len(voters):
            raise CoordUnavailable(f"no vote before {', '.join(sorted(late)) or 'the others'} answers")
