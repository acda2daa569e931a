"""The other boxes as this box sees them: one state machine for each, in the table `TRANSITIONS`.

`control_state` turns events into triggers and returns the instructions. docs/design/membership.md tells the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from edgemoe.cluster.control.messages import Announce, BoxReport, EtcdRun, Heartbeat
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.ipc.messages import PeerEngine

BEAT_S = 0.4  # between two beats of a box
DEAD_S = 1.6  # without a beat, after which a box counts as absent


class BoxState(Enum):
    """The state of another box, seen from this one."""

    UNKNOWN = "unknown"  # not let in: none of its keys is accepted, and it has no `Member`
    EXPECTED = "expected"  # let in; neither alive nor ever announced
    JOINING = "joining"  # alive; its announcement has not arrived yet
    MEMBER = "member"  # alive, announced and able to take part
    ABSENT = "absent"  # announced and able to take part, but not alive
    REFUSED = "refused"  # alive, but unable to take part
    REFUSED_ABSENT = "refused and absent"


class MembershipTrigger(Enum):
    """An occurrence that moves a box from state to state."""

    ADMITTED = "admitted"  # by this box's list of peers, or by a listed box that vouches for it
    STRUCK = "struck"  # from the lists, or listed with other keys
    APPEARED = "appeared"  # beats arrive on a connection that works both ways
    DISAPPEARED = "disappeared"  # the connection broke, or no beat came for DEAD_S
    ACCEPTED = "accepted"  # its announcement fits this cluster
    REJECTED = "rejected"  # its announcement does not fit, its messages are unreadable, or it rejected ours


TRANSITIONS: Mapping[BoxState, Mapping[MembershipTrigger, BoxState]] = {
    BoxState.UNKNOWN: {
        MembershipTrigger.ADMITTED: BoxState.EXPECTED,
    },
    BoxState.EXPECTED: {
        MembershipTrigger.APPEARED: BoxState.JOINING,
        MembershipTrigger.ACCEPTED: BoxState.ABSENT,
        MembershipTrigger.REJECTED: BoxState.REFUSED_ABSENT,
        MembershipTrigger.STRUCK: BoxState.UNKNOWN,
    },
    BoxState.JOINING: {
        MembershipTrigger.DISAPPEARED: BoxState.EXPECTED,
        MembershipTrigger.ACCEPTED: BoxState.MEMBER,
        MembershipTrigger.REJECTED: BoxState.REFUSED,
        MembershipTrigger.STRUCK: BoxState.UNKNOWN,
    },
    BoxState.MEMBER: {
        MembershipTrigger.DISAPPEARED: BoxState.ABSENT,
        MembershipTrigger.ACCEPTED: BoxState.MEMBER,
        MembershipTrigger.REJECTED: BoxState.REFUSED,
        MembershipTrigger.STRUCK: BoxState.UNKNOWN,
    },
    BoxState.ABSENT: {
        MembershipTrigger.APPEARED: BoxState.MEMBER,
        MembershipTrigger.ACCEPTED: BoxState.ABSENT,
        MembershipTrigger.REJECTED: BoxState.REFUSED_ABSENT,
        MembershipTrigger.STRUCK: BoxState.UNKNOWN,
    },
    BoxState.REFUSED: {
        MembershipTrigger.DISAPPEARED: BoxState.REFUSED_ABSENT,
        MembershipTrigger.ACCEPTED: BoxState.MEMBER,
        MembershipTrigger.REJECTED: BoxState.REFUSED,
        MembershipTrigger.STRUCK: BoxState.UNKNOWN,
    },
    BoxState.REFUSED_ABSENT: {
        MembershipTrigger.APPEARED: BoxState.REFUSED,
        MembershipTrigger.ACCEPTED: BoxState.ABSENT,
        MembershipTrigger.REJECTED: BoxState.REFUSED_ABSENT,
        MembershipTrigger.STRUCK: BoxState.UNKNOWN,
    },
}
PRESENT = {BoxState.JOINING, BoxState.MEMBER, BoxState.REFUSED}
CANNOT_TAKE_PART = {BoxState.REFUSED, BoxState.REFUSED_ABSENT}


@dataclass(slots=True)
class Member:
    """Another box that is let in: its state, and the last of each message that it sent."""

    peer: Peer
    state: BoxState
    absent_since_s: float  # while it is not present
    boot: str = ""  # incarnation of its front that sent the last message
    up: bool = False  # whether our connection to it works
    heard_s: float = float("-inf")  # time of its last beat
    beat: Heartbeat = field(default_factory=Heartbeat)
    announcement: Announce | None = None
    announced_boot: str = ""  # incarnation that sent the announcement
    report: BoxReport | None = None  # sent to the leader only
    acknowledged: int = 0  # serial number of our announcement that it has acknowledged
    refusal: str = ""  # why it cannot take part
    answering: str = ""  # incarnation that answers on our connection; "" until it has
    prefers: str = ""  # address of another box that it follows in place of this one
    remembers: EtcdRun | None = None  # the last start of this box's etcd that it has heard of

    @property
    def is_present(self) -> bool:
        """Whether `ClusterMembers.update_presence` last found the box alive."""
        return self.state in PRESENT

    @property
    def was_heard(self) -> bool:
        """Whether a beat of the box has ever come."""
        return self.heard_s > float("-inf")

    @property
    def can_take_part(self) -> bool:
        """Whether nothing is known that keeps the box out of the cluster's work."""
        return self.state not in CANNOT_TAKE_PART

    @property
    def address(self) -> str:
        """HOST:PORT of its control channel, listed or announced; "" while unknown."""
        return self.peer.address or (self.announcement.address if self.announcement else "")


