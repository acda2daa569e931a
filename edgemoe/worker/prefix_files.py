"""Keeps blocks, windows and states of the prefix cache in files, across restarts.

A file holds the new blocks of one request, in order, and is never changed. Its table has each entry's key and digest.
Files lie in a folder for each model and layout; the least recently used files of all models are deleted first.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from edgemoe.durable import NewFile, make_folder, open_kept, remove_file, write_all
from edgemoe.types.step import EntryKind

log = logging.getLogger(__name__)

ByteArray = npt.NDArray[np.uint8]
EntryName = tuple[bytes, EntryKind]  # a block's key
MAGIC = b"edgemoe-kv-1\0\0\0\0"
HEADER = struct.Struct("<16sIIQQ")  # magic, entries, places in the table, bytes of a block, bytes of a state
ENTRY = struct.Struct("<16sB16s")  # key, kind, xxh3-128
DIGEST_BYTES = 16  # of header and table, behind them
ALIGNMENT = 4096
MOST_ENTRIES = 1 << 17
SUFFIX = ".kv"
MOST_AT_ONCE = 512  # entries that one call reads: IOV_MAX is 1024
LARGEST_SHARE = 0.5  # of the budget that one file may take


class SavedEntry(NamedTuple):
    """The place of an entry."""

    file: Path
    offset: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Table:
    """The table of one file, and where its data begin."""

    entries: Sequence[tuple[bytes, EntryKind, bytes]]
    data_offset: int


class PrefixFiles:
    """Owns a folder of one model's files. One thread may save while others read."""

    def __init__(self, root: Path, encoding: str, most_bytes: int, entry_bytes: Mapping[EntryKind, int]) -> None:
        """Keeps at most `most_bytes` in `root`, which other models' folders share."""
        self._root, self._folder, self._most_bytes = root, root / encoding, most_bytes
        self._sizes = entry_bytes
        self._header = (entry_bytes[EntryKind.BLOCK], entry_bytes[EntryKind.STATE])
        self._entries: dict[EntryName, SavedEntry] = {}
        self._lock = threading.Lock()
        self.corrupt = 0  # files that were deleted because they could not be read

    def open(self) -> None:
        """Makes the folder and reads the tables of its files. Raises OSError where the folder cannot be used."""
        make_folder(self._root, 0o700)
        make_folder(self._folder, 0o700)
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=_used_s):
            try:
                self._index(path, self._read_table(path))
            except (OSError, ValueError) as error:
                self._discard(path, str(error))

    def has(self, name: EntryName) -> bool:
        """Returns whether an entry is on disk."""
        return name in self._entries

    def run_length(self, keys: Sequence[bytes], first: int) -> int:
        """Returns how many of `keys` have their blocks on disk, from `first` on without a gap."""
        at = first
        while at < len(keys) and (keys[at], EntryKind.BLOCK) in self._entries:
            at += 1
        return at - first

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all models' files."""
        return sum(size for _, _, size in self._all_files())

    def read(self, name: EntryName) -> ByteArray | None:
        """Returns an entry; None where it is gone. From any thread."""
        return self.read_run([name], [np.empty(self._sizes[name[1]], np.uint8)])[0]

    def read_run(self, names: Sequence[EntryName], rows: Sequence[ByteArray]) -> list[ByteArray | None]:
        """Reads entries into rows of their sizes. Returns the rows, None for an entry that is gone. From any thread.

        Neighbours in a file are read at once. A file with a damaged entry is deleted.
        """
        found: list[ByteArray | None] = []
        while (first := len(found)) < len(names):
            entries = self._neighbours(names[first:])
            found += self._read_neighbours(entries, rows[first : first + len(entries)]) if entries else [None]
        return found

    def _neighbours(self, names: Sequence[EntryName]) -> list[SavedEntry]:
        """Returns the places of the leading entries that lie behind each other in one file."""
        entries: list[SavedEntry] = []
        end = 0
        for name in names[:MOST_AT_ONCE]:
            entry = self._entries.get(name)
            if entry is None or (entries and (entry.file, entry.offset) != (entries[0].file, end)):
                break
            entries.append(entry)
            end = entry.offset + self._sizes[name[1]]
        return entries

    def _read_neighbours(self, entries: Sequence[SavedEntry], rows: Sequence[ByteArray]) -> list[ByteArray | None]:
        file = entries[0].file
        gone: list[ByteArray | None] = [None] * len(entries)
        try:
            fd = open_kept(file, writable=False)
        except OSError:
            self._forget(file)
            return gone
        try:
            rest_bytes = os.preadv(fd, [row.data for row in rows], entries[0].offset)
        finally:
            os.close(fd)
        for at, (entry, row) in enumerate(zip(entries, rows, strict=True)):
            rest_bytes -= len(row)
            if rest_bytes < 0 or xxhash.xxh3_128_digest(row.data) != entry.digest:
                self._discard(file, "an entry is damaged")
                return [*rows[:at], *gone[at:]]
        return list(rows)

    def save(self, names: Sequence[EntryName], read: Callable[[EntryName], ByteArray | None]) -> int:
        """Writes the entries that are not here, in order, until `read` returns None. Returns the bytes written.

        Makes room first. Raises OSError.
        """
        wanted = [name for name in names if name not in self._entries][:MOST_ENTRIES]
        while wanted and sum(self._sizes[kind] for _, kind in wanted) > self._most_bytes * LARGEST_SHARE:
            wanted.pop()
        if not wanted:
            return 0
        need_bytes = _data_offset(len(wanted)) + sum(self._sizes[kind] for _, kind in wanted)
        self._make_room(need_bytes)
        path = self._folder / f"{wanted[0][0].hex()}-{len(wanted)}{SUFFIX}"
        with NewFile(path) as file:
            os.lseek(file.fd, _data_offset(len(wanted)), os.SEEK_SET)
            written: list[tuple[bytes, EntryKind, bytes]] = []
            for key, kind in wanted:
                if (data := read((key, kind))) is None:
                    break
                write_all(file.fd, data.data)
                written.append((key, kind, xxhash.xxh3_128_digest(data.data)))
            if not written:
                return 0
            _write_table(file.fd, written, len(wanted), self._header)
            file.put_in_place()
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # experts need the page cache more
        self._index(path, _Table(written, _data_offset(len(wanted))))
        return sum(self._sizes[kind] for _, kind, _ in written)

    def remove_all(self) -> None:
        """Deletes all files of this model."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            self._forget(path)
            remove_file(path, missing_ok=True)

    def touch(self, names: Sequence[EntryName]) -> None:
        """Marks the files of entries as used now."""
        for path in dict.fromkeys(entry.file for name in names if (entry := self._entries.get(name))):
            try:
                os.utime(path)
            except OSError:
                self._forget(path)

    def _read_table(self, path: Path) -> _Table:
        """Returns the table of a file. Raises ValueError where it is damaged or of another layout, OSError."""
        fd = open_kept(path, writable=False)
        try:
            magic, count, places, *sizes = HEADER.unpack(_exactly(fd, HEADER.size, 0))
            if magic != MAGIC or tuple(sizes) != self._header or not 0 < count <= places <= MOST_ENTRIES:
                raise ValueError("it is no file of this model's blocks")
            told = _exactly(fd, HEADER.size + ENTRY.size * count + DIGEST_BYTES, 0)
            if xxhash.xxh3_128_digest(told[:-DIGEST_BYTES]) != told[-DIGEST_BYTES:]:
                raise ValueError("its table is damaged")
            entries = ENTRY.iter_unpack(told[HEADER.size : -DIGEST_BYTES])
            table = _Table([(key, EntryKind(kind), digest) for key, kind, digest in entries], _data_offset(places))
            if os.fstat(fd).st_size < table.data_offset + sum(self._sizes[kind] for _, kind, _ in table.entries):
                raise ValueError("it is too short")
            return table
        finally:
            os.close(fd)

    def _index(self, path: Path, table: _Table) -> None:
        offset = table.data_offset
        with self._lock:
            for key, kind, digest in table.entries:
                self._entries[key, kind] = SavedEntry(path, offset, digest)
                offset += self._sizes[kind]

    def _forget(self, path: Path) -> None:
        with self._lock:
            for name in [name for name, entry in self._entries.items() if entry.file == path]:
                del self._entries[name]

    def _discard(self, path: Path, why: str) -> None:
        log.warning("a file of KV blocks is deleted", extra={"file": path, "why": why})
        self.corrupt += 1
        self._forget(path)
        remove_file(path, missing_ok=True)

    def _make_room(self, need_bytes: int) -> None:
        files = sorted(self._all_files())
        total = sum(size for _, _, size in files)
        for _, path, size in files:
            if total + need_bytes <= self._most_bytes:
                return
            self._forget(path)
            remove_file(path, missing_ok=True)
            total -= size

    def _all_files(self) -> Iterator[tuple[float, Path, int]]:
        """Yields each file of all models: when it was used last, its path and its size."""
        for path in self._root.glob(f"*/*{SUFFIX}"):
            try:
                found = path.lstat()
            except OSError:
                continue
            yield found.st_mtime, path, found.st_size


def _used_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _exactly(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise ValueError("it is too short")
    return data


def _data_offset(places: int) -> int:
    """Returns the offset of the data in a file with `places` places in its table."""
    return -(-(HEADER.size + ENTRY.size * places + DIGEST_BYTES) // ALIGNMENT) * ALIGNMENT


def _write_table(
    fd: int, entries: Sequence[tuple[bytes, EntryKind, bytes]], places: int, sizes: tuple[int, int]
) -> None:
    told = HEADER.pack(MAGIC, len(entries), places, *sizes) + b"".join(ENTRY.pack(*entry) for entry in entries)
    os.lseek(fd, 0, os.SEEK_SET)
    write_all(fd, told + xxhash.xxh3_128_digest(told))
