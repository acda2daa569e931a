"""Wakes threads that wait until residency has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiters:
    """Knows how many threads wait, so that nobody takes a lock where none does."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def wake(self) -> None:
        """Wakes all."""
        if self.count:
            with self._changed:
                self._changed.notify_all()

    def wait_for(self, changed: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `changed`. Returns False where it has not within `timeout_s`."""
        with self._changed:
            self.count += 1  # before looking, so that no change goes unnoticed
            try:
                return self._changed.wait_for(changed, timeout_s)
            finally:
                self.count -= 1
