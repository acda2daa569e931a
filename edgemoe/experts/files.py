"""The files of a store: pages and blocks, checksums, writes that survive a crash, the lock. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from edgemoe.errors import StoreError

ALIGN = 4096  # experts start and end at multiples of it, in the file as in an arena's slot
BLOCK_BYTES = 4 << 20  # what one read takes and one digest covers
LOCK = ".lock"

Buffer = bytes | bytearray | memoryview


def padded(size_bytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-size_bytes // ALIGN) * ALIGN


class Checksum:
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
    """The checksum of a run from the digests of its blocks, in order."""
    if len(block_digests) == 1:
        return block_digests[0].hex()
    return str(xxhash.xxh3_128_hexdigest(b"".join(block_digests)))


def checksum(data: Buffer) -> str:
    """What the manifest says of `data`: use it to verify an expert that came from a peer."""
    whole = Checksum()
    whole.update(data)
    return whole.hexdigest()


def file_bytes(path: Path) -> int:
    """Size of a file of the store. Raises StoreError where there is none."""
    try:
        found = path.stat()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; is this a packed store?") from error
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a regular file")
    return found.st_size


def write_durably(path: Path, data: bytes) -> None:
    """Writes a small file so that after a crash it is there whole, or as it was before."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes renames in the directory survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def blocks(size_bytes: int) -> Iterator[slice]:
    """A run of bytes cut into blocks."""
    return (slice(at, min(at + BLOCK_BYTES, size_bytes)) for at in range(0, size_bytes, BLOCK_BYTES))


@contextmanager
def lock_store(store: Path, *, exclusive: bool) -> Iterator[None]:
    """Holds the store against packing and removal; exclusively, against reading too. Raises StoreError."""
    flags = os.O_RDWR | os.O_CREAT if exclusive else os.O_RDONLY
    fd = os.open(store / LOCK, flags | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"{store} is in use by another process, which packs or serves it") from error
        yield
    finally:
        os.close(fd)
