"""A file on its way from the hub: counted, bounded and hashed as it is written, and gone on with after a death."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from edgemoe.durable import open_kept, remove_file, rename_file
from edgemoe.errors import HubError, StoreError
from edgemoe.store.files import BLOCK_BYTES
from edgemoe.store.hub.listing import HubFile

Tell = Callable[[int], None]  # of bytes more; fewer where some are fetched again


class Partial:
    """A file under a temporary name until `finish` finds it whole; what the hub's library writes into."""

    def __init__(self, file: HubFile, directory: Path, tell: Tell) -> None:
        """Opens what is there of the file, and reads it. Raises OSError."""
        self._file, self._path, self._tell = file, directory / file.name, tell
        self._temporary = directory / f"{file.name}.{file.digest[:16]}.part"
        self._position, self._digest = 0, file.hasher()
        self._opened = os.fdopen(open_kept(self._temporary, 0o644), "r+b")
        self._opened.seek(0)
        while block := self._opened.read(BLOCK_BYTES):
            self._count(block)
        if self._position > file.bytes:
            self.start_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()
        if not self._position:
            remove_file(self._temporary, missing_ok=True)

    @property
    def is_complete(self) -> bool:
        return self._position == self._file.bytes

    def write(self, data: bytes) -> int:
        """Writes what came next. Raises StoreError; HubError where there is more than the file is said to have."""
        if self._position + len(data) > self._file.bytes:
            raise HubError(f"{self._file.name}: the hub sends more than the {self._file.bytes} bytes that it names")
        try:
            self._opened.write(data)
        except OSError as error:  # told apart here from what the connection may raise
            raise StoreError(f"{self._temporary}: {error.strerror}; fetching stopped, run it again") from error
        self._count(data)
        return len(data)

    def tell(self) -> int:
        """Returns how many bytes there are."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Goes back to the start, the only place that there is to go to."""
        if (position, whence) != (0, os.SEEK_SET):
            raise OSError(f"{self._temporary} is written from its start, or at its end")
        self.start_over()
        return 0

    def truncate(self) -> int:
        """Ends the file where it is."""
        return self._opened.truncate(self._position)

    def start_over(self) -> None:
        """Throws away what has come."""
        self._tell(-self._position)
        self._opened.seek(0)
        self._opened.truncate(0)
        self._position, self._digest = 0, self._file.hasher()

    def finish(self) -> bool:
        """Gives the file its name; false, with nothing left of it, where its bytes are not those that the hub names."""
        if self._digest.hexdigest() != self._file.digest:
            self.start_over()
            return False
        self._opened.flush()
        os.fsync(self._opened.fileno())
        rename_file(self._temporary, self._path.name)
        return True

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._position += len(data)
        self._tell(len(data))
