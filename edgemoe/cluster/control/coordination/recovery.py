"""How a member of the embedded agreement that lost its memory, or is new, gets its vote back [Raft].

Such a member stores a leader's log, but neither votes nor stands for election. It votes again once a leader has caught
it up to an entry of that leader's term. Or once every other voter has said how far its log goes; it then votes as
if it had the longest log. `LogRecovery` says why this is safe.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.control.coordination.raft_journal import Entry, Journal, JournalDamaged, read_snapshot
from edgemoe.durable import rename_file

log = logging.getLogger(__name__)
ASK_S = 0.25

MAX_COUNT = 1 << 62
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class LogEndQuery(msgspec.Struct, frozen=True, tag="where", tag_field="type"):
    """Asks for the last entry of a member's log. `nonce` belongs to the incarnation that asks."""

    nonce: Annotated[bytes, Meta(max_length=16)]


class LogEndReply(msgspec.Struct, frozen=True, tag="here", tag_field="type"):
    """Answers a LogEndQuery."""

    nonce: Annotated[bytes, Meta(max_length=16)]
    term: Count
    last_log_term: Count
    last_log_index: Count


def open_journal(directory: Path, voters: bytes) -> Journal:
    """Returns the journal of these voters; an empty one if it is damaged, which is put aside. Raises OSError."""
    journal, snapshot = directory / "raft.journal", directory / "raft.snapshot"
    try:
        return _open_together(directory, voters, journal, snapshot)
    except JournalDamaged as error:
        log.error(
            "the agreement's journal cannot be used and is put aside; this box votes again once it has caught up",
            extra={"directory": str(directory), "why": str(error)},
        )
        for path in (journal, snapshot):
            if path.exists():
                rename_file(path, path.name + ".aside")
        return Journal(directory, voters)


def _open_together(directory: Path, voters: bytes, journal: Path, snapshot: Path) -> Journal:
    """Opens journal and snapshot and joins them. Raises JournalDamaged, OSError."""
    if snapshot.exists() and not journal.exists():
        raise JournalDamaged("the journal is missing")
    opened = Journal(directory, voters)
    try:
        before = read_snapshot(snapshot).before if snapshot.exists() else None
        if not _fits(opened, before):
            raise JournalDamaged("journal and snapshot do not fit together")
    except JournalDamaged:
        opened.close()
        raise
    if before is not None:
        opened.align(before)
    return opened


def _fits(journal: Journal, before: Entry | None) -> bool:
    """Whether the log continues the snapshot, or ends before it."""
    if before is None:
        return not len(journal) or journal[0][1] == 1
    return not len(journal) or journal[-1][1] < before[1] or before in journal[:]


class LogRecovery:
    """Keeps the replies of the other voters until this member may vote. Used on the agreement's thread only.

    A majority that remembers elected the leader. So an entry agreed in its term covers all that this member can ever
    have agreed to. An agreed entry thus outlives the loss of one disk and a later death. A new cluster begins once
    all its voters are there.
    """

    def __init__(self, journal: Journal, others: Collection[str], clock: Callable[[], float]) -> None:
        self._journal, self._others, self._clock = journal, others, clock
        self._nonce = secrets.token_bytes(8)
        self._replies: dict[str, LogEndReply] = {}
        self._asked_s = float("-inf")
        self._sworn = 0  # the highest term in which this member may have voted

    @property
    def waits_for(self) -> list[str]:
        """The voters that have not replied yet; none once this member may vote."""
        return [] if self._journal.whole else [node for node in self._others if node not in self._replies]

    def next_query(self) -> LogEndQuery | None:
        """Returns the query to send to the voters in `waits_for` now, or None."""
        if not self.waits_for or self._clock() - self._asked_s < ASK_S:
            return None
        self._asked_s = self._clock()
        return LogEndQuery(self._nonce)

    def answer(self, asked: LogEndQuery) -> LogEndReply:
        """Returns the end of this member's log."""
        _, index, term = self._journal[-1]
        return LogEndReply(asked.nonce, self._journal.term, term, index)

    def on_reply(self, node: str, reply: LogEndReply) -> None:
        """Keeps a voter's reply to this incarnation's query."""
        if reply.nonce == self._nonce and not self._journal.whole:
            self._replies[node] = reply
            self._sworn = max(self._sworn, reply.term)

    def on_agreed(self, term: int, agreed: int) -> bool:
        """Gives the vote back if `agreed`, the last agreed entry, is of `term`. Returns whether it did."""
        if self._journal.whole or not term or self._journal.term_at(agreed) != term:
            return False
        self._sworn = max(self._sworn, term)
        if self._journal.getVotedForNodeId() is None:
            self._journal.setCurrentTerm(term, "")  # so that no later incarnation votes in this term
        self._journal.mark_whole()
        return True

    def may_vote(self, term: int, last_log_term: int, last_log_index: int) -> bool:
        """Whether this member may vote for a candidate with that last entry."""
        furthest = max(((s.last_log_term, s.last_log_index) for s in self._replies.values()), default=(0, 0))
        reaches = self._journal.whole or (last_log_term, last_log_index) >= furthest
        return not self.waits_for and term > self._sworn and reaches
