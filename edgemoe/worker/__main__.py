"""Reads a Boot from standard input and runs the engine that it describes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import msgspec

from edgemoe.config.settings import Settings
from edgemoe.heap import give_back_often
from edgemoe.ipc.messages import Boot
from edgemoe.jit.env import WORKER_ENV
from edgemoe.telemetry.log import configure, goes_to_journal
from edgemoe.worker.process import settle


async def serve(boot: Boot, settings: Settings, parent: int) -> int:
    """Runs the engine and returns the exit status."""
    from edgemoe.worker.service import Worker  # loads torch, which reads the environment once

    async with asyncio.TaskGroup() as tasks:
        giving = tasks.create_task(give_back_often(), name="memory")
        status = await Worker(boot, settings, parent).run()
        giving.cancel()
    return status


def main() -> None:
    parent = settle()
    os.environ.update(WORKER_ENV)
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=Boot)
    settings = msgspec.convert(boot.settings, Settings)
    configure(settings.log, journal=goes_to_journal(os.environ))
    status = asyncio.run(serve(boot, settings, parent))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # the compute thread may be inside a step that will not end


if __name__ == "__main__":
    main()
