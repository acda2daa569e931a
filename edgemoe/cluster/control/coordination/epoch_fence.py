"""The highest epoch that this box has seen, kept in a small fsynced file: a leader of a lower one is never followed.

The file holds the number and the xxh3-64 sum of its digits in hexadecimal. Early builds wrote no sum: such a file is
accepted if its number is not far above the epoch of the plan beside it.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from edgemoe.durable import read_plain, replace_file
from edgemoe.errors import CoordUnavailable, EpochLeap, ServiceError, StaleEpoch

MAX_LEAP = 10**6  # above the highest known epoch; no box misses more elections than that
MAX_FILE_BYTES = 64


class EpochFence:
    """Admits epochs that do not fall. Survives kill -9, and power loss if the disk honours fsync."""

    def __init__(self, path: Path, known: int = 0) -> None:
        """Reads the file; `known` is an epoch known from elsewhere. Raises ServiceError for a damaged file."""
        self._path, self._known = path, known
        self._highest = self._read()

    @property
    def highest(self) -> int:
        return self._highest

    def admit(self, epoch: int) -> None:
        """Keeps `epoch` on disk, before this box acts in its name.

        Raises StaleEpoch if a higher one was seen, EpochLeap if it is impossible, CoordUnavailable if the disk fails.
        """
        if (why := self.reject_reason(epoch)) != "":
            raise EpochLeap(why)
        if epoch < self._highest:
            raise StaleEpoch(f"a command of epoch {epoch} is not obeyed: epoch {self._highest} has been seen")
        if epoch > self._highest:
            try:
                replace_file(self._path, _line(epoch))
            except OSError as error:
                raise CoordUnavailable(f"{self._path}: epoch {epoch} cannot be kept: {error.strerror}") from error
            self._highest = epoch

    def reject_reason(self, epoch: int) -> str:
        """Returns why `epoch` is impossible; "" if it is possible."""
        if epoch <= self._highest + MAX_LEAP:
            return ""
        return (
            f"epoch {epoch} is more than {MAX_LEAP} above {self._highest}, the highest seen here: a damaged epoch file "
            "or state of the agreement; stop that box, and give its file `epoch` what the others have"
        )

    def _read(self) -> int:
        try:
            text = read_plain(self._path, MAX_FILE_BYTES).strip()
        except FileNotFoundError:
            return 0
        digits, _, its_sum = text.partition(b" ")
        if not digits.isdigit() or (its_sum != b"") != (_line(int(digits)).strip() == text):
            raise ServiceError(f"{self._path}: is damaged; restore it, or remove it if the whole cluster is new")
        if not its_sum and int(digits) > self._known + MAX_LEAP:
            raise ServiceError(
                f"{self._path}: holds an epoch far above that of the plan kept beside it ({self._known}); "
                "restore it, or remove it if the whole cluster is new"
            )
        return int(digits)


def _line(epoch: int) -> bytes:
    digits = str(epoch).encode()
    return digits + b" " + xxhash.xxh3_64_hexdigest(digits).encode() + b"\n"
