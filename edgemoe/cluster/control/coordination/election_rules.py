"""The rules by which a box accepts a leader, as text that must be equal on all boxes: mode, and boxes that may lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.rpc.keys import Peer
from edgemoe.config.settings import ClusterSettings
from edgemoe.durable import read_plain, replace_file
from edgemoe.errors import CoordUnavailable, ServiceError
from edgemoe.types.bounds import Word

MAX_VOTERS = 5  # each change waits for a majority; with five, two may die
MAX_VOTERS_BYTES = 1024
_Names = Annotated[list[Word], Meta(min_length=1, max_length=MAX_VOTERS)]


def voters_of(peers: Mapping[str, Peer]) -> list[str]:
    """Returns the nodes that vote: the first five on the list that are marked as voters."""
    return sorted([node for node, peer in peers.items() if peer.voter][:MAX_VOTERS])


class KeptVoters:
    """The voters of an agreement that has begun, on disk: a list that changes later changes none of them."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises ServiceError where it is damaged."""
        self._path, self.names = path, list[str]()
        try:
            self.names = msgspec.json.decode(read_plain(path, MAX_VOTERS_BYTES), type=_Names)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            raise ServiceError(f"{path}: the voters cannot be read; restore it from another box: {error}") from error

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

    @property
    def is_fixed(self) -> bool:
        """Whether the settings name the one box that leads."""
        return self._leaders is not None and len(self._leaders) == 1

    def may_lead(self, node: str, words: str) -> bool:
        """Whether a box that announced `words` may lead."""
        return words != "" and words == self._words and (self._leaders is None or node in self._leaders)

    def reject_reason(self, node: str, words: str) -> str:
        """Returns why a box that announced `words` cannot take part; "" if it can. A box that joins announces ""."""
        if not words or not self._words or words == self._words:
            return ""
        return (
            f"{node} elects its leader by {words!r}, this box by {self._words!r}; make cluster.coordination, leader "
            "and the voters of peers_file the same on all boxes"
        )

    def adopt(self, words: str) -> None:
        """Adopts the words of the seed, if this box joins by one."""
        if self._joins:
            self._words = words
