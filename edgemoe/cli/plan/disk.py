"""How fast experts are read from a disk. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgemoe.store.files import BLOCK_BYTES, PageFile, page_memory

DISK_BYTES, DISK_THREADS, ROUNDS = 256 << 20, 8, 3  # as many threads as the store reads with


def disk_rate(directory: Path) -> float:
    """Returns the bytes a second that experts are read with from the disk of `directory`; 0 where there is no room."""
    directory.mkdir(parents=True, exist_ok=True)
    status = os.statvfs(directory)
    if status.f_bavail * status.f_frsize < 4 * DISK_BYTES:
        return 0.0
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
        piece = os.urandom(BLOCK_BYTES)
        for _ in range(DISK_BYTES // BLOCK_BYTES):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return max(_reads(Path(file.name)))


def _reads(path: Path) -> Iterator[float]:
    """Yields the rate of each of a few readings."""
    rooms = [page_memory(BLOCK_BYTES) for _ in range(DISK_THREADS)]
    with PageFile(path) as file, ThreadPoolExecutor(DISK_THREADS) as threads:

        def read(thread: int) -> None:
            for block in range(thread, DISK_BYTES // BLOCK_BYTES, DISK_THREADS):
                file.fill(rooms[thread], BLOCK_BYTES, block * BLOCK_BYTES)

        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            list(threads.map(read, range(DISK_THREADS)))
            yield DISK_BYTES / (time.perf_counter() - began_s)
