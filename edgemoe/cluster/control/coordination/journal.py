"""What a member of the embedded agreement has promised: its log, its vote, and the state up to where the log begins.

    raft.journal    magic, then records, then zeros up to a multiple of SEGMENT_BYTES, which are allocated beforehand
    record          length (4) | xxh3-64 of the body (8) | body: msgpack array, its kind first
    raft.vote, raft.snapshot    magic | xxh3-64 of the rest (8) | msgpack

A byte that is cut off or flipped anywhere is noticed. What is damaged is put aside, and the member comes back as one
that remembers nothing (`Journal.whole` is False): see `recovery`. The vote is fsynced before it is given; the log is
not, so that it outlives the process but, for its last entries, not a power loss.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, overload

import msgspec
import pysyncobj.journal
import xxhash
from msgspec import Meta

from edgemoe.cluster.control.coordination.store import CoordState
from edgemoe.durable import NewFile, open_kept, read_plain, replace_file, write_all
from edgemoe.types.bounds import Count, Word

log = logging.getLogger(__name__)
MAGIC = b"edgemoe raft 1\0\0"
OLD_MAGIC = b"PYSYNCOBJ"
SEGMENT_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 16
_HEAD = struct.Struct("<I8s")

Entry = tuple[Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)], Count, Count]  # command, index, term


class JournalDamaged(Exception):
    """A file that is not as this release wrote it; the message says in what."""


class Journal(pysyncobj.journal.Journal):  # type: ignore[misc]
    """PySyncObj's log on disk. Every change is written before it is made; one that cannot be raises OSError.

    From then on `failed`: what is in memory may lack what is on disk, and whoever holds it opens it anew.
    """

    def __init__(self, directory: Path, voters: bytes) -> None:
        """Reads or begins the journal that these voters keep. Raises JournalDamaged, OSError."""
        self.whole = False  # nothing that it ever promised is missing
        self.failed = False
        self._path, self._vote_path = directory / "raft.journal", directory / "raft.vote"
        self._voters = voters
        self._entries: list[Entry] = []
        vote = _read_vote(self._vote_path)
        self.term, self._voted = vote or (0, None)
        if self._path.exists():
            self._fd = open_kept(self._path)
            try:
                self._end = self._read()
            except BaseException:
                os.close(self._fd)
                raise
        else:
            self._fd, self._end, self._size = self._write_new([], whole=False)
        self.whole = self.whole and vote is not None

    # --- PySyncObj's side -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> list[Entry]: ...
    def __getitem__(self, at: int | slice) -> Entry | list[Entry]:
        return self._entries[at]

    def add(self, command: bytes, index: int, term: int) -> None:
        self._append(["entry", command, index, term])
        self._entries.append((command, index, term))

    def clear(self) -> None:
        self.deleteEntriesFrom(0)

    def deleteEntriesFrom(self, first: int) -> None:
        self._append(["keep", first])
        del self._entries[first:]

    def deleteEntriesTo(self, first: int) -> None:
        """Forgets what the snapshot has. Where there is no room to do so, the journal stays as long as it is."""
        kept = self._entries[first:]
        try:
            fd, end, size = self._write_new(kept, self.whole)
        except OSError as error:
            log.warning("the journal cannot be shortened", extra={"file": str(self._path), "why": error.strerror})
            return
        os.close(self._fd)
        self._fd, self._end, self._size, self._entries = fd, end, size, kept

    def setCurrentTerm(self, term: int, voted: str | None) -> None:
        data = msgspec.msgpack.encode([term, voted])
        try:
            replace_file(self._vote_path, frame(data))
        except OSError:
            self.failed = True
            raise
        self.term, self._voted = term, voted

    def getCurrentTerm(self) -> int:
        return self.term

    def getVotedForNodeId(self) -> str | None:
        return self._voted

    def setRaftCommitIndex(self, index: int) -> None:
        """Not kept: whoever leads says it again."""

    def getRaftCommitIndex(self) -> int:
        return 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    _destroy = close  # as PySyncObj calls it

    # --- ours -------------------------------------------------------------------------------------------------

    def term_at(self, index: int) -> int:
        """Returns the term of that entry; 0 where it is not here."""
        at = index - self._entries[0][1] if self._entries else -1
        return self._entries[at][2] if 0 <= at < len(self._entries) else 0

    def after(self, index: int, term: int) -> list[Entry] | None:
        """Returns the entries that follow that one; None where it is not here."""
        at = index - self._entries[0][1] if self._entries else -1
        here = 0 <= at < len(self._entries) and self._entries[at][2] == term
        return self._entries[at + 1 :] if here else None

    def disown(self, why: str) -> None:
        """Marks the journal as wrong: whoever opens the journal anew finds it damaged."""
        self._append(["disowned", why])
        self.failed = True

    def mark_whole(self) -> None:
        """From now on this member remembers all that it promises."""
        self._append(["whole"])
        self.whole = True

    def align(self, before: Entry) -> None:
        """Forgets what lies before the snapshot's first entry, where a crash came in between."""
        if before in self._entries[1:]:
            self.deleteEntriesTo(self._entries.index(before))

    def _append(self, record: list[Any]) -> None:
        data = _record(record)
        try:
            # four zero bytes always follow the last record
            if self._end + len(data) + _HEAD.size > self._size:
                os.posix_fallocate(self._fd, self._size, SEGMENT_BYTES)
                self._size += SEGMENT_BYTES
            if os.pwrite(self._fd, data, self._end) != len(data):
                raise OSError(errno.ENOSPC, "written in part", str(self._path))
        except OSError:
            self.failed = True
            self._take_back(len(data))
            raise
        self._end += len(data)

    def _take_back(self, size_bytes: int) -> None:
        """Nothing stays of what was written in part."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)
            os.pwrite(self._fd, bytes(min(size_bytes, self._size - self._end)), self._end)

    def _write_new(self, entries: list[Entry], whole: bool) -> tuple[int, int, int]:
        """A journal of these entries in place of the present one: descriptor, end, size. Raises OSError."""
        records: list[list[Any]] = [["voters", self._voters], *(["entry", *entry] for entry in entries)]
        records += [["whole"]] if whole else []
        data = MAGIC + b"".join(map(_record, records))
        size = -(-(len(data) + _HEAD.size) // SEGMENT_BYTES) * SEGMENT_BYTES
        with NewFile(self._path) as file:
            os.posix_fallocate(file.fd, 0, size)
            write_all(file.fd, data)
            file.put_in_place()
            return os.dup(file.fd), len(data), size

    def _read(self) -> int:
        """Takes in the file; returns where its records end. Raises JournalDamaged."""
        self._size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, self._size, 0)
        if data.startswith(OLD_MAGIC):
            raise JournalDamaged("it is of an earlier release, which must run on no box of the cluster any more")
        if not data.startswith(MAGIC) or self._size % SEGMENT_BYTES or len(data) != self._size:
            raise JournalDamaged(f"{self._size} bytes that are no whole journal")
        end = len(MAGIC)
        for end, (kind, *fields) in _records(data):  # noqa: B007
            match kind, fields:
                case "voters", [bytes(voters)]:
                    if voters != self._voters:
                        raise JournalDamaged("other voters kept it")
                case "entry", [bytes(command), int(index), int(term)]:
                    if self._entries and index != self._entries[-1][1] + 1:
                        raise JournalDamaged(f"entry {index} follows entry {self._entries[-1][1]}")
                    self._entries.append((command, index, term))
                case "keep", [int(first)]:
                    del self._entries[first:]
                case "whole", []:
                    self.whole = True
                case "disowned", [str(why)]:
                    raise JournalDamaged(why)
                case _:
                    raise JournalDamaged(f"a record {kind!r}")
        return end


def _record(record: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(record)
    assert len(body) <= MAX_RECORD_BYTES
    return _HEAD.pack(len(body), xxhash.xxh3_64_digest(body)) + body


def _records(data: bytes) -> Iterator[tuple[int, list[Any]]]:
    """Each record with where it ends. Raises JournalDamaged."""
    at = len(MAGIC)
    while at + _HEAD.size <= len(data) and data[at : at + 4] != b"\0\0\0\0":
        size, checksum = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        body = data[at : at + size]
        if len(body) != size or xxhash.xxh3_64_digest(body) != checksum:
            raise JournalDamaged(f"the record at byte {at} is damaged")
        at += size
        yield at, msgspec.msgpack.decode(body, type=list[Any])
    if data.count(0, at) != len(data) - at:
        raise JournalDamaged(f"something follows the last record, which ends at byte {at}")


def frame(data: bytes) -> bytes:
    """Returns a small file's content around `data`."""
    return MAGIC + xxhash.xxh3_64_digest(data) + data


