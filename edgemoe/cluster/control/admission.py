"""Decides which boxes are let in: every box on this box's list of peers, and every box that a listed box vouches for.

A box that joins is listed, without a vote, on one box of the cluster; the others accept it on that box's word. The box
that joins lists one box, its seed, and accepts all others on the seed's word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from edgemoe.cluster.control.coordination.election_rules import ElectionRules
from edgemoe.cluster.control.membership import ClusterMembers, Member
from edgemoe.cluster.control.messages import Announce
from edgemoe.cluster.rpc.keys import Peer, check_peer
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)
VOUCHED_S = 3600.0  # for which an absent box's word still lets others in


class AllowKeys(NamedTuple):
    """Accept these keys of the box, and no others of it."""

    node: str
    keys: tuple[str, ...]


class RevokeKeys(NamedTuple):
    """Accept none of the box's keys, and cut its connections."""

    node: str


class ConnectPeer(NamedTuple):
    """Connect to the box at the address given."""

    peer: Peer


class DisconnectPeer(NamedTuple):
    """End our connection to the box."""

    node: str


AccessInstruction = AllowKeys | RevokeKeys | ConnectPeer | DisconnectPeer


class Admission:
    """Admits and strikes boxes, by this box's list `listed` and the lists that the listed boxes announce."""

    def __init__(
        self, settings: ClusterSettings, listed: Mapping[str, Peer], rules: ElectionRules, members: ClusterMembers
    ) -> None:
        self.listed = dict(listed)
        self._node, self._joining = settings.node, bool(settings.join)
        self._rules, self._members = rules, members
        self._lapsed: frozenset[str] = frozenset()
        self._say = RateLimitedLog(log)

    def update_members(self) -> tuple[list[str], list[AccessInstruction]]:
        """Strikes and admits boxes as the lists of this moment say. Returns the struck nodes, and instructions."""
        members, instructions = self._members, list[AccessInstruction]()
        self._lapsed = self._lapsed_vouchers()
        vouched = [
            (m.peer.node, m.announcement.listed)
            for m in members
            if m.announcement is not None and m.peer.node not in self._lapsed
        ]
        wanted = select_peers(self._node, self.listed, vouched, joining=self._joining)
        struck = [m.peer.node for m in members if not is_same_box(wanted.get(m.peer.node), m.peer)]
        for node in struck:
            self._say(logging.INFO, "box is no longer listed as it was", node)
            instructions += [RevokeKeys(node), DisconnectPeer(node)]
            members.strike(node)
        for node, peer in wanted.items():
            if node not in members:
                members.admit(peer)
            elif members[node].peer == peer:
                continue
            members[node].peer = peer
            instructions.append(AllowKeys(node, peer.keys))
            if address := members[node].address:
                instructions.append(ConnectPeer(msgspec.structs.replace(peer, address=address)))
        return struck, instructions

    def is_due(self) -> bool:
        """Whether a voucher's word has lapsed, or counts again, since the last update."""
        return self._lapsed_vouchers() != self._lapsed

    def list_to_announce(self) -> tuple[Peer, ...]:
        """Returns this box's list of peers, with the addresses that the boxes announced where it has none."""
        announced = {m.peer.node: m.announcement.address for m in self._members if m.announcement is not None}
        return fill_addresses(self.listed, announced)

    def on_announcement(self, member: Member, announcement: Announce) -> tuple[bool, list[AccessInstruction]]:
        """Stores a box's announcement. Returns whether the members must be updated, and instructions.

        Raises ConfigError for an impossible address.
        """
        before, instructions = member.announcement, list[AccessInstruction]()
        if not member.peer.address and announcement.address != (before.address if before else ""):
            with_address = msgspec.structs.replace(member.peer, address=announcement.address)
            check_peer(with_address, f"the announcement of {member.peer.node}")
            instructions.append(ConnectPeer(with_address))
        member.announcement, member.announced_boot = announcement, member.boot
        if member.peer.node in self.listed:
            self._rules.adopt(announcement.agreement)
        lists_differ = announcement.listed != (before.listed if before else ())
        return lists_differ or not member.peer.address, instructions

    def reject_reason(self, node: str, announcement: Announce, model: str, release: str) -> str:
        """Returns why a box that announces this cannot take part; "" if it can.

        `model` is the digest of the model served here, by this `release`.
        """
        theirs = announcement.engine.model if announcement.engine else ""
        if why := self._rules.reject_reason(node, announcement.agreement):
            return why
        if not model or not theirs or model == theirs:
            return ""
        return (
            f"{node} (release {announcement.release}) serves model {theirs[:12]}, {self._node} (release "
            f"{release}) {model[:12]}; serve the same packed store on both"
        )

    def _lapsed_vouchers(self) -> frozenset[str]:
        """Returns the boxes absent for too long to vouch for others; a box that joins lets no word lapse."""
        if self._joining:
            return frozenset()
        members = self._members
        return frozenset(m.peer.node for m in members if m.announcement and members.absent_s(m.peer.node) > VOUCHED_S)


def select_peers(
    own: str, listed: Mapping[str, Peer], vouched: Iterable[tuple[str, tuple[Peer, ...]]], joining: bool
) -> dict[str, Peer]:
    """Returns the other boxes to let in, by node. `vouched` are the lists of other boxes; only listed boxes count."""
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
    """Whether two entries of the list mean one box: its address may change, and one of its two keys."""
    if now is None or set(now.keys).isdisjoint(before.keys):
        return False
    return now == msgspec.structs.replace(before, address=now.address, key=now.key, new_key=now.new_key)


def fill_addresses(listed: Mapping[str, Peer], announced: Mapping[str, str]) -> tuple[Peer, ...]:
    """Returns the list with the announced address of each box that it has no address of."""
    return tuple(
        peer if peer.address else msgspec.structs.replace(peer, address=announced.get(node, ""))
        for node, peer in listed.items()
    )


def read_join(text: str) -> Peer:
    """Returns the seed, the box to join, from "NODE,HOST:PORT,KEY". Raises ConfigError."""
    parts = text.split(",")
    if len(parts) != 3:
        raise ConfigError(
            f"cluster.join is {text!r}; write NODE,HOST:PORT,KEY of a box of the cluster, as its `edgemoe keygen` "
            "printed it"
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
