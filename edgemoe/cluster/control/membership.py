"""Who is let in: the boxes in this box's own list, and those that a listed box vouches for.

A box that joins is listed, without a vote, on one box of the cluster; the others take it from there, for as long as it
stands there. The box that joins lists one box, and takes all others from that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from edgemoe.cluster.rpc.keys import Peer, check_peer
from edgemoe.errors import ConfigError
from edgemoe.types.bounds import MAX_NODES


def let_in(
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


def same_box(now: Peer | None, before: Peer) -> bool:
    """Returns whether it is listed as before, but perhaps elsewhere, or with another key beside one that it had."""
    if now is None or set(now.keys).isdisjoint(before.keys):
        return False
    return now == msgspec.structs.replace(before, address=now.address, key=now.key, new_key=now.new_key)


def with_addresses(listed: Mapping[str, Peer], announced: Mapping[str, str]) -> tuple[Peer, ...]:
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
