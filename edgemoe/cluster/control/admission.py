"""Decides which boxes are let in: every box on this box's list of peers, and every box that a vouching one lists.

A box that joins is listed, without a vote, on one box of the cluster. The others accept it on that box's word, if their
lists say so. The box that joins lists one box, its seed, and accepts all others on the seed's word.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from edgemoe.cluster.control.coordination.election_rules import ElectionRules
from edgemoe.cluster.control.membership import ClusterMembers, Member
from edgemoe.cluster.control.messages import Announce
from edgemoe.cluster.rpc.keys import Peer, check_peer
from edgemoe.cluster.rpc.roster import KeptRoster
from edgemoe.config.settings import ClusterSettings
from edgemoe.durable import read_plain, replace_file
from edgemoe.errors import ConfigError
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.bounds import MAX_NODES, Text

log = logging.getLogger(__name__)
KEPT_BOXES = "boxes"  # file in the state directory
MAX_WORDS_BYTES = 4 << 20
_Peers = Annotated[tuple[Peer, ...], Meta(max_length=MAX_NODES)]


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


class KeptWords:
    """The last list that each box announced, in memory and, given a path, on disk."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads the file; one that cannot be read counts as empty."""
        self._path, self.words = path, dict[str, tuple[Peer, ...]]()
        if path is None:
            return
        try:
            found = msgspec.json.decode(read_plain(path, MAX_WORDS_BYTES), type=dict[Text, _Peers])
            self.words = dict(list(found.items())[:MAX_NODES])  # their peers are checked before one is let in
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the boxes learnt from others are not used", extra={"file": str(path), "why": str(error)})

    def keep(self, words: Mapping[str, tuple[Peer, ...]]) -> None:
        """Replaces the words, even if the disk fails."""
        if words == self.words:
            return
        self.words = dict(words)
        if self._path is None:
            return
        try:
            replace_file(self._path, msgspec.json.encode(self.words))
        except OSError as error:
            why = {"file": str(self._path), "why": error.strerror}
            log.error("boxes learnt from others are forgotten at the next start", extra=why)


class Admission:
    """Admits and strikes boxes, by this box's list `listed` and the lists that the listed boxes announce."""

    def __init__(
        self,
        settings: ClusterSettings,
        listed: Mapping[str, Peer],
        rules: ElectionRules,
        members: ClusterMembers,
        kept: KeptWords,
        roster: KeptRoster,
    ) -> None:
        """Goes by `listed`, the list of peers, until `roster` holds the agreed members."""
        self.in_file = dict(listed)
        self._node, self._joining, self._roster = settings.node, bool(settings.join), roster
        self._rules, self._members, self._kept = rules, members, kept
        self._say = RateLimitedLog(log)

    @property
    def listed(self) -> Mapping[str, Peer]:
        """The agreed members with this box's opinion of them, else its list. None, if this box has been removed."""
        roster = self._roster.roster
        if roster is None:
            return self.in_file
        if roster.find(self._node) is None:
            return {}
        return {box.node: _with_opinion(box, self.in_file.get(box.node)) for box in roster.boxes}

    def update_members(self) -> tuple[list[str], list[AccessInstruction]]:
        """Strikes and admits boxes as the lists of this moment say. Returns the struck nodes, and instructions."""
        members, instructions = self._members, list[AccessInstruction]()
        spoken = {m.peer.node: m.announcement.listed for m in members if m.announcement is not None}
        words = self._kept.words | spoken
        wanted, struck = self._select(words)
        if not words.keys().isdisjoint(struck):  # a box listed with other keys has vouched for nobody yet
            words = {node: peers for node, peers in words.items() if node not in struck}
            wanted, struck = self._select(words)
        self._kept.keep({node: peers for node, peers in words.items() if node in wanted})
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

    def _select(self, words: Mapping[str, tuple[Peer, ...]]) -> tuple[dict[str, Peer], list[str]]:
        """Returns the boxes to let in, and the members that are not let in any more."""
        is_agreed = self._roster.roster is not None
        words = {} if is_agreed else words
        wanted = select_peers(self._node, self.listed, words, joining=self._joining and not is_agreed)
        return wanted, [m.peer.node for m in self._members if not is_same_box(wanted.get(m.peer.node), m.peer)]

    def is_listed(self, member: Member) -> bool:
        """Whether the box stands on this box's own list."""
        return member.peer.node in self.listed

    def list_to_announce(self) -> tuple[Peer, ...]:
        """Returns this box's list of peers, with the addresses that the boxes announced where it has none.

        Agreed members are announced as such.
        """
        if self._roster.roster is not None:
            return ()
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
        if announcement.agreement:
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


def select_peers(
    own: str, listed: Mapping[str, Peer], words: Mapping[str, tuple[Peer, ...]], joining: bool
) -> dict[str, Peer]:
    """Returns the other boxes to let in, by node. `words` are the lists of other boxes.

    Boxes vouch for others where this box's list says so. For a box that joins, its seeds and the boxes that they list
    vouch.
    """
    found = {node: peer for node, peer in listed.items() if node != own}
    keys = {key for peer in listed.values() for key in peer.keys}
    vouchers = list(listed)
    for voucher in vouchers:
        for peer in words.get(voucher, ()) if joining or listed[voucher].vouches else ():
            welcome = (joining or not peer.voter) and peer.node not in found and keys.isdisjoint(peer.keys)
            if welcome and peer.node != own and peer.address and len(found) < MAX_NODES - 1 and _is_sound(peer):
                found[peer.node] = peer.to_announce
                keys.update(peer.keys)
                vouchers += [peer.node] * joining
    return found


def is_same_box(now: Peer | None, before: Peer) -> bool:
    """Whether two entries of the list mean one box: its address, one of its keys, its vote and the opinion of it may
    change."""
    return now is not None and now.node == before.node and not set(now.keys).isdisjoint(before.keys)


def _with_opinion(box: Peer, listed: Peer | None) -> Peer:
    """Returns the entry of a member, trusted if the list trusts the box with one of its keys."""
    is_known = listed is not None and not set(listed.keys).isdisjoint(box.keys)
    return msgspec.structs.replace(box, trusted=listed.trusted) if listed is not None and is_known else box


def fill_addresses(listed: Mapping[str, Peer], announced: Mapping[str, str]) -> tuple[Peer, ...]:
    """Returns the list with the announced address of each box that it has no address of, without opinions."""
    return tuple(
        msgspec.structs.replace(peer.to_announce, address=peer.address or announced.get(node, ""))
        for node, peer in listed.items()
    )


def read_seeds(text: str) -> dict[str, Peer]:
    """Returns the seeds, boxes to join, from "NODE,HOST:PORT,KEY", separated by spaces. Raises ConfigError."""
    found: dict[str, Peer] = {}
    for seed in text.split():
        parts = seed.split(",")
        if len(parts) != 3:
            raise ConfigError(
                f"cluster.join is {text!r}; write NODE,HOST:PORT,KEY of a box of the cluster, as its `edgemoe keygen` "
                "printed it"
            )
        peer = Peer(parts[0], parts[1], parts[2])
        check_peer(peer, "cluster.join")
        found[peer.node] = peer
    return found


def _is_sound(peer: Peer) -> bool:
    try:
        check_peer(peer, "")
    except ConfigError:
        return False
    return True