class ClusterMembers:
    """The other boxes that are let in, by node name. Lives on one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}

    def __getitem__(self, node: str) -> Member:
        return self._members[node]

    def __contains__(self, node: object) -> bool:
        return node in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    # --- transitions ------------------------------------------------------------------------------------------

    def admit(self, peer: Peer) -> None:
        """Adds a box that is let in."""
        state = TRANSITIONS[BoxState.UNKNOWN][MembershipTrigger.ADMITTED]
        self._members[peer.node] = Member(peer, state, absent_since_s=self._clock())

    def strike(self, node: str) -> None:
        """Forgets a box and everything it said."""
        self.move(self._members.pop(node), MembershipTrigger.STRUCK)

    def move(self, member: Member, trigger: MembershipTrigger, refusal: str = "") -> None:
        """Moves a box as the table says; `refusal` is the reason of a rejection."""
        member.state = TRANSITIONS[member.state][trigger]
        if trigger is MembershipTrigger.DISAPPEARED:
            member.absent_since_s = self._clock()
        elif trigger in (MembershipTrigger.ACCEPTED, MembershipTrigger.REJECTED):
            member.refusal = refusal

    def update_presence(self) -> list[str]:
        """Moves the boxes that have appeared or disappeared since the last call; returns their names."""
        changed = [member for member in self if self.is_alive(member.peer.node) != member.is_present]
        for member in changed:
            self.move(member, MembershipTrigger.DISAPPEARED if member.is_present else MembershipTrigger.APPEARED)
        return [member.peer.node for member in changed]

    # --- questions --------------------------------------------------------------------------------------------

    def is_alive(self, node: str) -> bool:
        """Whether a beat came within the last DEAD_S, and our connection to the box works."""
        member = self._members[node]
        return member.up and self._clock() - member.heard_s < DEAD_S

    def alive(self) -> list[Member]:
        """Returns the boxes that are alive at this moment."""
        return [member for member in self if self.is_alive(member.peer.node)]

    def absent_s(self, node: str) -> float:
        """Returns the time for which the box has not been present; 0 while it is."""
        member = self._members[node]
        return 0.0 if member.is_present else max(0.0, self._clock() - member.absent_since_s)

    def serving(self, model: str) -> dict[str, str]:
        """Returns the other boxes' engines that take requests for the model of that digest: NODE:BOOT -> node."""
        found = {}
        for member in self:
            engine = member.announcement.engine if member.announcement and member.can_take_part else None
            takes = engine is not None and engine.model == model and engine.boot == member.beat.engine
            if takes and self.is_alive(member.peer.node):
                found[f"{member.peer.node}:{member.beat.engine}"] = member.peer.node
        return found

    def standing_still(self) -> list[str]:
        """Returns the other boxes' engines that have said nothing to their fronts for a while, as NODE:BOOT."""
        return [f"{member.peer.node}:{member.beat.engine}" for member in self if member.beat.still]

    def keys(self) -> dict[str, tuple[str, ...]]:
        """Returns the public keys of the boxes that can take part."""
        return {member.peer.node: member.peer.keys for member in self if member.can_take_part}

    def trusted(self) -> tuple[str, ...]:
        """Returns the boxes that this box's list calls trusted, and that can take part."""
        return tuple(sorted(member.peer.node for member in self if member.peer.trusted and member.can_take_part))

    def engines(self) -> tuple[PeerEngine, ...]:
        """Returns the engines that compute for others: addresses, and whether their fronts are present.

        The answer changes only when `update_presence` moves a box. A caller that asks after each move misses none.
        """
        found = []
        for member in self:
            engine = member.announcement.engine if member.announcement and member.can_take_part else None
            if engine is not None and engine.shares and engine.boot:  # our engine rejects a list with an empty boot
                host = member.address.rpartition(":")[0]
                found.append(
                    PeerEngine(
                        node=member.peer.node,
                        boot=engine.boot,
                        calls=f"{host}:{engine.calls_port}",
                        bulk=f"{host}:{engine.bulk_port}",
                        heard=member.is_present,
                    )
                )
        return tuple(found)
