"""Loops that look again and again, in virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from support.virtual import VirtualLoop

from edgemoe.ticking import until_tick


@pytest.mark.parametrize("begins_s", [0.0, 0.013, 7.77, 100_000.1])
def test_loops_with_any_start_wake_together_at_multiples_of_their_periods(begins_s: float) -> None:
    loop = VirtualLoop()
    loop.jumping.now += begins_s
    wakes: dict[float, list[float]] = {0.25: [], 0.5: [], 1.0: []}

    async def wake_at_ticks(period_s: float, late_s: float) -> None:
        await asyncio.sleep(late_s)
        while True:
            await asyncio.sleep(until_tick(period_s))
            wakes[period_s].append(round(loop.time(), 6))

    async def run() -> None:
        tasks = [asyncio.ensure_future(wake_at_ticks(period_s, period_s * 0.3)) for period_s in wakes]
        await asyncio.sleep(60.2)
        for task in tasks:
            task.cancel()

    loop.run_until_complete(run())
    loop.close()
    for period_s, times in wakes.items():
        assert len(times) == pytest.approx(60 / period_s, abs=2)
        assert all(later - earlier == pytest.approx(period_s) for earlier, later in itertools.pairwise(times))
    assert set(wakes[1.0]) | set(wakes[0.5]) <= set(wakes[0.25])
