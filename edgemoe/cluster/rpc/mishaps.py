"""Counts and logs messages that failed on a channel, without filling the log."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from edgemoe.errors import WireError
from edgemoe.telemetry.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)


class Mishaps:
    """Counts failed messages; each failure affects its message alone."""

    def __init__(self, channel: str) -> None:
        self.rejected = 0  # messages that could not be read or came from an unknown sender
        self.failed = 0  # messages whose handling raised an unexpected error
        self._channel = channel
        self._say = RateLimitedLog(log)

    def reject(self, peer: str, error: WireError) -> None:
        self.rejected += 1
        self._say(logging.WARNING, "message dropped", peer, channel=self._channel, why=str(error))

    @contextmanager
    def contained(self, peer: str) -> Iterator[None]:
        """What the `with` block raises ends that block alone."""
        try:
            yield
        except Exception:
            self.fail(peer)

    async def contain(self, peer: str, work: Coroutine[None, None, None]) -> None:
        """Runs what one message or request has to do; what it raises ends nothing else."""
        with self.contained(peer):
            await work

    def fail(self, peer: str) -> None:
        """Counts and logs the unexpected exception that is being handled."""
        self.failed += 1
        self._say(
            logging.ERROR, "a message failed here", peer, channel=self._channel, failed=self.failed, exc_info=True
        )
