"""The rules by which a box accepts a leader, as text that must be equal on all boxes: mode, and boxes that may lead."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.roster import Roster
from edgemoe.config.settings import ClusterSettings
from edgemoe.durable import read_plain, replace_file
from edgemoe.errors import CoordUnavailable
from edgemoe.types.bounds import Word

log = logging.getLogger(__name__)
MAX_VOTERS = 5  # each change waits for a majority; with five, two may die
MAX_VOTERS_BYTES = 1024
AGREED = "cluster: "  # before the identity, in the words of boxes whose members are agreed
_Names = Annotated[list[Word], Meta(min_length=1, max_length=MAX_VOTERS)]


def voters_of(peers: Mapping[str, Peer]) -> list[str]:
    """Returns the nodes that vote: the first five on the list that are marked as voters."""
    return sorted([node for node, peer in peers.items() if peer.voter][:MAX_VOTERS])


class KeptVoters:
    """The voters of an agreement that has begun, on disk: a list that changes later changes none of them."""

    def __init__(self, path: Path) -> None:
        """Reads the file; `fault` says why it cannot be used, if so."""
        self._path, self.names, self.fault = path, list[str](), ""
        try:
            self.names = msgspec.json.decode(read_plain(path, MAX_VOTERS_BYTES), type=_Names)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            self.fault = (
                f"{path}: the voters cannot be read, and the list's are taken for them: copy the file from another "
                f"voter, and restart this box: {error}"[:400]
            )
            log.error("the voters are not known for sure", extra={"why": self.fault})

    def keep(self, names: Sequence[str]) -> None:
        """Keeps the voters. Raises CoordUnavailable if the disk fails."""
        try:
            replace_file(self._path, msgspec.json.encode(list(names)))
        except OSError as error:
            raise CoordUnavailable(f"{self._path}: the voters cannot be kept: {error.strerror}") from error
        self.names = list(names)


class ElectionRules:
    """This box's rules. A box that joins adopts the words of its seed, and has none before it has heard them."""

    def __init__(self, settings: ClusterSettings, voters: Sequence[str]) -> None:
        self.voters = list(voters) if settings.coordination == "raft" and not settings.join else []
        self._leaders: frozenset[str] | None = None  # anybody
        self._former = ""  # words before the members were agreed, by which boxes may still go for a moment
        self.is_fixed = settings.coordination == "single" and not settings.join  # the settings name who leads
        self._joins = bool(settings.join) and settings.coordination != "etcd"
        match settings.coordination:
            case _ if self._joins:
                self._words = ""
            case "single":
                self._leaders = frozenset([settings.leader or settings.node])
                self._words = f"single: {settings.leader or settings.node}"
            case "raft":
                self._leaders = frozenset(voters)
                self._words = "raft: " + " ".join(voters)
            case "etcd":
                self._words = f"etcd: {settings.etcd_prefix}"

    @property
    def words(self) -> str:
        """The words that this box announces; "" on a box that joins."""
        return "" if self._joins else self._words

    def may_lead(self, node: str, words: str) -> bool:
        """Whether a box that announced `words` may lead."""
        return words != "" and words in (self._words, self._former) and self.is_entitled(node)

    def is_entitled(self, node: str) -> bool:
        """Whether that box may lead, if it announces the right words."""
        return self._leaders is None or node in self._leaders

    def reject_reason(self, node: str, words: str) -> str:
        """Returns why a box that announced `words` cannot take part; "" if it can. A box that joins announces ""."""
        if not words or not self._words or words in (self._words, self._former):
            return ""
        if words.startswith(AGREED) or self._words.startswith(AGREED):
            return (
                f"{node} belongs to {words!r}, this box to {self._words!r}; invite the one that is to change, by "
                "`edgemoe cluster invite`"
            )
        return (
            f"{node} elects its leader by {words!r}, this box by {self._words!r}; make cluster.coordination, leader "
            "and the voters of peers_file the same on all boxes"
        )

    def follow(self, roster: Roster) -> None:
        """Goes by the agreed members from now on."""
        words = AGREED + roster.cluster
        if words != self._words:
            self._former = "" if self._words.startswith(AGREED) else self._words
        self._words, self._joins, self.is_fixed = words, False, False
        self.voters, self._leaders = roster.voters, frozenset(roster.voters)

    def adopt(self, words: str) -> None:
        """Adopts the words of the seed, if this box joins by one."""
        if self._joins:
            self._words = words
