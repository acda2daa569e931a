"""Logs what a peer can cause as often as it likes, without letting it fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_KINDS = 256  # told apart; beyond it a line's peers count as one
EVERY_S = 60.0


class SparingLog:
    """Of each line and peer the 1st, 2nd, 4th, 8th, ... time, and any that comes a minute after the last one logged."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}  # how often, and when it was last logged

    def __call__(self, level: int, line: str, peer: str = "", **fields: object) -> None:
        """Logs `line` if it is its turn, with how often it came; `exc_info=True` adds what is being handled."""
        key = (line, peer) if (line, peer) in self._seen or len(self._seen) < MAX_KINDS else (line, "")
        times, logged_s = self._seen.get(key, (0, float("-inf")))
        times, now_s = times + 1, self._clock()
        due = times & (times - 1) == 0 or now_s - logged_s >= EVERY_S
        self._seen[key] = (times, now_s if due else logged_s)
        if due:
            exc_info = bool(fields.pop("exc_info", False))
            self._log.log(level, line, exc_info=exc_info, extra={"peer": peer, "times": times, **fields})
