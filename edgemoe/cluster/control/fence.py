"""The highest epoch that this box has seen, kept in a small fsynced file: no lower one is ever obeyed again."""

from __future__ import annotations

import os
from pathlib import Path

from edgemoe.errors import CoordUnavailable, ServiceError, StaleEpoch


class EpochFence:
    """Admits epochs that do not fall. Survives kill -9 and, as far as the disk keeps its word, power loss."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._highest = self._read()

    @property
    def highest(self) -> int:
        return self._highest

    def admit(self, epoch: int) -> None:
        """Remembers `epoch` before anything is done in its name.

        Raises StaleEpoch where a higher one was seen, CoordUnavailable where it cannot be kept; nothing is done then.
        """
        if epoch < self._highest:
            raise StaleEpoch(f"a command of epoch {epoch} is not obeyed: epoch {self._highest} has been seen")
        if epoch > self._highest:
            try:
                self._write(epoch)
            except OSError as error:
                raise CoordUnavailable(f"{self._path}: epoch {epoch} cannot be kept: {error.strerror}") from error
            self._highest = epoch

    def _read(self) -> int:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return 0
        if not text.strip().isdecimal():
            raise ServiceError(f"{self._path}: holds no epoch; restore it, or remove it if the whole cluster is new")
        return int(text)

    def _write(self, epoch: int) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, f"{epoch}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
