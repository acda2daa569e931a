"""Limits log lines that a peer can cause at will, so that it cannot fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_KINDS = 256  # (line, peer) pairs counted separately; beyond it a line's peers are counted together
EVERY_S = 60.0


class RateLimitedLog:
    """Logs each line, by peer, the 1st, 2nd, 4th, 8th, ... time, and EVERY_S after the last logged one."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}  # how often, and when it was last logged

    def __call__(self, level: int, line: str, peer: str = "", **fields: object) -> None:
        """Logs `line` if it is due, with its count; `exc_info=True` adds the exception being handled."""
        key = (line, peer) if (line, peer) in self._seen or len(self._seen) < MAX_KINDS else (line, "")
        times, logged_s = self._seen.get(key, (0, float("-inf")))
        times, now_s = times + 1, self._clock()
        due = times & (times - 1) == 0 or now_s - logged_s >= EVERY_S
        self._seen[key] = (times, now_s if due else logged_s)
        if due:
            exc_info = bool(fields.pop("exc_info", False))
            self._log.log(level, line, exc_info=exc_info, extra={"peer": peer, "times": times, **fields})
