"""The highest epoch that this box has seen, kept in a small fsynced file: no lower one is ever obeyed again.

    EPOCH SUM     in the file: the number, and the xxh3-64 sum of its digits in hexadecimal

A file without a sum, as 0.1's first builds wrote it, is believed where its number is not far above what else is known.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from edgemoe.durable import read_plain, replace_file
from edgemoe.errors import CoordUnavailable, EpochLeap, ServiceError, StaleEpoch

MAX_LEAP = 10**6  # above what is known: more elections than that nobody has missed
MAX_FILE_BYTES = 64


class EpochFence:
    """Admits epochs that do not fall. Survives kill -9 and, as far as the disk keeps its word, power loss."""

    def __init__(self, path: Path, known: int = 0) -> None:
        """`known` is an epoch that this box has seen by other evidence. Raises ServiceError for a damaged file."""
        self._path, self._known = path, known
        self._highest = self._read()

    @property
    def highest(self) -> int:
        return self._highest

    def admit(self, epoch: int) -> None:
        """Remembers `epoch` before anything is done in its name.

        Raises StaleEpoch where a higher one was seen, EpochLeap where it cannot be right, CoordUnavailable where it
        cannot be kept; nothing is done then.
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
        """Returns why `epoch` cannot be right; "" where it can."""
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
