"""Copies of a store on several disks: each block is read from the copy that will have it soonest.

A copy that fails a read is left alone for a while, and another one gives the block.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgemoe.errors import StoreError
from edgemoe.store.files import LOCK, PageFile, lock_store
from edgemoe.store.manifest import Manifest

log = logging.getLogger(__name__)

KEPT = 0.95  # of the weight of a block in the measured speed, with each further block
FORGOTTEN_S = 10.0  # without a read, after which a copy's speed is unknown
LEFT_ALONE_S = 60.0  # after a failed read


@dataclass(eq=False)
class StoreCopy:
    """One copy's open files by layer, and how fast it gives their bytes."""

    directory: Path
    files: list[PageFile | None]
    reading_bytes: int = 0  # of reads under way
    read_bytes: int = 0  # in all
    failed_at: float = field(default=-LEFT_ALONE_S)
    _bytes: float = 0.0  # read within `_busy_s`; older reads count less
    _busy_s: float = 0.0
    _last: float = 0.0  # when a read last began or ended

    def seconds(self, size_bytes: int, now: float) -> float:
        """Estimates the end of a read that begins now. Where the speed is unknown, one read finds it out."""
        if not self._bytes or self._is_forgotten(now):
            return math.inf if self.reading_bytes else 0.0
        return (self.reading_bytes + size_bytes) * self._busy_s / self._bytes

    def begin(self, size_bytes: int, now: float) -> None:
        """Counts a read that begins."""
        if self._is_forgotten(now):
            self._bytes = self._busy_s = 0.0
        self._pass(now)
        self.reading_bytes += size_bytes

    def end(self, size_bytes: int, now: float, *, failed: bool) -> None:
        """Counts a read that has ended."""
        self._pass(now)
        self.reading_bytes -= size_bytes
        if failed:
            self.failed_at = now
        else:
            self._bytes, self._busy_s = self._bytes * KEPT + size_bytes, self._busy_s * KEPT
            self.read_bytes += size_bytes

    def _is_forgotten(self, now: float) -> bool:
        return not self.reading_bytes and now - self._last > FORGOTTEN_S

    def _pass(self, now: float) -> None:
        if self.reading_bytes:
            self._busy_s += now - self._last
        self._last = now


class StoreCopies:
    """All copies of a store, its own files first. Thread-safe."""

    def __init__(
        self,
        copies: Iterable[StoreCopy],
        clock: Callable[[], float] = time.monotonic,
        lock: threading.Lock | None = None,
    ) -> None:
        self.copies = tuple(copies)
        self._clock, self._lock = clock, lock or threading.Lock()
        self._logged: set[str] = set()  # at most one for each expert and copy

    def only(self, copy: StoreCopy) -> StoreCopies:
        """Returns one of the copies alone."""
        return StoreCopies([copy], self._clock, self._lock)

    def log_once(self, fault: StoreError) -> None:
        """Logs a fault, the same one only once."""
        if str(fault) not in self._logged:
            self._logged.add(str(fault))
            log.warning("%s", fault)

    @contextmanager
    def reading(self, copy: StoreCopy, size_bytes: int) -> Iterator[None]:
        """Counts a read of `copy` while it runs; one that raises OSError or EOFError failed."""
        with self._lock:
            copy.begin(size_bytes, self._clock())
        failed = False
        try:
            yield
        except (OSError, EOFError):
            failed = True
            raise
        finally:
            with self._lock:
                copy.end(size_bytes, self._clock(), failed=failed)

    def soonest(self, size_bytes: int) -> list[StoreCopy]:
        """Returns the copies, the best for a read of `size_bytes` first. Copies that failed of late come last."""
        if len(self.copies) == 1:
            return [*self.copies]
        with self._lock:
            now = self._clock()
            return sorted(
                self.copies,
                key=lambda copy: (
                    now - copy.failed_at < LEFT_ALONE_S,
                    copy.seconds(size_bytes, now),
                    copy.reading_bytes,
                    copy.read_bytes,
                ),
            )


def open_copy(directory: Path, manifest: Manifest, opened: ExitStack) -> StoreCopy:
    """Opens every layer's file of a copy and keeps others from changing it. Raises StoreError."""
    if (directory / LOCK).exists():
        opened.enter_context(lock_store(directory, exclusive=False))
    try:
        files = [
            opened.enter_context(PageFile(directory / layer.file)) if layer.experts else None
            for layer in manifest.layers
        ]
    except OSError as error:
        raise StoreError(f"{error.filename} cannot be opened: {error.strerror}") from error
    return StoreCopy(directory, files)


def open_mirrors(folders: Iterable[Path], store: Path, manifest: Manifest, opened: ExitStack) -> list[StoreCopy]:
    """Opens the copies of `store` in these folders, under its name. One that cannot be used is only logged."""
    found = []
    for folder in folders:
        directory = folder / store.name
        with ExitStack() as closing:
            try:
                if directory.resolve() == store.resolve():
                    raise StoreError("it is the store itself")
                if Manifest.load(directory).digest != manifest.digest:
                    raise StoreError("its content is another")
                found.append(open_copy(directory, manifest, closing))
            except (StoreError, OSError) as error:
                log.warning(
                    "model.mirrors: %s is not used (%s). Copy the store there again: cp -r %s %s/",
                    *(directory, error, store, folder),
                )
            else:
                opened.push(closing.pop_all())
                log.info("experts are read from %s, too", directory)
    return found
