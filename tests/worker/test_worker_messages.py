"""An engine's end of the wire, without an engine behind it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgemoe.config.settings import Settings
from edgemoe.ipc.engine_socket import IpcServer
from edgemoe.ipc.messages import Boot, Drain, Emissions, Loading, Stats, Submit
from edgemoe.types.request import Request, Sampling
from edgemoe.wire.protocol import PROTOCOL_VERSIONS
from edgemoe.worker.service import Worker


class FalteringLoop:
    """Takes requests, but for one that it does not expect."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def submit(self, request: Request, *_: Any) -> None:
        if request.id == "poison":
            raise ZeroDivisionError
        self.taken.append(request.id)

    def drain(self) -> None:
        raise ZeroDivisionError


async def test_a_message_that_an_engine_fails_over_costs_that_message_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wire, loop = IpcServer(tmp_path / "run"), FalteringLoop()
    boot = Boot(boot_id="boot-1", address=wire.address, speaks=PROTOCOL_VERSIONS, settings={})
    worker = Worker(boot, Settings(), os.getpid())
    assembly: Any = SimpleNamespace(engine=SimpleNamespace(loop=loop), sharing=None)
    listening = asyncio.ensure_future(worker._listen(assembly))
    worker._wire.post(Loading(phase="start"))
    heard = wire.messages()
    await anext(heard)  # it is connected
    wire.send("boot-1", Drain())
    for name in ("poison", "next"):
        request = Request(id=name, prompt=(1, 2), sampling=Sampling(), seed=1)
        wire.send("boot-1", Submit(request=request, emitted=(7, 8), attempt=3, remaining_ms=1e3))
    async with asyncio.timeout(60):
        _, ended = await anext(heard)
        while not loop.taken:
            await asyncio.sleep(0)
    assert isinstance(ended, Emissions)
    (end,) = ended.items
    assert (end.request, end.attempt, end.index, end.finish, end.error_code) == (
        "poison",
        3,
        2,
        "error",
        "request_failed",
    )
    assert loop.taken == ["next"]
    assert caplog.text.count("a message of the front failed here") == 2
    listening.cancel()
    await worker._wire.close()
    wire.close()


async def test_figures_that_cannot_be_told_cost_no_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = IpcServer(tmp_path / "run")
    boot = Boot(boot_id="boot-1", address=wire.address, speaks=PROTOCOL_VERSIONS, settings={})
    worker = Worker(boot, Settings(), os.getpid())
    runner = SimpleNamespace(standstill_s=lambda: 7.0)
    assembly: Any = SimpleNamespace(engine=SimpleNamespace(runner=runner))  # without metrics
    reporting = asyncio.ensure_future(worker._report(assembly))
    async with asyncio.timeout(60):
        _, said = await anext(wire.messages())
    assert said == Stats(values={}, step_s=7.0)
    assert "the engine's figures cannot be told" in caplog.text
    assert not reporting.done()
    reporting.cancel()
    await worker._wire.close()
    wire.close()
