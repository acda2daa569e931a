"""How fast experts are read from a disk. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from edgemoe.durable import NewFile, make_folder, write_all
from edgemoe.store.files import BLOCK_BYTES, PageFile, page_memory
from edgemoe.types.experts import padded

LEAST_READINGS, MOST_READINGS, READINGS_S = 3, 50, 0.2  # of each size and number
DISK_BYTES, DISK_THREADS = 256 << 20, 8  # as many threads as the store reads with
READING_BYTES = 16 << 20  # that one reading takes at most
ROOM_BYTES = 4 * DISK_BYTES  # free, so that a measurement fills no disk
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def disk_rate(directory: Path) -> float:
    """Returns the bytes a second that experts are read with from the disk of `directory`; 0: not measured."""
    (taken_s,) = read_times(directory, [BLOCK_BYTES], [DISK_THREADS])
    return DISK_THREADS * BLOCK_BYTES / taken_s[0] if taken_s else 0.0


def read_times(directory: Path, expert_bytes: Sequence[int], at_once: Sequence[int]) -> list[tuple[float, ...]]:
    """Returns for each size the seconds of reading 1, 2, ... (`at_once`) experts at once; (): not measured.

    The smallest and the largest size are read; between them time grows with the bytes.
    """
    with probe_file(directory) as path:
        if path is None:
            return [()] * len(expert_bytes)
        with PageFile(path) as file, ThreadPoolExecutor(DISK_THREADS) as threads:
            sizes = sorted({min(expert_bytes), max(expert_bytes)})
            times = [[_together_s(file, threads, size, count) for size in sizes] for count in at_once]
            return [tuple(float(np.interp(size, sizes, found)) for found in times) for size in expert_bytes]


def _together_s(file: PageFile, threads: ThreadPoolExecutor, size: int, count: int) -> float:
    """Returns the median time of reading `count` experts at once, each from a place of its own.

    Of `count` experts beyond READING_BYTES, reads parts and scales the time.
    """
    whole = padded(size)
    size = min(whole, READING_BYTES // count)
    rooms, taken = [page_memory(size) for _ in range(count)], list[float]()
    places = range(0, DISK_BYTES - size + 1, size)
    ends_s = time.perf_counter() + READINGS_S
    while len(taken) < LEAST_READINGS or (time.perf_counter() < ends_s and len(taken) < MOST_READINGS):
        chosen = random.choices(places, k=count)
        began_s = time.perf_counter()
        list(threads.map(lambda room, place: _expert(file, room, place), rooms, chosen))
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken) * whole / size


def _expert(file: PageFile, room: memoryview, place: int) -> None:
    for begin in range(0, len(room), BLOCK_BYTES):
        size = min(BLOCK_BYTES, len(room) - begin)
        file.fill(room[begin : begin + size], size, place + begin)


@contextlib.contextmanager
def probe_file(directory: Path) -> Iterator[Path | None]:
    """Yields a file of DISK_BYTES that no cache of the system has; None where there is no room for it, or no leave."""
    file = _new_file(directory)
    if file is None:
        yield None
        return
    with file:
        piece = os.urandom(BLOCK_BYTES)
        for _ in range(DISK_BYTES // BLOCK_BYTES):
            write_all(file.fd, piece)
        os.fsync(file.fd)
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(f"/proc/self/fd/{file.fd}")


def _new_file(directory: Path) -> NewFile | None:
    try:
        make_folder(directory)
        status = os.statvfs(directory)
        if status.f_bavail * status.f_frsize < ROOM_BYTES:
            return None
        return NewFile(directory / ".probe")
    except OSError as error:
        if error.errno in NOT_ALLOWED:
            return None
        raise
