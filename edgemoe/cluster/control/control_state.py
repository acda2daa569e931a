"""The control plane's decisions: events in, instructions out. `control_plane` feeds and performs them.

Holds the other boxes' membership, this box's own announcement and the leader that this box follows. Clock, epoch file
and plan are passed in: no leader is followed whose epoch could not be kept on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from edgemoe.cluster.control.admission import AccessInstruction, Admission, KeptWords
from edgemoe.cluster.control.coordination.election_rules import ElectionRules, voters_of
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.distrust import DistrustedBoxes, accusers, reason_by_leader, reason_by_word
from edgemoe.cluster.control.etcd_run import KeptRuns
from edgemoe.cluster.control.incarnations import Incarnations
from edgemoe.cluster.control.leadership import LeaderTracker
from edgemoe.cluster.control.membership import ClusterMembers, Member, MembershipTrigger
from edgemoe.cluster.control.messages import Accusation, Announce, BoxReport, ChannelDescription, Heartbeat, Welcome
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.roster import KeptRoster, Roster
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PeerBusy
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)

# --- events ------------------------------------------------------------------------------------------------------


class ConnectionOpened(NamedTuple):
    """Our connection to a box works."""

    node: str


class ConnectionLost(NamedTuple):
    """Our connection to a box broke."""

    node: str


class PeerFoundIncompatible(NamedTuple):
    """A box sent messages of a protocol version that this release cannot read."""

    node: str
    why: str


class MessageReceived(NamedTuple):
    """A member's front sent a message; None stands for a message that others handle."""

    node: str
    boot: str  # incarnation of that front
    message: Heartbeat | Announce | BoxReport | None
    host: str = ""  # that it came from


class AnnouncementAnswered(NamedTuple):
    """A box acknowledged our announcement of that serial number, or refused it."""

    node: str
    serial: int
    refusal: str = ""
    welcome: Welcome = Welcome()


class PeersListChanged(NamedTuple):
    """This box's list of peers was read again."""

    peers: Mapping[str, Peer]


class RosterAgreed(NamedTuple):
    """The voters have agreed on other members."""

    roster: Roster


class AnnouncementChanged(NamedTuple):
    """This box has something else to announce."""

    announcement: Announce


class PeerFoundLying(NamedTuple):
    """This box's engine has found a box's answers to expert calls wrong."""

    node: str
    why: str


class TimerFired(NamedTuple):
    """Time has passed: boxes may have disappeared."""


Event = (
    ConnectionOpened
    | ConnectionLost
    | PeerFoundIncompatible
    | MessageReceived
    | AnnouncementAnswered
    | PeersListChanged
    | RosterAgreed
    | AnnouncementChanged
    | PeerFoundLying
    | TimerFired
)

# --- instructions ------------------------------------------------------------------------------------------------


class DeliverBeat(NamedTuple):
    """Pass a box's beat to this box's services."""

    node: str
    beat: Heartbeat


class CheckPlan(NamedTuple):
    """Compare the leader's plan with the plan held; it may be another one."""


class PublishMembers(NamedTuple):
    """Tell this box's services that members or their engines have changed."""


class RefuseMessage(NamedTuple):
    """Answer the received message with a refusal."""

    why: str


Instruction = AccessInstruction | DeliverBeat | CheckPlan | PublishMembers | RefuseMessage


class BoxMemory(NamedTuple):
    """The memory on disk: boxes learnt from others, voters, boxes found wrong, agreed members, etcd's starts, key."""

    words: KeptWords
    voters: Sequence[str]
    distrusted: DistrustedBoxes
    roster: KeptRoster
    runs: KeptRuns
    own_key: str = ""  # public


