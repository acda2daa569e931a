"""One incarnation of the engine: a child process in its own group, and what it has said so far."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Sequence

import msgspec

from edgemoe.cluster.rpc.control_messages import Shown
from edgemoe.cluster.rpc.engine_messages import (
    Boot,
    Emissions,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Refused,
    Reloaded,
    Stats,
    ToCluster,
)
from edgemoe.cluster.rpc.protocol import SPOKEN
from edgemoe.config.settings import Settings

log = logging.getLogger(__name__)
LOOK_S = 0.25  # between two looks at an engine
STALLED_S = 3.0  # without a message from an engine that is ready: six of its Stats are missing
SILENCE_S = 20.0  # without a message from an engine that is ready
LOADING_SILENCE_S = 300.0  # without one from an engine that is coming up
STEP_S = 180.0  # that a step may stay in one layer before its thread is taken to hang
FRONTS_OWN = ("NOTIFY_", "WATCHDOG_", "LISTEN_")  # between the front and the service manager
STOP_S = 5.0  # that an engine has to exit once it is told to


class EngineHandle:
    """A running engine process."""

    def __init__(self, process: asyncio.subprocess.Process, boot_id: str) -> None:
        self.boot_id = boot_id
        self.process = process
        self.loading = Loading(phase="start")
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.stats = Stats(values={})
        self.heard = self._looked = time.monotonic()
        self._reloaded: asyncio.Future[Reloaded] | None = None
        self._killed = False

    @classmethod
    async def start(cls, command: Sequence[str], settings: Settings, address: str) -> EngineHandle:
        """Starts `command` in a process group of its own and hands it its Boot."""
        values = msgspec.to_builtins(settings)
        boot = Boot(boot_id=secrets.token_hex(8), address=address, speaks=SPOKEN, settings=values)
        env = {key: value for key, value in os.environ.items() if not key.startswith(FRONTS_OWN)}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, env=env, process_group=0)
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has died already, which `ended` will tell
            process.stdin.write(msgspec.json.encode(boot))
            await process.stdin.drain()
        process.stdin.close()
        return cls(process, boot.boot_id)

    def note(self, message: FromEngine | None) -> Emissions | Ready | Shown | ToCluster | None:
        """Remembers what the engine says of itself, None where it is unreadable; returns what is for others."""
        self.heard = time.monotonic()
        match message:
            case Loading():
                self.loading = message
            case Stats():
                self.stats = message
            case Failed():
                self.failed = message
            case Refused():
                log.warning("the engine cannot read what was sent", extra={"what": message.what, "why": message.why})
            case Ready():
                self.ready = message
                return message
            case Reloaded():
                if self._reloaded is not None and not self._reloaded.done():
                    self._reloaded.set_result(message)
            case _:
                return message
        return None

    @property
    def serving(self) -> bool:
        """Returns whether it takes requests: ready, and not known to have died."""
        return self.ready is not None and self.process.returncode is None and not self._killed

    @property
    def stalls(self) -> bool:
        """Returns whether it is silent for longer than one that works, and not long enough to be taken to hang."""
        return time.monotonic() - self.heard > STALLED_S

    @property
    def is_fatal(self) -> bool:
        """Returns whether it has said that it cannot start, and nor could another."""
        return self.failed is not None and self.failed.fatal

    def hangs(self) -> str:
        """Returns why the engine is taken to hang; empty while it is not. Asked at each look.

        By how much a look is late this process did not run, stopped or starved: that is no silence of the engine's.
        """
        now = time.monotonic()
        self.heard = min(now, self.heard + max(0.0, now - self._looked - 2 * LOOK_S))
        self._looked = now
        silent_s = now - self.heard
        if silent_s > (SILENCE_S if self.ready else LOADING_SILENCE_S):
            return f"it has been silent for {silent_s:.0f} s"
        if self.stats.step_s > STEP_S:
            return f"its step has come no further for {self.stats.step_s:.0f} s"
        return ""

    async def ended(self) -> str:
        """Waits for the process to end; how it ended, in words."""
        code = await self.process.wait()
        if self.failed is not None:
            return f"{self.failed.error}: {self.failed.message}"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"

    async def next_reloaded(self) -> Reloaded:
        """Returns the next thing that it says of having loaded something again."""
        self._reloaded = asyncio.get_running_loop().create_future()
        return await self._reloaded

    async def exits(self, within_s: float) -> None:
        """Waits for the process to end, and kills it where it does not in time."""
        try:
            async with asyncio.timeout(within_s):
                await self.process.wait()
        except TimeoutError:
            if within_s:
                log.warning("engine killed: it did not stop in time")
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        """Has the process and everything it has started end, which one that waits for a disk or a driver does later."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def gone(self, within_s: float) -> bool:
        """Waits for a killed process to end; returns whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.process.wait()
        return self.process.returncode is not None
