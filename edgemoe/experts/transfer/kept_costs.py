"""Keeps what transfers were measured to take from one start to the next, so that nothing is guessed at first."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgemoe.durable import replace_file
from edgemoe.experts.transfer.links import LinkStats

log = logging.getLogger(__name__)
SAVE_S = 60.0  # between two times that it is saved
SUMS = 5  # of a record
SLOWEST, FASTEST = 1e3, 1e13  # bytes/s that are believed
MOST_BYTES = 1 << 16  # of the file


class KeptCosts:
    """Owns the file of the records of links, by their names. The file may hold anything."""

    def __init__(self, path: Path | None, links: Mapping[str, LinkStats]) -> None:
        """Has the links go on from what was kept. None keeps nothing."""
        self._path, self._links = path, dict(links)
        self._saved: dict[str, list[float]] = {}
        if path is not None:
            for name, record in _read(path).items():
                if name in self._links and _is_sound(record):
                    self._links[name].restore(record)

    async def keep(self) -> None:
        """Saves every minute, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Writes what was measured since it was last saved."""
        records = {name: stats.record for name, stats in self._links.items() if stats.bytes_per_s}
        if self._path is None or records == self._saved:
            return
        self._saved = records
        try:
            replace_file(self._path, msgspec.json.encode(records))
        except OSError as error:
            log.warning(f"what transfers take could not be saved to {self._path}: {error}")


def _read(path: Path) -> dict[str, list[float]]:
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[float]])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _is_sound(record: list[float]) -> bool:
    """Returns whether it can be that of a link."""
    if len(record) != SUMS or not all(math.isfinite(each) and each > 0 for each in record):
        return False
    n, size_bytes, seconds, squares, _ = record
    return n >= 1 and SLOWEST <= size_bytes / seconds <= FASTEST and squares >= 0.99 * size_bytes * size_bytes / n
