"""What this box knows of the others, says of itself, and whom it obeys: events in, actions out. `plane` performs them.

    PeerUp, PeerDown, Foreign   of a connection, or of words that cannot be read
    Heard                       a Beat, Announce or Report
    Told                        what came of announcing this box to one of the others
    Listed, Said                the list of peers, or this box, is another now
    Looked                      time has passed

Clock, epoch file and plan are given to it: nothing is obeyed that could not be remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from edgemoe.cluster.control.admission import AccessInstruction, Admission
from edgemoe.cluster.control.coordination.election_rules import ElectionRules
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.leadership import LeaderTracker
from edgemoe.cluster.control.membership import Member, Members
from edgemoe.cluster.control.messages import Announce, Beat, EngineCard, Report
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.config.settings import ClusterSettings
from edgemoe.telemetry.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)


class ConnectionOpened(NamedTuple):
    node: str


class ConnectionLost(NamedTuple):
    node: str


class PeerFoundIncompatible(NamedTuple):
    """That box's words cannot be read."""

    node: str
    why: str


class MessageReceived(NamedTuple):
    """A message of an incarnation of a box that is a member; None: one that is for others to act on."""

    node: str
    boot: str
    message: Beat | Announce | Report | None


class AnnouncementAnswered(NamedTuple):
    """A box has taken note of the announcement of that serial number, or refused it."""

    node: str
    serial: int
    refused: str = ""


class PeersListChanged(NamedTuple):
    peers: Mapping[str, Peer]


class AnnouncementChanged(NamedTuple):
    card: Announce


class TimerFired(NamedTuple):
    pass


class DeliverBeat(NamedTuple):
    """The front is to hear of it."""

    node: str
    beat: Beat


class CheckPlan(NamedTuple):
    """There may be another plan to go by."""


class PublishMembers(NamedTuple):
    """Members or their engines are not as before."""


class RefuseMessage(NamedTuple):
    """What was heard is answered with a refusal."""

    why: str


Event = (
    ConnectionOpened
    | ConnectionLost
    | PeerFoundIncompatible
    | MessageReceived
    | AnnouncementAnswered
    | PeersListChanged
    | AnnouncementChanged
    | TimerFired
)
Action = AccessInstruction | DeliverBeat | CheckPlan | PublishMembers | RefuseMessage


