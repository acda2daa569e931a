"""A member of the embedded agreement that does not remember what it has promised, and how it gets its vote back.

[Raft] stands on members that remember their log and their vote. One whose disk was lost or damaged, or that is new,
takes in what a leader sends, but neither votes nor stands for election until either

    a leader has it caught up: its log reaches an entry that was agreed in that leader's own term; as that leader was
    elected by a majority that remembers, this is all that the member can ever have agreed to; or
    every other voter has said how far its log goes: from then on it votes as if its own went as far as the furthest.

So an agreed entry outlives the loss of one disk and a later death. A new cluster begins once all its voters are there.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.control.coordination.journal import Entry, Journal, JournalDamaged, read_snapshot
from edgemoe.durable import rename_file

log = logging.getLogger(__name__)
ASK_S = 0.25

MAX_COUNT = 1 << 62
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class LogEndQuery(msgspec.Struct, frozen=True, tag="where", tag_field="type"):
    """Asks how far a log goes. `nonce` is this incarnation's."""

    nonce: Annotated[bytes, Meta(max_length=16)]


class LogEndReply(msgspec.Struct, frozen=True, tag="here", tag_field="type"):
    """The answer to Where."""

    nonce: Annotated[bytes, Meta(max_length=16)]
    term: Count
    last_log_term: Count
    last_log_index: Count


def open_journal(directory: Path, voters: bytes) -> Journal:
    """Returns the journal that these voters keep; one that remembers nothing where it is damaged. Raises OSError."""
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
    """Raises JournalDamaged, OSError."""
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
    """Whether the log goes on from the snapshot, or ends before it."""
    if before is None:
        return not len(journal) or journal[0][1] == 1
    return not len(journal) or journal[-1][1] < before[1] or before in journal[:]


class Recovery:
    """What a member that is not whole knows of the others' logs. Used on the agreement's thread only."""

    def __init__(self, journal: Journal, others: Collection[str], clock: Callable[[], float]) -> None:
        self._journal, self._others, self._clock = journal, others, clock
        self._nonce = secrets.token_bytes(8)
        self._heard: dict[str, LogEndReply] = {}
        self._asked_s = float("-inf")
        self._sworn = 0  # the highest term in which a vote may be forgotten

    @property
    def waits_for(self) -> list[str]:
        """Returns the voters without whose word it does not vote; none once it may."""
        return [] if self._journal.whole else [node for node in self._others if node not in self._heard]

    def asks(self) -> LogEndQuery | None:
        """Returns what those are to be asked now, if anything."""
        if not self.waits_for or self._clock() - self._asked_s < ASK_S:
            return None
        self._asked_s = self._clock()
        return LogEndQuery(self._nonce)

    def answer(self, asked: LogEndQuery) -> LogEndReply:
        _, index, term = self._journal[-1]
        return LogEndReply(asked.nonce, self._journal.term, term, index)

    def hear(self, node: str, here: LogEndReply) -> None:
        if here.nonce == self._nonce and not self._journal.whole:
            self._heard[node] = here
            self._sworn = max(self._sworn, here.term)

    def follow(self, term: int, agreed: int) -> bool:
        """Takes note that in `term` the log is agreed up to entry `agreed`. True where that gives the vote back."""
        if self._journal.whole or not term or self._journal.term_at(agreed) != term:
            return False
        self._sworn = max(self._sworn, term)
        if self._journal.getVotedForNodeId() is None:
            self._journal.setCurrentTerm(term, "")  # nor in a later incarnation is this term voted in
        self._journal.mark_whole()
        return True

    def may_vote(self, term: int, last_log_term: int, last_log_index: int) -> bool:
        """Returns whether it may consider a candidate whose log goes that far."""
        furthest = max(((s.last_log_term, s.last_log_index) for s in self._heard.values()), default=(0, 0))
        reaches = self._journal.whole or (last_log_term, last_log_index) >= furthest
        return not self.waits_for and term > self._sworn and reaches
