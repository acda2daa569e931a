"""The boxes of a cluster as its voters agree on them: each box keeps the last list that it has heard of.

A list of peers in a file only begins a cluster. From `edgemoe cluster init` on, the roster names boxes and voters.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.rpc.keys import Peer, check_peer
from edgemoe.durable import read_plain, replace_file
from edgemoe.errors import ConfigError
from edgemoe.types.bounds import MAX_NODES, Count, Text, WallSeconds, Word

log = logging.getLogger(__name__)
KEPT_ROSTER = "members"  # file in the state directory
MAX_ROSTER_BYTES = 256 << 10
MAX_INVITED = 16


class Invitation(msgspec.Struct, frozen=True):
    """Lets a box with this key ask to belong under this name, until then."""

    node: Text
    key: Word
    until_s: WallSeconds


class Roster(msgspec.Struct, frozen=True):
    """Names the boxes of one cluster. Each change has the next version."""

    cluster: Word  # identity, drawn when the cluster begins and when it is recovered
    version: Count
    boxes: Annotated[tuple[Peer, ...], Meta(max_length=MAX_NODES)]
    invited: Annotated[tuple[Invitation, ...], Meta(max_length=MAX_INVITED)] = ()
    former: Word = ""  # identity of the cluster that this one goes on for, once recovered

    @property
    def voters(self) -> list[str]:
        """Returns the nodes that vote."""
        return sorted(box.node for box in self.boxes if box.voter)

    def find(self, node: str) -> Peer | None:
        """Returns the entry of a box; None where it does not belong."""
        return next((box for box in self.boxes if box.node == node), None)

    def with_box(self, box: Peer) -> Roster:
        """Returns the next version, with this entry in place of the one of its name."""
        others = tuple(each for each in self.boxes if each.node != box.node)
        return self.next(boxes=(*others, box.to_announce))

    def without(self, node: str) -> Roster:
        """Returns the next version, without that box."""
        return self.next(boxes=tuple(each for each in self.boxes if each.node != node))

    def next(self, **changed: object) -> Roster:
        """Returns the next version, with these fields."""
        return msgspec.structs.replace(self, version=self.version + 1, **changed)

    def fault(self) -> str:
        """Returns the fault of the entries; "" if there is none."""
        try:
            for box in self.boxes:
                check_peer(box, "the members")
        except ConfigError as error:
            return str(error)
        names = [box.node for box in self.boxes]
        keys = [key for box in self.boxes for key in box.keys]
        if len(set(names)) < len(names) or len(set(keys)) < len(keys):
            return "the members: a name or a key is there twice"
        return "" if self.cluster else "the members: the cluster has no identity"


class KeptRoster:
    """The last roster that this box has followed, in memory and, given a path, on disk."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads the file. `fault` says why it cannot be used, if so."""
        self._path, self.fault = path, ""
        self.roster: Roster | None = None
        if path is None:
            return
        try:
            found = msgspec.json.decode(read_plain(path, MAX_ROSTER_BYTES), type=Roster)
            self.fault = found.fault()
            self.roster = None if self.fault else found
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            self.fault = str(error)
        if self.fault:
            self.fault = (
                f"{path} cannot be read ({self.fault[:120]}): copy it from another box, or remove it and "
                "join by a new invitation"
            )
            log.error("the members of the cluster are not known", extra={"why": self.fault})

    def keep(self, roster: Roster) -> None:
        """Replaces the roster, even if the disk fails."""
        self.roster, self.fault = roster, ""
        if self._path is None:
            return
        try:
            replace_file(self._path, msgspec.json.format(msgspec.json.encode(roster)) + b"\n")
        except OSError as error:
            why = {"file": str(self._path), "why": error.strerror}
            log.error("the change of members is forgotten at the next start", extra=why)
