"""Runs one incarnation of the engine as a child process in its own group, and keeps its latest messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from edgemoe.config.settings import Settings
from edgemoe.errors import PeerOutdated, WireError
from edgemoe.front.engine_starts import LastLines, ProcessDeath, why_killed
from edgemoe.ipc.engine_socket import IpcServer
from edgemoe.ipc.messages import (
    PLACE_BYTES,
    Boot,
    Emissions,
    Failed,
    FromEngine,
    Loading,
    MessageRefused,
    Ready,
    Reloaded,
    SnapshotReply,
    Stats,
    ToCluster,
    ToEngine,
)
from edgemoe.telemetry.log import goes_to_journal
from edgemoe.telemetry.probes import count_memory_kills, memory_limit
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

log = logging.getLogger(__name__)
LOOK_S = 0.25  # between two checks of an engine
STALLED_S = 3.0  # without a message from an engine that is ready: six of its Stats are missing
STILL_S = 2.2  # likewise; its requests go on elsewhere, if there is another box
SILENCE_S = 20.0  # without a message from an engine that is ready
LOADING_SILENCE_S = 300.0  # without a message from an engine that is loading
LOADING_STILL_S = 900.0  # without progress of loading
LOADING_LOG_S = 10.0  # between two lines in the log about one phase of loading
LAST_WORDS_S = 1.0  # for messages that an engine sent before its end
STEP_S = 180.0  # that a step may stay in one layer before it counts as hanging
FRONTS_OWN = ("NOTIFY_", "WATCHDOG_", "LISTEN_")  # between the front and the service manager
STOP_S = 5.0  # that an engine has to exit after Stop
READ_BYTES = 64 << 10


class EngineProcess:
    """An engine process and its latest messages."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        boot_id: str,
        place: LoadingPlace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.boot_id = boot_id
        self.process = process
        self.loading = Loading(phase="start")
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.stats = Stats(values={})
        self.heard = self._looked = self._started = clock()
        self._moved = self._phase_began = self._started  # times of the last progress and of the phase's beginning
        self._logged = 0.0
        self._place = place
        self._reloaded: asyncio.Future[Reloaded] | None = None
        self._told_failed = asyncio.Event()
        self._retired = False
        self._lines = LastLines()
        self._copying: asyncio.Task[None] | None = None
        self._kills = count_memory_kills()  # before it

    @classmethod
    async def start(cls, command: Sequence[str], settings: Settings, address: str) -> EngineProcess:
        """Starts `command` in its own process group and writes its Boot to it. Its stderr is copied to ours."""
        values = msgspec.to_builtins(settings)
        with contextlib.ExitStack() as ends:
            place = LoadingPlace()
            ends.callback(place.close)
            boot = Boot(
                boot_id=secrets.token_hex(8),
                address=address,
                speaks=PROTOCOL_VERSIONS,
                settings=values,
                place_fd=place.fd,
            )
            reading, writing = os.pipe2(os.O_CLOEXEC)
            errors = ends.enter_context(os.fdopen(reading, "rb", buffering=0))
            with os.fdopen(writing, "wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env=_environment(os.environ, stderr.fileno()),
                    process_group=0,
                    pass_fds=(place.fd,),
                )
            ends.pop_all()
        engine = cls(process, boot.boot_id, place)
        engine.copy_errors(errors)
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has died already; `ended` returns its death
            process.stdin.write(msgspec.json.encode(boot))
            await process.stdin.drain()
        process.stdin.close()
        return engine

    def copy_errors(self, errors: Any) -> None:
        """Starts to copy the engine's stderr."""
        self._copying = asyncio.create_task(self._copy(errors), name="engine's stderr")

    async def _copy(self, errors: Any) -> None:
        """Copies its stderr to ours, line by line, and keeps the last ones."""
        reader = asyncio.StreamReader(limit=READ_BYTES)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), errors)
        try:
            while data := await reader.read(READ_BYTES):
                _write_error(self._lines.add(data))
            _write_error(self._lines.finish())
        finally:
            transport.close()

    def on_message(self, message: FromEngine | None) -> Emissions | Ready | SnapshotReply | ToCluster | None:
        """Keeps a message about the engine itself; returns any other message. None was unreadable."""
        self.heard = self._clock()
        match message:
            case Loading():
                self._comes_on(message)
            case Stats():
                self.stats = message
            case Failed():
                self.failed = message
                self._told_failed.set()
            case MessageRefused():
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

    def _comes_on(self, loading: Loading) -> None:
        now, before = self._clock(), self.loading
        if loading.phase != before.phase:
            self._phase_began = now
        if loading != before:
            self._moved = now
        self.loading = loading

    @property
    def still_s(self) -> float:
        """Returns the seconds since its start last made progress."""
        return self._clock() - self._moved

    def describe_loading(self) -> dict[str, Any] | None:
        """Returns the progress of loading; None once the engine is ready or has ended."""
        if self.ready is not None or self.process.returncode is not None:
            return None
        now, at = self._clock(), self.loading
        return {
            "phase": at.phase,
            "fraction": at.fraction,
            "detail": at.detail,
            "phase_s": round(now - self._phase_began, 1),
            "seconds": round(now - self._started, 1),
        }

    def log_loading(self) -> None:
        """Logs the progress of a long phase of loading."""
        now, at = self._clock(), self.loading
        if self.ready is None and now - max(self._phase_began, self._logged) > LOADING_LOG_S:
            self._logged = now
            share = {"percent": round(100 * at.fraction), "detail": at.detail}
            log.info("loading", extra={"phase": at.phase, **share, "seconds": round(now - self._phase_began)})

    @property
    def is_up(self) -> bool:
        """Returns whether the engine is ready, and not known to have died."""
        return self.ready is not None and self.process.returncode is None and not self._retired

    @property
    def serving(self) -> bool:
        """Returns whether the engine takes requests: it is up, and does not work for other boxes only."""
        return self.is_up and self.ready is not None and self.ready.takes_requests

    @property
    def stalls(self) -> bool:
        """Returns whether the engine is silent for longer than usual, though not long enough to count as hanging."""
        return self._clock() - self.heard > STALLED_S

    @property
    def stands_still(self) -> bool:
        """Returns whether a ready engine has said nothing for so long that its requests should go on elsewhere.

        Nothing is known after this process itself has not run for a while.
        """
        now = self._clock()
        return self.serving and now - self._looked < 2 * LOOK_S and now - self.heard > STILL_S

    def hang_reason(self) -> str:
        """Returns the reason to take the engine for hanging; "" while there is none. Called every LOOK_S.

        A late call means that this process did not run; that time does not count as silence of the engine.
        """
        now = self._clock()
        late_s = max(0.0, now - self._looked - 2 * LOOK_S)
        self.heard, self._moved = min(now, self.heard + late_s), min(now, self._moved + late_s)
        self._looked = now
        silent_s = now - self.heard
        if silent_s > (SILENCE_S if self.ready else LOADING_SILENCE_S):
            return f"it has been silent for {silent_s:.0f} s"
        if self.ready is None and self.still_s > LOADING_STILL_S:
            return f"its start has come no further for {self.still_s:.0f} s"
        if self.stats.step_s > STEP_S:
            return f"its step has come no further for {self.stats.step_s:.0f} s"
        return ""

    async def wait_for_end(self) -> ProcessDeath:
        """Waits for the process to end. Returns its death."""
        code = await self.process.wait()
        if code > 0 and self.failed is None:  # its last messages may be on their way
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._told_failed.wait()
        if self.failed is not None:
            failed = self.failed
            return await self._death(failed.error, f"{failed.error}: {failed.message}")
        if code < 0:
            name = signal.Signals(-code).name
            was_killed = code == -signal.SIGKILL and not self._retired
            why = why_killed(self._kills, count_memory_kills(), memory_limit()) if was_killed else ""
            return await self._death(name, f"killed by {name}{why}")
        return await self._death(f"exit status {code}", f"exit status {code}")

    async def death_by_hanging(self, why: str) -> ProcessDeath:
        """Returns the death of an engine that hangs."""
        return await self._death("hang", why)

    async def _death(self, kind: str, how: str) -> ProcessDeath:
        if self._copying is not None and self.process.returncode is not None:  # children of it may hold its stderr
            await asyncio.wait([self._copying], timeout=LAST_WORDS_S)
        return ProcessDeath(
            kind=kind,
            how=how,
            phase="" if self.ready else self._last_phase(),
            lines=self._lines.last_errors(),
            fatal=self.failed is not None and self.failed.fatal,
        )

    def _last_phase(self) -> str:
        written = "" if self._place is None else self._place.read()
        at = self.loading
        return written or (f"{at.phase}: {at.detail}" if at.detail else at.phase)

    async def next_reloaded(self) -> Reloaded:
        """Returns the engine's next Reloaded message."""
        self._reloaded = asyncio.get_running_loop().create_future()
        return await self._reloaded

    async def exits(self, within_s: float) -> None:
        """Waits for the process to end, and kills it after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self.process.wait()
        except TimeoutError:
            if within_s:
                log.warning("engine killed: it did not stop in time")
            self.kill()
            await self.process.wait()

    def retire(self) -> None:
        """Counts the engine as one that takes no more requests."""
        self._retired = True

    def kill(self) -> None:
        """Kills the process and its children. A process that waits for a disk or a driver ends later."""
        self._retired = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def wait_killed(self, within_s: float) -> bool:
        """Waits for a killed process to end. Returns whether it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.process.wait()
        if self.process.returncode is None:
            return False
        if self._copying is not None:
            self._copying.cancel()  # a grandchild may keep the pipe open
        if self._place is not None:
            self._place.close()
        return True