class ControlState:
    """The state of one box's control plane. Lives on one event loop."""

    def __init__(
        self,
        settings: ClusterSettings,
        peers: Mapping[str, Peer],
        announcement: Announce,
        plans: PlanStore,
        fence: EpochFence,
        clock: Callable[[], float],
        memory: BoxMemory | None = None,
    ) -> None:
        """Begins with `peers`, this box's list of peers, its first announcement, and the memory of earlier starts."""
        memory = memory or BoxMemory(KeptWords(), voters_of(peers), DistrustedBoxes(), KeptRoster(), KeptRuns())
        self.node, self.plans, self.fence, self.clock = settings.node, plans, fence, clock
        self.members = ClusterMembers(clock)
        self.incarnations = Incarnations(settings.node, self.members, clock)
        self._runs = memory.runs
        self._rules = rules = ElectionRules(settings, memory.voters)
        self._kept_roster = memory.roster
        if memory.roster.roster is not None:
            rules.follow(memory.roster.roster)
        self.leader_tracker = LeaderTracker(fence, rules)
        self._followed = ""  # the leader by whose word boxes were last cut off
        self._distrusted, self._own_key = memory.distrusted, memory.own_key
        self.announcement = msgspec.structs.replace(
            announcement, agreement=rules.words, accuses=memory.distrusted.found, roster=memory.roster.roster
        )
        self.model = announcement.engine.model if announcement.engine else ""  # digest; of the last engine, once gone
        self.serial = 1  # of the announcement
        self._admission = Admission(settings, peers, rules, self.members, memory.words, memory.roster)
        self._instructions: list[Instruction] = []
        self._say = RateLimitedLog(log)

    def start(self) -> list[Instruction]:
        """Lets in the boxes on the list of peers. Returns instructions."""
        self._update_members()
        return self._take_instructions()

    def handle(self, event: Event) -> list[Instruction]:
        """Updates the state. Returns instructions, in order.

        Raises ConfigError for a box that announces an impossible address.
        """
        match event:
            case MessageReceived():
                self._on_message(event)
            case ConnectionOpened(node) if node in self.members:
                member = self.members[node]
                member.up, member.acknowledged, member.answering = True, 0, ""
                self._instructions.append(CheckPlan())
            case ConnectionLost(node) if node in self.members:
                member = self.members[node]
                member.up, member.answering, member.prefers = False, "", ""
                self._update_presence()
            case PeerFoundIncompatible(node, why):
                if node in self.members:
                    self._reject(self.members[node], why)
            case AnnouncementAnswered(node) if node in self.members:
                self._on_answer(self.members[node], event)
            case PeersListChanged(peers):
                self._admission.in_file = dict(peers)
                self._update_members()
                self._instructions.append(PublishMembers())
            case RosterAgreed(roster):
                self._follow_roster(roster)
            case AnnouncementChanged(announcement):
                self._change_announcement(announcement)
            case PeerFoundLying(node, why) if node in self.members:
                self._on_lie(self.members[node], why)
            case TimerFired():
                self._update_presence()
                self._update_incarnations()
                self._announce_cuts()
            case _:
                log.debug("event of a box that is no longer listed", extra={"node": event.node})
        if self.leader_tracker.leader != self._followed:  # its cuts may have been announced before it led here
            self._followed = self.leader_tracker.leader
            self._reject_distrusted()
        return self._take_instructions()

    @property
    def voters(self) -> list[str]:
        """The nodes that vote."""
        return self._rules.voters

    @property
    def roster(self) -> Roster | None:
        """The agreed members; None while boxes go by lists in files."""
        return self._kept_roster.roster

    @property
    def is_removed(self) -> bool:
        """Whether this box does not belong to the cluster any more."""
        return self.roster is not None and self.roster.find(self.node) is None

    def announcement_with(self, roster: Roster) -> Announce:
        """Returns this box's announcement as it will be with these members."""
        return msgspec.structs.replace(self.announcement, roster=roster)

    def unacknowledged(self) -> list[Member]:
        """Returns the boxes that can be reached and have not acknowledged our latest announcement."""
        return [member for member in self.members if member.up and member.acknowledged != self.serial]

    def serving(self) -> ChannelDescription | None:
        """Returns an engine that serves the cluster's model: this box's, or another's while this one has none."""
        announced = self.announcements().values()
        return next((each.engine for each in announced if each is not None and each.engine), None)

    def announcements(self) -> dict[str, Announce | None]:
        """Returns the announcement of each box that can take part, this one included."""
        others = {member.peer.node: member.announcement for member in self.members if member.can_take_part}
        return {self.node: self.announcement} | others

    def absent_s(self, node: str) -> float:
        """Returns the time for which a box has not been present; 0 for this box and for unknown ones."""
        return self.members.absent_s(node) if node in self.members else 0.0

    def _take_instructions(self) -> list[Instruction]:
        instructions, self._instructions = self._instructions, []
        return instructions

    # --- messages ---------------------------------------------------------------------------------------------

    def _on_message(self, received: MessageReceived) -> None:
        member = self.members[received.node]
        announced = received.message.address if isinstance(received.message, Announce) else ""
        if not self.incarnations.admit(member, received.boot, received.host, announced):
            self._instructions.append(RefuseMessage(f"another box of that name is followed, at {member.address}"))
            return
        if member.boot != received.boot:
            member.boot, member.acknowledged = received.boot, 0
        match received.message:
            case Heartbeat() as beat:
                self._on_beat(member, beat)
            case Announce() as announcement:
                self._on_announcement(member, announcement)
            case BoxReport() as report:
                member.report = report

    def _on_beat(self, member: Member, beat: Heartbeat) -> None:
        node, before = member.peer.node, member.beat
        member.heard_s, member.beat = self.clock(), beat
        self._instructions.append(DeliverBeat(node, beat))
        if beat.leading != before.leading or beat.plan_digest != before.plan_digest:
            self._instructions.append(CheckPlan())
        if beat.engine != before.engine:
            self._instructions.append(PublishMembers())
        if beat.unmet:
            member.acknowledged = 0
        if not member.is_present:
            self._update_presence()
        if why := self.leader_tracker.on_beat(member, before):
            self._reject(member, why)

    def _on_announcement(self, member: Member, announcement: Announce) -> None:
        """Accepts or rejects a box by its announcement; a box that serves another model is rejected."""
        before = member.refusal
        if announcement.roster is not None and self._accepts_roster(member, announcement.roster):
            self._follow_roster(announcement.roster)
            if member.peer.node not in self.members:
                return
        if announcement.etcd is not None and announcement.etcd.run is not None:
            self._runs.keep(member.peer.node, announcement.etcd.run)
        members_change, instructions = self._admission.on_announcement(member, announcement)
        self._instructions += instructions
        why = self._distrust_reason(member) or self._admission.reject_reason(
            member.peer.node, announcement, self.model, release=self.announcement.release
        )
        self.members.move(member, MembershipTrigger.REJECTED if why else MembershipTrigger.ACCEPTED, why)
        if why and why != before:
            self._say(logging.ERROR, "a box cannot take part", member.peer.node, why=why)
        if members_change:
            self._update_members()
        self._reject_distrusted()
        self._instructions.append(PublishMembers())
        if why:
            self._instructions.append(RefuseMessage(why))

    def _on_answer(self, member: Member, answer: AnnouncementAnswered) -> None:
        welcome = answer.welcome
        member.answering, member.prefers = welcome.boot or member.answering, welcome.prefers
        if welcome.prefers:
            return  # it is asked again, because the other box may go
        member.acknowledged, member.remembers = answer.serial, welcome.remembers
        if answer.refusal and member.refusal != answer.refusal:
            self._say(logging.ERROR, "a box refuses us", member.peer.node, why=answer.refusal)
            self._reject(member, answer.refusal)

    # --- boxes of one name and key ----------------------------------------------------------------------------

    def welcome(self, node: str, boot: str, host: str, announced: str, own_boot: str) -> Welcome:
        """Returns the answer to an announcement, before that is handled. Raises PeerBusy for a doubtful one."""
        member = self.members[node]
        if self.incarnations.admit(member, boot, host, announced):
            return Welcome(own_boot, "", self._runs.of(node))
        if not self.incarnations.is_sure(node):
            raise PeerBusy(f"an earlier start of {node} is connected still")
        return Welcome(own_boot, member.address)

    def _update_incarnations(self) -> None:
        """Forgets second boxes that are gone; announces the ones that are there."""
        self.incarnations.update()
        self.incarnations.why_self()
        self._change_announcement(msgspec.structs.replace(self.announcement, doubles=self.incarnations.doubles()))

    # --- boxes that answer wrongly ----------------------------------------------------------------------------

    def suspected(self) -> tuple[str, ...]:
        """Returns the boxes that another box has found wrong, and that still take part."""
        return tuple(sorted(each.peer.node for each in self.members if each.can_take_part and self._is_accused(each)))

    def _is_accused(self, member: Member) -> bool:
        return bool(self._accusers(member.peer.keys, member.peer.node))

    def why_cut_off(self) -> str:
        """Returns why the others cut this box off: two of them have found its answers wrong. "" if they do not."""
        return reason_by_word(self.node, self._accusers([self._own_key], self.node))

    def refusal_to_cut(self, node: str) -> str:
        """Returns why no question of the box is answered, because it is cut off; "" if it is not."""
        member = self.members[node]
        if not (why := self._distrust_reason(member)):
            return ""
        return f"{why}. Remove {node} from the cluster, and let it in again with another key"

    def cut_voters(self) -> list[str]:
        """Returns the voters that this box has cut off."""
        return [node for node in self.voters if node in self.members and self._distrust_reason(self.members[node])]

    def _on_lie(self, member: Member, why: str) -> None:
        self._distrusted.add(member.peer.node, member.peer.keys, why)
        self._reject_distrusted()
        self._change_announcement(msgspec.structs.replace(self.announcement, accuses=self._distrusted.found))

    def _reject_distrusted(self) -> None:
        for member in self.members:
            if why := self._distrust_reason(member):
                self._reject(member, why)
        self._announce_cuts()

    def _announce_cuts(self) -> None:
        """Tells all other boxes, as their leader, which boxes are cut off by this one's finding or that of two."""
        leads = self.leader_tracker.leader == self.node
        found = [(member.peer, self._own_reason(member)) for member in self.members] if leads else []
        cuts = tuple(Accusation(peer.node, key, why) for peer, why in found if why for key in peer.keys)[:MAX_NODES]
        self._change_announcement(msgspec.structs.replace(self.announcement, cuts=cuts))

    def _distrust_reason(self, member: Member) -> str:
        """Returns why a box is cut off, by this box's finding or that of others; "" if it is not."""
        return self._own_reason(member) or self._leader_reason(member)

    def _own_reason(self, member: Member) -> str:
        own = self._distrusted.reason(member.peer.keys)
        return own or reason_by_word(member.peer.node, self._accusers(member.peer.keys, member.peer.node))

    def _leader_reason(self, member: Member) -> str:
        leader = self.leader_tracker.leader
        if leader in ("", self.node, member.peer.node) or leader not in self.members:
            return ""
        said = self.members[leader]
        if said.announcement is None or not said.can_take_part or not self._admission.is_listed(said):
            return ""
        return reason_by_leader(leader, member.peer.keys, said.announcement.cuts)

    def _accusers(self, keys: Sequence[str], accused: str) -> dict[str, Accusation]:
        """Returns the boxes on this box's list that have found the box `accused` with these keys wrong."""
        words = [
            (each.peer.node, each.announcement.accuses)
            for each in self.members
            if each.announcement is not None and each.can_take_part and self._admission.is_listed(each)
        ]
        return accusers(keys, [word for word in words if word[0] != accused])

    # --- members ----------------------------------------------------------------------------------------------

    def _reject(self, member: Member, why: str) -> None:
        if member.refusal != why:
            self.members.move(member, MembershipTrigger.REJECTED, why)
            self._instructions.append(PublishMembers())

    def _update_presence(self) -> None:
        """Notices boxes that have appeared or disappeared."""
        for node in self.members.update_presence():
            present = self.members[node].is_present
            self._say(logging.INFO, "box is here" if present else "box is gone", node)
            if not present:
                self.leader_tracker.unfollow(node)
            self._instructions.append(PublishMembers())

    def _update_members(self) -> None:
        """Admits and strikes boxes; announces this box's list again if it has changed."""
        struck, instructions = self._admission.update_members()
        self._instructions += instructions
        for node in struck:
            self.leader_tracker.unfollow(node)
        self._reject_distrusted()
        listed = self._admission.list_to_announce()
        self._change_announcement(msgspec.structs.replace(self.announcement, listed=listed))

    def _accepts_roster(self, member: Member, roster: Roster) -> bool:
        """Whether to follow the members that a box announces: a voter's word, of this cluster, newer than the own.

        Without agreed members, the word counts of a box that may lead, or by which this one joined.
        """
        node, held = member.peer.node, self.roster
        if roster.fault() or self.is_removed:
            return False
        if held is not None and held.cluster == roster.former:  # recovered, for boxes whose voters are lost
            is_lost = not self.leader_tracker.leader and roster.find(self.node) is not None
            return is_lost and held.find(node) is not None and node in roster.voters
        if held is not None:
            return roster.cluster == held.cluster and roster.version > held.version and node in held.voters
        entitled = self._rules.is_entitled(node) and self._admission.is_listed(member)
        return entitled and node in roster.voters and roster.find(self.node) is not None

    def _follow_roster(self, roster: Roster) -> None:
        """Goes by these members from now on, also after a restart."""
        log.info("the members have changed", extra={"version": roster.version, "boxes": len(roster.boxes)})
        self._kept_roster.keep(roster)
        self._rules.follow(roster)
        self._change_announcement(
            msgspec.structs.replace(self.announcement, agreement=self._rules.words, roster=roster)
        )
        if self.is_removed:
            log.error("this box has been removed from the cluster, and goes on alone")
        self._update_members()
        self._instructions.append(PublishMembers())

    def _change_announcement(self, announcement: Announce) -> None:
        if announcement != self.announcement:
            self.announcement = announcement
            self.model = announcement.engine.model if announcement.engine else self.model
            self.serial += 1
            self._instructions.append(CheckPlan())
