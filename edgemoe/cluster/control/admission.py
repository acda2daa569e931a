"""Decides which boxes are let in: those in this box's list of peers, and those that a listed box vouches for.

A box that joins is listed, without a vote, on one box of the cluster; the others accept it on that box's word. The box
that joins lists one box, its seed, and accepts all others on the seed's word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from edgemoe.cluster.control.coordination.election_rules import ElectionRules
from edgemoe.cluster.control.membership import Member, Members
from edgemoe.cluster.control.messages import Announce
from edgemoe.cluster.rpc.keys import Peer, check_peer
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)
VOUCHED_S = 3600.0  # for which the word of a box that is gone still lets others in


class AllowKeys(NamedTuple):
    """These keys, and no others of that box, are let in."""

    node: str
    keys: tuple[str, ...]


class RevokeKeys(NamedTuple):
    """None of that box's keys is let in."""

    node: str


class ConnectPeer(NamedTuple):
    peer: Peer


class DisconnectPeer(NamedTuple):
    node: str


AccessInstruction = AllowKeys | RevokeKeys | ConnectPeer | DisconnectPeer


class Admission:
    """Keeps members by this box's list, `listed`, and by what the boxes on it list."""

    def __init__(
        self, settings: ClusterSettings, listed: Mapping[str, Peer], agreement: ElectionRules, members: Members
    ) -> None:
        self.listed = dict(listed)
        self._node, self._joining = settings.node, bool(settings.join)
        self._agreement, self._members = agreement, members
        self._lapsed: frozenset[str] = frozenset()
        self._say = RateLimitedLog(log)

    def renew(self) -> tuple[list[str], list[AccessInstruction]]:
        """Has all be as listed and vouched for now. Returns who was sent away, and what is to be done."""
        members, actions = self._members, list[AccessInstruction]()
        self._lapsed = self._lapsed_vouchers()
        vouched = [
            (m.peer.node, m.card.listed) for m in members if m.card is not None and m.peer.node not in self._lapsed
        ]
        wanted = select_peers(self._node, self.listed, vouched, joining=self._joining)
        gone = [m.peer.node for m in members if not is_same_box(wanted.get(m.peer.node), m.peer)]
        for node in gone:
            self._say(logging.INFO, "box is no longer listed as it was", node)
            actions += [RevokeKeys(node), DisconnectPeer(node)]
            members.remove(node)
        for node, peer in wanted.items():
            if node not in members:
                members.add(peer)
            elif members[node].peer == peer:
                continue
            member = members[node]
            member.peer = peer
            actions.append(AllowKeys(node, peer.keys))
            if address := peer.address or (member.card.address if member.card else ""):
                actions.append(ConnectPeer(msgspec.structs.replace(peer, address=address)))
        return gone, actions

    def is_due(self) -> bool:
        """Returns whether another box's word has come to count, or no longer does."""
        return self._lapsed_vouchers() != self._lapsed

    def announced_list(self) -> tuple[Peer, ...]:
        """This box's list, as the others are to hear it."""
        announced = {m.peer.node: m.card.address for m in self._members if m.card is not None}
        return fill_addresses(self.listed, announced)

    def meet(self, member: Member, card: Announce) -> tuple[bool, list[AccessInstruction]]:
        """Takes note of what a box says of itself. Returns whether others may be let in by it, and what is to be done.

        Raises ConfigError for an address that cannot be one.
        """
        before, actions = member.card, list[AccessInstruction]()
        if not member.peer.address and card.address != (before.address if before else ""):
            with_address = msgspec.structs.replace(member.peer, address=card.address)
            check_peer(with_address, f"what {member.peer.node} says of itself")
            actions.append(ConnectPeer(with_address))
        member.card, member.card_boot, member.refused = card, member.boot, ""
        if member.peer.node in self.listed:
            self._agreement.follow(card.agreement)
        return card.listed != (before.listed if before else ()) or not member.peer.address, actions

    def reject_reason(self, node: str, card: Announce, model: str, release: str) -> str:
        """Returns why that box cannot take part, by what it says of itself; "" where it can.

        `model` is the digest of the one served here, by that `release`.
        """
        theirs = card.engine.model if card.engine else ""
        if why := self._agreement.reject_reason(node, card.agreement):
            return why
        if not model or not theirs or model == theirs:
            return ""
        return (
            f"{node} (release {card.release}) serves model {theirs[:12]}, {self._node} (release "
            f"{release}) {model[:12]}; serve the same packed store on both"
        )

    def _lapsed_vouchers(self) -> frozenset[str]:
        """Who has been gone for so long that its word for others counts no more; who joined by it keeps to it."""
        if self._joining:
            return frozenset()
        members = self._members
        return frozenset(m.peer.node for m in members if m.card and members.absent_s(m.peer.node) > VOUCHED_S)


def select_peers(
    own: str, listed: Mapping[str, Peer], vouched: Iterable[tuple[str, tuple[Peer, ...]]], joining: bool
) -> dict[str, Peer]:
    """Other boxes by node. `vouched` is what boxes list; only the word of those that this one lists counts."""
    found = {node: peer for node, peer in listed.items() if node != own}
    keys = {key for peer in listed.values() for key in peer.keys}
    for voucher, peers in vouched:
        for peer in peers if voucher in listed else ():
            welcome = (joining or not peer.voter) and peer.node not in found and keys.isdisjoint(peer.keys)
            if welcome and peer.node != own and peer.address and len(found) < MAX_NODES - 1 and _is_sound(peer):
                found[peer.node] = peer
                keys.update(peer.keys)
    return found


def is_same_box(now: Peer | None, before: Peer) -> bool:
    """Returns whether it is listed as before, but perhaps elsewhere, or with another key beside one that it had."""
    if now is None or set(now.keys).isdisjoint(before.keys):
        return False
    return now == msgspec.structs.replace(before, address=now.address, key=now.key, new_key=now.new_key)


def fill_addresses(listed: Mapping[str, Peer], announced: Mapping[str, str]) -> tuple[Peer, ...]:
    """Returns the list to be announced: addresses that it leaves open, as the boxes said them themselves."""
    return tuple(
        peer if peer.address else msgspec.structs.replace(peer, address=announced.get(node, ""))
        for node, peer in listed.items()
    )


def read_join(text: str) -> Peer:
    """Returns the box to join from "NODE,HOST:PORT,KEY". Raises ConfigError."""
    parts = text.split(",")
    if len(parts) != 3:
        raise ConfigError(
            f"cluster.join is {text!r}; write NODE,HOST:PORT,KEY of a box of the cluster, as its `edgemoe keygen` "
            "printed it: nothing is said to a box whose key is not known"
        )
    peer = Peer(parts[0], parts[1], parts[2])
    check_peer(peer, "cluster.join")
    return peer


def _is_sound(peer: Peer) -> bool:
    try:
        check_peer(peer, "")
    except ConfigError:
        return False
    return True