class LoadingPlace:
    """Shared memory into which an engine writes its phase of loading, readable even after a sudden death."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("edgemoe-loading", os.MFD_CLOEXEC)

    def read(self) -> str:
        """Returns the phase that the engine wrote last; "" for none."""
        if self.fd < 0:
            return ""
        return os.pread(self.fd, PLACE_BYTES, 0).rstrip(b"\0").decode("utf-8", "replace")

    def close(self) -> None:
        """Closes the shared memory of the loading place."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LocalConnection:
    """The way to the engine process. The supervisor replaces `engine`; None while there is none."""

    def __init__(self, wire: IpcServer) -> None:
        self.wire = wire
        self.engine: EngineProcess | None = None

    @property
    def place(self) -> str:
        """Returns the engine's boot id; "" while it takes no requests."""
        return self.engine.boot_id if self.engine is not None and self.engine.serving else ""

    @property
    def boot(self) -> str:
        """Returns the boot id of an engine that is up, whether it takes requests or not; "" if there is none."""
        return self.engine.boot_id if self.engine is not None and self.engine.is_up else ""

    @property
    def stands_still(self) -> bool:
        """Returns whether the engine has said nothing for a while."""
        return self.engine is not None and self.engine.stands_still

    def send(self, message: ToEngine) -> bool:
        """Sends a message to an engine that is up; False if there is none."""
        return self.engine is not None and self.engine.is_up and self.send_control(message)

    def send_control(self, message: ToEngine) -> bool:
        """Sends a message to the engine, ready or not; False if there is none."""
        if self.engine is None or self.engine.process.returncode is not None:
            return False
        try:
            self.wire.send(self.engine.boot_id, message)
        except (WireError, PeerOutdated) as error:
            log.warning("a message did not reach the engine", extra={"error": str(error)})
            return False
        return True


def _environment(front: Mapping[str, str], stderr: int) -> dict[str, str]:
    """Returns the engine's environment. Its `stderr` goes to the journal if ours does."""
    env = {key: value for key, value in front.items() if not key.startswith(FRONTS_OWN)}
    with contextlib.suppress(OSError, ValueError):  # there is no stderr
        if goes_to_journal(front):
            status = os.fstat(stderr)
            env["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
    return env


def _write_error(lines: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it is closed
        sys.stderr.write(lines.decode("utf-8", "replace"))
        sys.stderr.flush()
