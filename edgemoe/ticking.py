"""One common beat for all periodic work, so that an idle process wakes once for all of it."""

from __future__ import annotations

import asyncio

SOON = 0.25  # of a period: a tick that is as near as that is left out


def until_tick(period_s: float) -> float:
    """Returns the seconds until the running loop's clock shows a multiple of the period: 1/4 to 5/4 of it."""
    left_s = period_s - asyncio.get_running_loop().time() % period_s
    return left_s if left_s > SOON * period_s else left_s + period_s
