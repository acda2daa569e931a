"""How a box decides who leads, in words that every other box's must equal: mode, and whom it lets lead."""

from __future__ import annotations

from collections.abc import Mapping

from edgemoe.cluster.rpc.keys import Peer
from edgemoe.config.settings import ClusterSettings

MAX_VOTERS = 5  # each change waits for most of them; more would cost, and two may die


def voters_of(peers: Mapping[str, Peer]) -> list[str]:
    """Returns the nodes that vote: the first five of the list that may."""
    return sorted([node for node, peer in peers.items() if peer.voter][:MAX_VOTERS])


class ElectionRules:
    """What this box goes by. On a box that joins `words` are those of the box that it joins, "" before it is heard."""

    def __init__(self, settings: ClusterSettings, peers: Mapping[str, Peer]) -> None:
        self._leaders: frozenset[str] | None = None  # anybody
        self._joins = bool(settings.join) and settings.coordination != "etcd"
        match settings.coordination:
            case _ if self._joins:
                self._words = ""
            case "single":
                self._leaders = frozenset([settings.leader or settings.node])
                self._words = f"single: {settings.leader or settings.node}"
            case "raft":
                self._leaders = frozenset(voters_of(peers))
                self._words = "raft: " + " ".join(voters_of(peers))
            case "etcd":
                self._words = f"etcd: {settings.etcd_prefix}"

    @property
    def words(self) -> str:
        """Returns the words that the others are told; a box that joins has none of its own."""
        return "" if self._joins else self._words

    @property
    def is_fixed(self) -> bool:
        """Returns whether nobody leads but the one box that is named."""
        return self._leaders is not None and len(self._leaders) == 1

    def may_lead(self, node: str, words: str) -> bool:
        """Returns whether a box that said `words` of its agreement may lead."""
        return words != "" and words == self._words and (self._leaders is None or node in self._leaders)

    def reject_reason(self, node: str, words: str) -> str:
        """Returns why a box cannot take part that said `words`; "" where it can. A box that joins says nothing."""
        if not words or not self._words or words == self._words:
            return ""
        return (
            f"{node} decides by {words!r} who leads, this box by {self._words!r}; make cluster.coordination, leader "
            "and the voters of peers_file the same on all boxes"
        )

    def adopt(self, words: str) -> None:
        """Goes by what the box says that this one joins."""
        if self._joins:
            self._words = words
