"""Reads a Boot from standard input and runs the engine that it describes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from edgemoe.config.settings import Settings
from edgemoe.heap import give_back_often, keep_freed
from edgemoe.ipc.messages import Boot
from edgemoe.jit.env import WORKER_ENV
from edgemoe.telemetry.log import configure, goes_to_journal

PR_SET_PDEATHSIG = 1
OOM_SCORE = 500  # between the front's 0 and "first of all", 1000


def set_up_process() -> int:
    """Sets up the process, which then ends when its parent does. Returns the parent's id."""
    parent = os.getppid()
    keep_freed(mmap_bytes=32 << 20, trim_bytes=128 << 20)  # filling 5 MB of logits takes a third of the time
    faulthandler.enable()  # a segmentation fault prints its traceback to stderr
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)  # it died before it could be watched
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to stop, and then says so
    return parent


async def serve(boot: Boot, settings: Settings, parent: int) -> int:
    """Runs the engine and returns the exit status."""
    from edgemoe.worker.service import Worker  # loads torch, which reads the environment once

    async with asyncio.TaskGroup() as tasks:
        giving = tasks.create_task(give_back_often(), name="memory")
        status = await Worker(boot, settings, parent).run()
        giving.cancel()
    return status


def main() -> None:
    parent = set_up_process()
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
