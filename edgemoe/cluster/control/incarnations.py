"""Notices boxes that run with the name and key of one: an image of an SD card, a copy of a virtual machine, a backup.

A front follows one incarnation of each other front, the one that answers its own connection. Another one that is heard
meanwhile is a second box. docs/design/membership.md has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgemoe.cluster.control.membership import ClusterMembers, Member
from edgemoe.cluster.control.messages import DoubleBox
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)
SURE_S = 2.0  # after which a connection of an incarnation that ended is known to be broken
GONE_S = 5.0  # without a message


@dataclass(slots=True)
class _Second:
    """An incarnation that is heard, and not followed."""

    boot: str
    since_s: float
    heard_s: float
    address: str  # from which it comes, and which it announces
    is_sure: bool = False


class Incarnations:
    """Distinguishes each member's present incarnation from others that use its name. Lives on one event loop."""

    def __init__(self, node: str, members: ClusterMembers, clock: Callable[[], float]) -> None:
        self._node, self._members, self._clock = node, members, clock
        self._seconds: dict[str, _Second] = {}
        self._told = ""
        self._say = RateLimitedLog(log)

    def admit(self, member: Member, boot: str, host: str, announced: str = "") -> bool:
        """Returns whether a message comes from the member's present incarnation, and records the sender."""
        if member.answering in ("", boot) or not member.up:
            return True
        node, now_s = member.peer.node, self._clock()
        second = self._seconds.get(node)
        if second is None or second.boot != boot:
            second = self._seconds[node] = _Second(boot, now_s, now_s, host)
        second.heard_s = now_s
        if announced:
            same_host = announced.rpartition(":")[0] == host
            second.address = announced if same_host or not host else f"{host} (it calls itself {announced})"
        if not second.is_sure and member.heard_s - second.since_s > SURE_S:
            second.is_sure = True
            why = {"followed": member.address, "other": second.address}
            self._say(logging.ERROR, "two boxes run with one name and key", node, **why)
        return False

    def is_sure(self, node: str) -> bool:
        """Whether two boxes run as that node for certain."""
        return node in self._seconds and self._seconds[node].is_sure

    def update(self) -> None:
        """Forgets incarnations that are heard no more."""
        for node, second in list(self._seconds.items()):
            if node not in self._members or self._clock() - second.heard_s > GONE_S:
                del self._seconds[node]
                if second.is_sure:
                    log.info("the second box of that name is gone", extra={"node": node, "other": second.address})

    def doubles(self) -> tuple[DoubleBox, ...]:
        """Returns the boxes of which two run, to be announced."""
        sure = [(node, second) for node, second in sorted(self._seconds.items()) if second.is_sure]
        return tuple(DoubleBox(node, self._members[node].address, second.address) for node, second in sure)[:MAX_NODES]

    def finding(self, node: str) -> str:
        """Returns the finding about another box; "" if there is none."""
        if not self.is_sure(node):
            return ""
        return (
            f"two boxes run as {node} with one key: at {self._members[node].address}, which is followed, and at "
            f"{self._seconds[node].address}; stop one, or invite it under another name"
        )

    # --- this box ---------------------------------------------------------------------------------------------

    @property
    def is_copy(self) -> bool:
        """Whether other boxes follow another box of this one's name and key."""
        return any(member.prefers for member in self._members)

    def why_self(self) -> str:
        """Returns the finding of others about this box; "" if there is none. Logs a new one."""
        said = self._say_self()
        if said != self._told:
            self._told = said
            if said:
                log.error("another box runs with this one's name and key", extra={"why": said})
        return said

    def _say_self(self) -> str:
        preferring = {member.peer.node: member.prefers for member in self._members if member.prefers}
        if preferring:
            return (
                f"another box runs as {self._node} with this one's key, at {next(iter(preferring.values()))}, and "
                f"{', '.join(sorted(preferring))} follow that one: this one serves alone. Stop one of them, or give "
                "this one another name and key"
            )
        seen = {each.peer.node: other for each in self._members for other in self._others(each)}
        if not seen:
            return ""
        return (
            f"another box runs as {self._node} with this one's key, at {next(iter(seen.values()))}, as "
            f"{', '.join(sorted(seen))} see; stop one of them, or give that one another name and key"
        )

    def _others(self, member: Member) -> Iterable[str]:
        doubles = member.announcement.doubles if member.announcement is not None and member.is_present else ()
        return [double.other for double in doubles if double.node == self._node]