class ControlState:
    """One owner, one event loop."""

    def __init__(
        self,
        settings: ClusterSettings,
        peers: Mapping[str, Peer],
        card: Announce,
        plans: PlanStore,
        fence: EpochFence,
        clock: Callable[[], float],
    ) -> None:
        """`card` is what this box says of itself. Raises ConfigError."""
        self.node, self.plans, self.fence, self.clock = settings.node, plans, fence, clock
        self.members = Members(clock)
        agreement = ElectionRules(settings, peers)
        self.leader_tracker = LeaderTracker(fence, agreement, self._refuse)
        self.card = msgspec.structs.replace(card, agreement=agreement.words)
        self.model = card.engine.model if card.engine else ""  # digest; of the last engine, where there is none
        self.serial = 1  # of the announcement
        self._admission = Admission(settings, peers, agreement, self.members)
        self._actions: list[Action] = []
        self._say = RateLimitedLog(log)

    def handle(self, event: Event) -> list[Action]:
        """Takes note of what has happened. Returns what is to be done, in order.

        Raises ConfigError for a box that announces an address that cannot be one.
        """
        match event:
            case MessageReceived():
                self._hear(event)
            case ConnectionOpened(node) if node in self.members:
                member = self.members[node]
                member.up, member.acknowledged = True, 0
                self._actions.append(CheckPlan())
            case ConnectionLost(node) if node in self.members:
                self.members[node].up = False
                self._watch()
            case PeerFoundIncompatible(node, why):
                self._refuse(node, why)
            case AnnouncementAnswered(node) if node in self.members:
                self._note_told(self.members[node], event)
            case PeersListChanged(peers):
                self._admission.listed = dict(peers)
                self._let_in()
                self._actions.append(PublishMembers())
            case AnnouncementChanged(card):
                self._change_card(card)
            case TimerFired():
                self._watch()
            case _:
                log.debug("of a box that is no longer listed", extra={"node": event.node})
        actions, self._actions = self._actions, []
        return actions

    def begin(self) -> list[Action]:
        """Lets in who is listed at the start. Returns what is to be done."""
        self._let_in()
        actions, self._actions = self._actions, []
        return actions

    def unacknowledged(self) -> list[Member]:
        """Returns who can be told of this box's announcement and has not been."""
        return [member for member in self.members if member.up and member.acknowledged != self.serial]

    def serving(self) -> EngineCard | None:
        """Returns an engine that serves the cluster's model: this box's, or another's while this one has none."""
        return next((card.engine for card in self.cards().values() if card is not None and card.engine), None)

    def cards(self) -> dict[str, Announce | None]:
        """Returns what each box that can take part has said of itself, this one included."""
        return {self.node: self.card} | {m.peer.node: m.card for m in self.members if not m.refused}

    def absent_s(self, node: str) -> float:
        """For how long that box has not been alive; 0 while it is, and for this one."""
        return self.members.absent_s(node) if node in self.members else 0.0

    # --- hearing ----------------------------------------------------------------------------------------------

    def _hear(self, heard: MessageReceived) -> None:
        member = self.members[heard.node]
        if member.boot != heard.boot:
            member.boot, member.acknowledged = heard.boot, 0
        match heard.message:
            case Beat() as beat:
                self._hear_beat(member, beat)
            case Announce() as card:
                self._meet(member, card)
            case Report() as report:
                member.report = report

    def _hear_beat(self, member: Member, beat: Beat) -> None:
        node, before = member.peer.node, member.beat
        member.heard_s, member.beat = self.clock(), beat
        self._actions.append(DeliverBeat(node, beat))
        if beat.leading != before.leading or beat.plan_digest != before.plan_digest:
            self._actions.append(CheckPlan())
        if beat.engine != before.engine:
            self._actions.append(PublishMembers())
        if beat.unmet:
            member.acknowledged = 0
        if not member.noted:
            self._watch()
        self.leader_tracker.hear(member, before)

    def _meet(self, member: Member, card: Announce) -> None:
        """Takes note of what a box says of itself, and whether it can take part: not one of another model."""
        was = member.refused
        may_let_in, actions = self._admission.meet(member, card)
        self._actions += actions
        if may_let_in:
            self._let_in()
        member.refused = self._admission.reject_reason(member.peer.node, card, self.model, self.card.release)
        if member.refused and was != member.refused:
            self._say(logging.ERROR, "a box cannot take part", member.peer.node, why=member.refused)
        self._actions.append(PublishMembers())
        if member.refused:
            self._actions.append(RefuseMessage(member.refused))

    def _refuse(self, node: str, why: str) -> None:
        if node in self.members and self.members[node].refused != why:
            self.members[node].refused = why
            self._actions.append(PublishMembers())

    def _watch(self) -> None:
        """Takes note of who has come and gone."""
        if self._admission.is_due():
            self._let_in()
            self._actions.append(PublishMembers())
        for node in self.members.watch():
            alive = self.members.is_alive(node)
            self._say(logging.INFO, "box is here" if alive else "box is gone", node)
            if not alive:
                self.leader_tracker.leave(node)
            self._actions.append(PublishMembers())

    # --- saying -----------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        gone, actions = self._admission.renew()
        self._actions += actions
        for node in gone:
            self.leader_tracker.leave(node)
        self._change_card(msgspec.structs.replace(self.card, listed=self._admission.announced_list()))

    def _change_card(self, card: Announce) -> None:
        if card != self.card:
            self.card = card
            self.model = card.engine.model if card.engine else self.model
            self.serial += 1
            self._actions.append(CheckPlan())

    def _note_told(self, member: Member, told: AnnouncementAnswered) -> None:
        member.acknowledged = told.serial
        if told.refused and member.refused != told.refused:
            self._say(logging.ERROR, "a box refuses us", member.peer.node, why=told.refused)
            self._refuse(member.peer.node, told.refused)
