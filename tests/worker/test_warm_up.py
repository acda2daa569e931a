"""The request with which a worker begins, on an engine whose clock the test moves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from support.engine_kit import Drive

from edgemoe.worker.service import Worker


async def test_a_warm_up_may_take_for_ever() -> None:
    """As where each expert comes from a slow disk."""
    drive, ended = Drive(), asyncio.get_running_loop().create_future()

    def submit(*chosen: Any) -> None:
        drive.engine.loop.submit(*chosen)
        drive.step()
        drive.now_s += 1e5
        while drive.step():
            pass
        ended.set_result(drive.emitted[-1])

    engine = SimpleNamespace(
        limits=drive.engine.limits, loop=SimpleNamespace(submit=submit), runner=drive.engine.runner
    )
    worker = SimpleNamespace(_report_phase=lambda *_: None, _warm=ended, _side=None)
    await Worker._warm_up(
        cast(Any, worker),
        cast(Any, SimpleNamespace(engine=engine, activity=None, model=SimpleNamespace(layers=1), stages=None)),
    )
    assert ended.result().finish == "length"
