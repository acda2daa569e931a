"""Measures the rate, the cost and the idle share of links, and keeps these figures from one start to the next."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from edgemoe.durable import replace_file

Clock = Callable[[], float]
RECENT, KEPT = 32, 8.0  # transfers with single rates remembered; transfers that an earlier start's record counts as


class LinkStats:
    """Measures rate, cost and idle share of one link by its transfers; recent ones count most.

    Transfers may overlap. Each is charged the time since the previous one ended, so that the sum is the link's busy
    time.
    """

    decay = 0.98  # weight of all earlier transfers against the next one
    memory_s = 1.0  # how far back `idle_share` looks

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._active = 0
        self._mark_s = clock()  # busy time is charged up to here
        self._busy_share = 0.0  # at _busy_at_s
        self._busy_at_s = self._mark_s
        self._sums = [0.0] * 5  # decayed n, bytes, seconds, bytes^2, bytes * seconds
        self._rates: deque[float] = deque(maxlen=RECENT)  # bytes/s

    def begin(self) -> None:
        """Notes the start of a transfer."""
        if not self._active:
            self._mark_s = self._clock()
        self._active += 1

    def end(self, size_bytes: int, seconds: float | None = None) -> None:
        """Adds a transfer that ended; `seconds` is its time where the link has a clock of its own."""
        now = self._clock()
        self._active -= 1
        self.observe(size_bytes, now - self._mark_s if seconds is None else seconds)
        self._mark_s = now

    def abort(self) -> None:
        """Drops a transfer that failed."""
        self._active -= 1
        self._mark_s = self._clock()

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Adds a transfer of known duration that ends now."""
        self._rates.append(size_bytes / max(seconds, 1e-9))
        new = (1.0, size_bytes, seconds, size_bytes * size_bytes, size_bytes * seconds)
        self._sums = [self.decay * old + x for old, x in zip(self._sums, new, strict=True)]
        now = self._clock()
        kept = math.exp(-(now - self._busy_at_s) / self.memory_s)
        self._busy_share = min(1.0, kept * self._busy_share + 1.0 - math.exp(-seconds / self.memory_s))
        self._busy_at_s = now

    @property
    def bytes_per_s(self) -> float:
        """Returns bytes over busy time; 0 before the first transfer."""
        return self._sums[1] / self._sums[2] if self._sums[2] > 0 else 0.0

    @property
    def unhindered_bytes_per_s(self) -> float:
        """The rate that a quarter of the last transfers exceeded; 0 before the first.

        Slower transfers mostly ended on time, but the thread that notices their end waited for the processor.
        """
        rates = sorted(self._rates)
        return rates[-(len(rates) // 4) - 1] if rates else 0.0

    @property
    def seconds(self) -> float:
        """Returns the mean busy time of a transfer; 0 before the first."""
        return self._sums[2] / self._sums[0] if self._sums[0] > 0 else 0.0

    @property
    def idle_share(self) -> float:
        """Returns the share of about the last second in which the link was idle."""
        if self._active:
            return 0.0
        return 1.0 - self._busy_share * math.exp(-(self._clock() - self._busy_at_s) / self.memory_s)

    def cost(self) -> tuple[float, float]:
        """Returns seconds per transfer and per byte, by least squares. The first is 0 if all sizes are equal."""
        n, x, y, xx, xy = self._sums
        if not n or not x:
            return 0.0, 0.0
        spread = n * xx - x * x
        if spread <= 1e-9 * n * xx:
            return 0.0, y / x
        slope = max(0.0, (n * xy - x * y) / spread)
        return max(0.0, (y - slope * x) / n), slope

    @property
    def record(self) -> list[float]:
        """The sums behind rate and cost, for `restore`."""
        return self._sums.copy()

    def restore(self, record: Sequence[float]) -> None:
        """Continues from an earlier record, of one transfer at least."""
        share = min(1.0, KEPT / record[0])
        self._sums = [share * each for each in record]
        self._rates.append(self.bytes_per_s)


log = logging.getLogger(__name__)
SAVE_S = 60.0  # between two saves
SUMS = 5  # numbers in a record
SLOWEST, FASTEST = 1e3, 1e13  # bytes/s that a sound record may give
MOST_BYTES = 1 << 16  # most bytes of the file


class SavedLinkStats:
    """Owns the file with the records of links, by name. Unsound contents are ignored."""

    def __init__(self, path: Path | None, links: Mapping[str, LinkStats]) -> None:
        """Restores the links' records. Without a path, saves nothing."""
        self._path, self._links = path, dict(links)
        self._saved: dict[str, list[float]] = {}
        if path is not None:
            for name, record in _read(path).items():
                if name in self._links and _is_sound(record):
                    self._links[name].restore(record)

    async def save_periodically(self) -> None:
        """Saves the records every minute, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Writes the records if they have changed since the last save."""
        records = {name: stats.record for name, stats in self._links.items() if stats.bytes_per_s}
        if self._path is None or records == self._saved:
            return
        self._saved = records
        try:
            replace_file(self._path, msgspec.json.encode(records))
        except OSError as error:
            log.warning(f"measured transfer times could not be saved to {self._path}: {error}")


def _read(path: Path) -> dict[str, list[float]]:
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[float]])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _is_sound(record: list[float]) -> bool:
    """Whether a record can be a link's."""
    if len(record) != SUMS or not all(math.isfinite(each) and each > 0 for each in record):
        return False
    n, size_bytes, seconds, squares, _ = record
    return n >= 1 and SLOWEST <= size_bytes / seconds <= FASTEST and squares >= 0.99 * size_bytes * size_bytes / n
