"""The files of a store: blocks and checksums, reads of whole pages, the lock.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import numpy as np
import xxhash

from edgemoe.durable import open_kept
from edgemoe.errors import StoreError, StoreInUse, write_remedy
from edgemoe.types.experts import PAGE_BYTES, padded

BLOCK_BYTES = 4 << 20  # of one read and one digest
LOCK = ".lock"
ARRIVING = ".arriving"  # the lock of a process that waits for shards and packs them as they come
LOCK_WAIT_S = 2.0
SEAL_BYTES = 8  # of the checksum behind each row of a table
SPARE_BYTES = 16 << 20  # manifest, directories
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)

Buffer = bytes | bytearray | memoryview


class BlockChecksum:
    """xxh3-128 of a run of bytes; where it is longer than one block, of its blocks' digests.

    So the blocks of a large expert can be read and verified side by side.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            if self._filled == BLOCK_BYTES:
                self._blocks.append(self._block.digest())
                self._block.reset()
                self._filled = 0
            part = view[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += len(part)
            view = view[len(part) :]

    def hexdigest(self) -> str:
        return combine([*self._blocks, self._block.digest()])


def combine(block_digests: list[bytes]) -> str:
    """Returns the checksum of a run from the digests of its blocks, in order."""
    if len(block_digests) == 1:
        return block_digests[0].hex()
    return str(xxhash.xxh3_128_hexdigest(b"".join(block_digests)))


def checksum(data: Buffer) -> str:
    """Returns the checksum of `data` as in the manifest: verifies experts that came from peers."""
    whole = BlockChecksum()
    whole.update(data)
    return whole.hexdigest()


def row_seal(row: Buffer, number: int) -> int:
    """Returns the checksum of one row of a table, which differs for equal rows of other numbers."""
    return int(xxhash.xxh3_64_intdigest(row, seed=number))


class PageFile:
    """A file open for reads past the page cache, and for reads through it."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Opens the file; without `direct` every read goes through the page cache. Raises OSError."""
        self.path = path
        self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = open_direct(path, os.O_RDONLY) if direct else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def fill(self, view: memoryview, size_bytes: int, offset: int) -> None:
        """Reads `size_bytes` into the start of `view`, and up to its end where that makes whole pages.

        Raises OSError, and EOFError where the file is too short.
        """
        address = np.frombuffer(view, np.uint8).ctypes.data
        direct = self._direct
        done = 0
        while done < size_bytes:
            whole_pages = (len(view) - done) // PAGE_BYTES * PAGE_BYTES
            aligned = (address + done) % PAGE_BYTES == (offset + done) % PAGE_BYTES == 0
            try:
                if direct is not None and whole_pages and aligned:
                    got = os.preadv(direct, [view[done : done + whole_pages]], offset + done)
                else:
                    got = os.preadv(self._buffered, [view[done:size_bytes]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or direct is None:
                    raise
                direct = None  # the file system takes O_DIRECT when it opens a file, but not when it reads
                continue
            if not got:
                raise EOFError(f"the file ends at byte {offset + done}")
            done += got


def open_direct(path: Path, flags: int) -> int | None:
    """Returns a descriptor that bypasses the page cache; None where the file system has no such thing."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


def page_memory(size_bytes: int) -> memoryview:
    """Allocates memory that begins at a page."""
    return memoryview(mmap.mmap(-1, size_bytes))


def range_checksum(
    file: PageFile, offset: int, size_bytes: int, *, threads: int = 1, report: Callable[[float], None] | None = None
) -> str:
    """Returns the checksum of a run of a file, read by `threads` threads. Calls `report` with the share done.

    Raises OSError, and EOFError where the file is too short.
    """
    rooms: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        rooms.put(page_memory(BLOCK_BYTES))

    def digest(block: slice) -> bytes:
        room, size = rooms.get(), block.stop - block.start
        try:
            file.fill(room[: padded(size)], size, offset + block.start)
            return xxhash.xxh3_128_digest(room[:size])
        finally:
            rooms.put(room)

    digests = []
    ahead: deque[Future[bytes]] = deque()  # few, however long the run
    with ThreadPoolExecutor(threads, "verifier") as pool:
        for block in blocks(size_bytes):
            if len(ahead) == 2 * threads:
                digests.append(ahead.popleft().result())
            ahead.append(pool.submit(digest, block))
            if report is not None:
                report(block.start / size_bytes)
        digests += [done.result() for done in ahead]
    return combine(digests)


def header_bytes(file: PageFile) -> int:
    """Returns the offset of the first tensor of a safetensors file. Raises OSError, EOFError."""
    prefix = memoryview(bytearray(8))
    file.fill(prefix, 8, 0)
    return 8 + int.from_bytes(prefix, "little")


def file_bytes(path: Path) -> int:
    """Returns the size of a file of the store. Raises StoreError where there is none."""
    try:
        found = path.stat()
    except OSError as error:
        remedy = "; is this a packed store?" if isinstance(error, FileNotFoundError) else ""
        raise StoreError(f"{path} cannot be read: {error.strerror}{remedy}") from error
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a regular file")
    return found.st_size


def blocks(size_bytes: int) -> Iterator[slice]:
    """Cuts a run of bytes into blocks."""
    return (slice(at, min(at + BLOCK_BYTES, size_bytes)) for at in range(0, size_bytes, BLOCK_BYTES))


@contextmanager
def lock_store(store: Path, *, exclusive: bool, lock: str = LOCK) -> Iterator[None]:
    """Holds the store against packing and removal; exclusively, against reading too. Raises StoreInUse.

    A reader waits for LOCK_WAIT_S, because a process that checks for shards to pack holds it for a moment.
    """
    fd = open_kept(store / lock, 0o644, writable=exclusive)
    try:
        ends = time.monotonic() + (0.0 if exclusive else LOCK_WAIT_S)
        while not _locked(fd, exclusive):
            if time.monotonic() >= ends:
                raise StoreInUse(f"{store} is in use by another process, which packs or serves it")
            time.sleep(0.02)
        if exclusive:
            _sign(fd, str(os.getpid()))
        yield
        if exclusive:
            _sign(fd, "")
    finally:
        os.close(fd)


def note_use(store: Path) -> None:
    """Sets the store's time of last use, if it can be written to."""
    with contextlib.suppress(OSError):
        fd = open_kept(store / LOCK, writable=False)
        try:
            os.utime(fd)
        finally:
            os.close(fd)


def last_used_s(store: Path) -> float:
    """Returns when the store was last packed or served, in seconds since 1970; 0 where that is not known."""
    try:
        return (store / LOCK).stat().st_mtime
    except OSError:
        return 0.0


def is_in_use(store: Path) -> bool:
    """Returns whether a process packs, serves or verifies the store, or waits for its shards."""
    return any(_is_held(store / lock) for lock in (LOCK, ARRIVING))


def _is_held(lock: Path) -> bool:
    try:
        fd = open_kept(lock, writable=False)
    except OSError:
        return False
    try:
        return not _locked(fd, exclusive=True)
    finally:
        os.close(fd)


def lock_holder(store: Path) -> str:
    """Returns the id of the process that holds the store exclusively, as far as it could say so; else ""."""
    try:
        fd = open_kept(store / LOCK, writable=False)
    except OSError:
        return ""
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        return file.read(20)


def _sign(fd: int, who: str) -> None:
    with contextlib.suppress(OSError):  # a store can be removed from a full disk too
        os.ftruncate(fd, 0)
        os.pwrite(fd, who.encode(), 0)


def _locked(fd: int, exclusive: bool) -> bool:
    """Takes the lock if it is free."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def os_errors_as_store_error(dest: Path, work: str = "packing") -> Iterator[None]:
    """Turns OSError into a StoreError with the work that stopped, and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = write_remedy(error, "run it again")
        lacks_folder = error.errno == errno.ENOENT and Path(error.filename or dest) in (dest, *dest.parents)
        if error.errno in NOT_WRITABLE or lacks_folder:
            remedy = "name a directory that can be written with model.store_dir"
        raise StoreError(f"{error.filename or dest}: {error.strerror}; {work} stopped, {remedy}") from error
