"""How tests wait: for a condition, for so long at most."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
WITHIN_S = 600.0  # generous: only a failure costs it, and machines are starved at times
POLL_S = 2e-3
REST = 3.0  # times as long as a question takes, until it is asked again: waiting leaves the processor to others
LONGEST_REST_S = 0.1


def wait_until(
    condition: Callable[[], T], within_s: float = WITHIN_S, meanwhile: Callable[[], object] | None = None
) -> T:
    """Waits until `condition` is true and returns its value. Calls `meanwhile` in between, or sleeps."""
    end_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"it did not happen within {within_s:g} s"
        if meanwhile is None:
            time.sleep(POLL_S)
        else:
            meanwhile()
    return found


async def until(condition: Callable[[], T | Awaitable[T]], within_s: float = WITHIN_S) -> T:
    """Waits until `condition`, which may be async, is true, and returns its value."""
    end_s = time.monotonic() + within_s
    while True:
        asked_s = time.monotonic()
        found = condition()
        if inspect.isawaitable(found):
            async with asyncio.timeout(max(end_s - time.monotonic(), POLL_S)):
                found = await found
        if found:
            return found
        now_s = time.monotonic()
        assert now_s < end_s, f"it did not happen within {within_s:g} s"
        await asyncio.sleep(min(max(POLL_S, REST * (now_s - asked_s)), LONGEST_REST_S))
