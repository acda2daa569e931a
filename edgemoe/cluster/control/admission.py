"""Lets in whoever is listed or vouched for (`membership.let_in`), cuts off who no longer is, says who may take part."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from edgemoe.cluster.control.announcer import Announcer
from edgemoe.cluster.control.coordination.fingerprint import Agreement
from edgemoe.cluster.control.members import Member, Members
from edgemoe.cluster.control.membership import let_in, same_box, with_addresses
from edgemoe.cluster.rpc.auth import AllowList
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.control_messages import Announce, ControlMessage
from edgemoe.cluster.rpc.keys import Peer, check_peer
from edgemoe.cluster.rpc.sparing_log import SparingLog
from edgemoe.config.settings import ClusterSettings

log = logging.getLogger(__name__)
VOUCHED_S = 3600.0  # for which the word of a box that is gone still lets others in


class Admission:
    """Keeps members, keys and connections by this box's list, `listed`, and by what the boxes on it list."""

    def __init__(
        self,
        settings: ClusterSettings,
        listed: Mapping[str, Peer],
        agreement: Agreement,
        members: Members,
        channel: Channel[ControlMessage],
        allowed: AllowList,
    ) -> None:
        self.listed = dict(listed)
        self._node, self._joining = settings.node, bool(settings.join)
        self._agreement, self._members = agreement, members
        self._channel, self._allowed = channel, allowed
        self._lapsed: frozenset[str] = frozenset()
        self._say = SparingLog(log)

    def renew(self) -> list[str]:
        """Has all be as listed and vouched for now; who was sent away."""
        members = self._members
        self._lapsed = self._lapsed_vouchers()
        vouched = [
            (m.peer.node, m.card.listed) for m in members if m.card is not None and m.peer.node not in self._lapsed
        ]
        wanted = let_in(self._node, self.listed, vouched, joining=self._joining)
        gone = [m.peer.node for m in members if not same_box(wanted.get(m.peer.node), m.peer)]
        for node in gone:
            self._say(logging.INFO, "box is no longer listed as it was", node)
            self._allowed.revoke(node)
            self._channel.disconnect(node)
            members.remove(node)
        for node, peer in wanted.items():
            if node not in members:
                members.add(peer)
            elif members[node].peer == peer:
                continue
            member = members[node]
            member.peer = peer
            self._allowed.allow(node, *peer.keys)
            if address := peer.address or (member.card.address if member.card else ""):
                self._channel.connect(msgspec.structs.replace(peer, address=address))
        return gone

    def is_due(self) -> bool:
        """Returns whether another box's word has come to count, or no longer does."""
        return self._lapsed_vouchers() != self._lapsed

    def announced_list(self) -> tuple[Peer, ...]:
        """This box's list, as the others are to hear it."""
        announced = {m.peer.node: m.card.address for m in self._members if m.card is not None}
        return with_addresses(self.listed, announced)

    def meet(self, member: Member, card: Announce) -> bool:
        """Takes note of what a box says of itself; whether others may be let in by it.

        Raises ConfigError for an address that cannot be one.
        """
        before = member.card
        if not member.peer.address and card.address != (before.address if before else ""):
            with_address = msgspec.structs.replace(member.peer, address=card.address)
            check_peer(with_address, f"what {member.peer.node} says of itself")
            self._channel.connect(with_address)
        member.card, member.card_boot, member.refused = card, member.boot, ""
        if member.peer.node in self.listed:
            self._agreement.follow(card.agreement)
        return card.listed != (before.listed if before else ()) or not member.peer.address

    def objection(self, node: str, card: Announce, own: Announcer) -> str:
        """Returns why that box cannot take part, by what it says of itself; "" where it can."""
        theirs = card.engine.model if card.engine else ""
        if why := self._agreement.objection(node, card.agreement):
            return why
        if not own.model or not theirs or own.model == theirs:
            return ""
        return (
            f"{node} (release {card.release}) serves model {theirs[:12]}, {self._node} (release "
            f"{own.card.release}) {own.model[:12]}; serve the same packed store on both"
        )

    def _lapsed_vouchers(self) -> frozenset[str]:
        """Who has been gone for so long that its word for others counts no more; who joined by it keeps to it."""
        if self._joining:
            return frozenset()
        members = self._members
        return frozenset(m.peer.node for m in members if m.card and members.absent_s(m.peer.node) > VOUCHED_S)