def unframe(content: bytes) -> bytes:
    """Raises JournalDamaged."""
    data = content[len(MAGIC) + 8 :]
    if content[: len(MAGIC)] != MAGIC or content[len(MAGIC) : len(MAGIC) + 8] != xxhash.xxh3_64_digest(data):
        raise JournalDamaged(f"{len(content)} bytes that are not what was written")
    return data


def _read_vote(path: Path) -> tuple[int, str | None] | None:
    """Term and vote; None where none is kept, or none that can be read. Raises OSError."""
    try:
        return msgspec.msgpack.decode(unframe(read_plain(path, MAX_RECORD_BYTES)), type=tuple[Count, Word | None])
    except FileNotFoundError:
        return None
    except (JournalDamaged, msgspec.MsgspecError) as error:
        log.error("the vote kept on disk is not used", extra={"file": str(path), "why": str(error)})
        return None


def voters_digest(voters: Sequence[str]) -> bytes:
    """Returns what members with the same voters have in common."""
    return xxhash.xxh3_64_digest("\n".join(sorted(voters)).encode())


MAX_SNAPSHOT_BYTES = 1 << 20


class StateSnapshot(msgspec.Struct, frozen=True):
    """`state` after `last`, the entry that follows `before`."""

    state: CoordState
    last: Entry
    before: Entry


def write_snapshot(path: Path, snapshot: StateSnapshot) -> None:
    """Raises OSError."""
    replace_file(path, frame(msgspec.msgpack.encode(snapshot)))


def read_snapshot(path: Path) -> StateSnapshot:
    """Raises JournalDamaged, OSError."""
    return decode_snapshot(read_plain(path, MAX_SNAPSHOT_BYTES + 1))


def decode_snapshot(content: bytes) -> StateSnapshot:
    """Raises JournalDamaged."""
    if len(content) > MAX_SNAPSHOT_BYTES:
        raise JournalDamaged(f"more than {MAX_SNAPSHOT_BYTES} bytes")
    try:
        snapshot = msgspec.msgpack.decode(unframe(content), type=StateSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise JournalDamaged(str(error)) from error
    if snapshot.last[1] != snapshot.before[1] + 1:
        raise JournalDamaged("its entries do not follow each other")
    return snapshot
