"""The memory of a member of the embedded agreement: its log, its vote and its snapshot, in checksummed files.

`_append` and `_write_new` give the formats. Any cut or flipped byte is noticed; a damaged file is put aside, and the
member comes back without memory (`Journal.whole` is False), see `recovery`. A vote is fsynced before it is given. The
log is not: it survives the end of the process, but its last entries may not survive a power loss.
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

from edgemoe.cluster.control.coordination.coord_store import CoordState
from edgemoe.durable import NewFile, open_kept, read_plain, replace_file, write_all
from edgemoe.types.bounds import Count, Word

log = logging.getLogger(__name__)
MAGIC = b"edgemoe raft 1\0\0"
OLD_MAGIC = b"PYSYNCOBJ"
SEGMENT_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 16
_HEAD = struct.Struct("<I8s")  # length and xxh3-64 of a record's body, a msgpack array with its kind first

Entry = tuple[Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)], Count, Count]  # command, index, term


class JournalDamaged(Exception):
    """A file differs from the form in which this release writes it; the message says how."""


class Journal(pysyncobj.journal.Journal):  # type: ignore[misc]
    """PySyncObj's log on disk: magic, records, and zeros up to a multiple of SEGMENT_BYTES, allocated beforehand.

    Every change is written first, then made in memory. A failed write raises OSError and sets `failed`: memory and disk
    may differ, and the owner must open the journal again.
    """

    def __init__(self, directory: Path, voters: bytes) -> None:
        """Reads the journal of these voters, or begins one. Raises JournalDamaged, OSError."""
        self.whole = False  # true while no promise of this member is missing
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
        """Drops the entries that the snapshot has. On a full disk the journal stays as long as it is."""
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
        """Keeps nothing: every leader sends it again."""

    def getRaftCommitIndex(self) -> int:
        return 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    _destroy = close  # as PySyncObj calls it

    # --- ours -------------------------------------------------------------------------------------------------

    def term_at(self, index: int) -> int:
        """Returns the term of that entry; 0 if the journal lacks it."""
        at = index - self._entries[0][1] if self._entries else -1
        return self._entries[at][2] if 0 <= at < len(self._entries) else 0

    def after(self, index: int, term: int) -> list[Entry] | None:
        """Returns the entries after that one; None if the journal lacks it."""
        at = index - self._entries[0][1] if self._entries else -1
        here = 0 <= at < len(self._entries) and self._entries[at][2] == term
        return self._entries[at + 1 :] if here else None

    def disown(self, why: str) -> None:
        """Marks the journal as wrong: it counts as damaged when it is opened again."""
        self._append(["disowned", why])
        self.failed = True

    def mark_whole(self) -> None:
        """Marks the journal as complete: from now on this member remembers all its promises."""
        self._append(["whole"])
        self.whole = True

    def align(self, before: Entry) -> None:
        """Drops entries before the snapshot's first, which a crash may have left."""
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
        """Clears a record that was written in part."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)
            os.pwrite(self._fd, bytes(min(size_bytes, self._size - self._end)), self._end)

    def _write_new(self, entries: list[Entry], whole: bool) -> tuple[int, int, int]:
        """Replaces the journal by one of these entries. Returns descriptor, end and size. Raises OSError."""
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
        """Reads the file; returns the offset after its last record. Raises JournalDamaged."""
        self._size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, self._size, 0)
        if data.startswith(OLD_MAGIC):
            raise JournalDamaged("an earlier release wrote it; no box of the cluster may run that release any more")
        if not data.startswith(MAGIC) or self._size % SEGMENT_BYTES or len(data) != self._size:
            raise JournalDamaged(f"its {self._size} bytes are no whole journal")
        end = len(MAGIC)
        for end, (kind, *fields) in _records(data):  # noqa: B007
            match kind, fields:
                case "voters", [bytes(voters)]:
                    if voters != self._voters:
                        raise JournalDamaged("it belongs to other voters")
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
                    raise JournalDamaged(f"it has a record of unknown kind {kind!r}")
        return end


def _record(record: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(record)
    assert len(body) <= MAX_RECORD_BYTES
    return _HEAD.pack(len(body), xxhash.xxh3_64_digest(body)) + body


def _records(data: bytes) -> Iterator[tuple[int, list[Any]]]:
    """Yields each record with the offset of its end. Raises JournalDamaged."""
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
        raise JournalDamaged(f"bytes follow the last record, which ends at byte {at}")


def frame(data: bytes) -> bytes:
    """Returns the content of a small file: magic, xxh3-64 of `data`, `data`."""
    return MAGIC + xxhash.xxh3_64_digest(data) + data


def unframe(content: bytes) -> bytes:
    """Returns the data of a small file. Raises JournalDamaged."""
    data = content[len(MAGIC) + 8 :]
    if content[: len(MAGIC)] != MAGIC or content[len(MAGIC) : len(MAGIC) + 8] != xxhash.xxh3_64_digest(data):
        raise JournalDamaged(f"its {len(content)} bytes fail their checksum")
    return data


def _read_vote(path: Path) -> tuple[int, str | None] | None:
    """Returns term and vote; None if the file is missing or unreadable. Raises OSError."""
    try:
        return msgspec.msgpack.decode(unframe(read_plain(path, MAX_RECORD_BYTES)), type=tuple[Count, Word | None])
    except FileNotFoundError:
        return None
    except (JournalDamaged, msgspec.MsgspecError) as error:
        log.error("the vote kept on disk is not used", extra={"file": str(path), "why": str(error)})
        return None


def voters_digest(voters: Sequence[str]) -> bytes:
    """Returns the digest that members with the same voters share."""
    return xxhash.xxh3_64_digest("\n".join(sorted(voters)).encode())


MAX_SNAPSHOT_BYTES = 1 << 20


class StateSnapshot(msgspec.Struct, frozen=True):
    """The state after applying entry `last`; `before` is the entry preceding it."""

    state: CoordState
    last: Entry
    before: Entry


def write_snapshot(path: Path, snapshot: StateSnapshot) -> None:
    """Replaces the snapshot on disk. Raises OSError."""
    replace_file(path, frame(msgspec.msgpack.encode(snapshot)))


def read_snapshot(path: Path) -> StateSnapshot:
    """Reads the snapshot on disk. Raises JournalDamaged, OSError."""
    return decode_snapshot(read_plain(path, MAX_SNAPSHOT_BYTES + 1))


def decode_snapshot(content: bytes) -> StateSnapshot:
    """Decodes and checks a snapshot file's content. Raises JournalDamaged."""
    if len(content) > MAX_SNAPSHOT_BYTES:
        raise JournalDamaged(f"it has more than {MAX_SNAPSHOT_BYTES} bytes")
    try:
        snapshot = msgspec.msgpack.decode(unframe(content), type=StateSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise JournalDamaged(str(error)) from error
    if snapshot.last[1] != snapshot.before[1] + 1:
        raise JournalDamaged("its entries do not follow each other")
    return snapshot
