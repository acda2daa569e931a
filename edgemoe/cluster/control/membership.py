"""The boxes of the cluster as this one sees them: who is listed, who lives, what each has said of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from edgemoe.cluster.control.messages import Announce, Beat, Report
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.ipc.messages import PeerEngine

BEAT_S = 0.4
DEAD_S = 1.6  # without a beat


@dataclass(slots=True)
class Member:
    """One other box."""

    peer: Peer
    boot: str = ""  # incarnation of its front, as of its last message
    up: bool = False  # our connection to it stands
    heard_s: float = float("-inf")
    gone_s: float = float("-inf")  # since when it has not been alive
    beat: Beat = field(default_factory=Beat)
    card: Announce | None = None
    card_boot: str = ""  # of which incarnation it is
    report: Report | None = None  # its last one, which boxes send to the leader
    acknowledged: int = 0  # our announcement that it has taken note of
    refused: str = ""  # why it cannot take part

    @property
    def noted(self) -> bool:
        """Returns whether `Members.watch` found it alive."""
        return self.gone_s == float("inf")


class Members:
    """The other boxes by node name. One owner, one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}

    def __getitem__(self, node: str) -> Member:
        return self._members[node]

    def __contains__(self, node: object) -> bool:
        return node in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def add(self, peer: Peer) -> None:
        """Adds a box that is listed from now on; replaces what was known under its name."""
        self._members[peer.node] = Member(peer, gone_s=self._clock())

    def remove(self, node: str) -> None:
        del self._members[node]

    def is_alive(self, node: str) -> bool:
        """Returns whether it has been heard lately, on a connection that stands both ways."""
        member = self._members[node]
        return member.up and self._clock() - member.heard_s < DEAD_S

    def alive(self) -> list[Member]:
        """Returns the boxes that are."""
        return [member for member in self if self.is_alive(member.peer.node)]

    def watch(self) -> list[str]:
        """Notes who is alive. Returns those that have come to life or died since the last call."""
        changed = []
        for member in self:
            if self.is_alive(member.peer.node) != member.noted:
                member.gone_s = self._clock() if member.noted else float("inf")
                changed.append(member.peer.node)
        return changed

    def absent_s(self, node: str) -> float:
        """For how long it has not been alive; 0 while it is."""
        return max(0.0, self._clock() - self._members[node].gone_s)

    def serving(self, model: str) -> dict[str, str]:
        """Returns engines of others that take requests for that model, by digest: NODE:BOOT -> node."""
        found = {}
        for member in self:
            engine = member.card.engine if member.card and not member.refused else None
            takes = engine is not None and engine.model == model and engine.boot == member.beat.engine
            if takes and self.is_alive(member.peer.node):
                found[f"{member.peer.node}:{member.beat.engine}"] = member.peer.node
        return found

    def keys(self) -> dict[str, tuple[str, ...]]:
        """Returns public keys of those that may take part."""
        return {member.peer.node: member.peer.keys for member in self if not member.refused}

    def engines(self) -> tuple[PeerEngine, ...]:
        """Returns the engines that compute for others, with where to reach them and whether their front is heard.

        That changes only with what `watch` returns. So whoever asks again at each change is never left with a silence
        that had ended before it was noted.
        """
        found = []
        for member in self:
            engine = member.card.engine if member.card and not member.refused else None
            if engine is not None and engine.shares and engine.boot:  # without one our engine reads none of the list
                host = (member.peer.address or (member.card.address if member.card else "")).rpartition(":")[0]
                found.append(
                    PeerEngine(
                        node=member.peer.node,
                        boot=engine.boot,
                        calls=f"{host}:{engine.calls_port}",
                        bulk=f"{host}:{engine.bulk_port}",
                        heard=member.noted,
                    )
                )
        return tuple(found)
