"""Runs etcd as a child process: starts it, reads its last words, starts it again after a death, stops it.

Clients reach it on a Unix socket in its folder, which only this user enters; the other members by mutual TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgemoe.durable import remove_file
from edgemoe.helper.tied_program import tied

log = logging.getLogger(__name__)
SOCKET = "client:1"  # in the folder of the member; etcd wants the form HOST:PORT
STOP_S = 2.0  # for which a member may hand its leadership on
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 10.0
SOUND_S = 30.0  # after which a start counts as good
KEPT_LINES, LINE_BYTES, SAID_CHARS = 3, 8192, 600
QUOTA_BYTES = 64 << 20
PASSED_ON = ("PATH", "HOME", "TMPDIR")  # no ETCD_ variables, nor NOTIFY_SOCKET


class _LogLine(msgspec.Struct):
    msg: str = ""
    error: str = ""


@dataclass(frozen=True)
class MemberPlan:
    """How to start a member. `members` are the URLs of all members by name, itself included."""

    program: str
    name: str
    folder: Path
    listen_url: str
    members: Mapping[str, str]
    token: str
    is_new: bool  # the first member of a new cluster
    heartbeat_ms: int

    def words(self) -> list[str]:
        """Returns the command line."""
        client = f"unix://{SOCKET}"
        return [
            self.program,
            f"--name={self.name}",
            f"--data-dir={self.folder / 'data'}",
            f"--listen-peer-urls={self.listen_url}",
            f"--initial-advertise-peer-urls={self.members[self.name]}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            "--initial-cluster=" + ",".join(f"{name}={url}" for name, url in self.members.items()),
            f"--initial-cluster-state={'new' if self.is_new else 'existing'}",
            f"--initial-cluster-token={self.token}",
            f"--heartbeat-interval={self.heartbeat_ms}",
            f"--election-timeout={10 * self.heartbeat_ms}",
            "--pre-vote",
            "--peer-client-cert-auth",
            f"--peer-cert-file={self.folder / 'certificate.pem'}",
            f"--peer-key-file={self.folder / 'key.pem'}",
            f"--peer-trusted-ca-file={self.folder / 'members.pem'}",
            "--experimental-peer-skip-client-san-verification",
            f"--quota-backend-bytes={QUOTA_BYTES}",
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=1000",
            "--snapshot-count=1000",
            "--max-snapshots=2",
            "--max-wals=2",
            "--logger=zap",
            "--log-level=warn",
            "--log-outputs=stderr",
        ]


def find_program(setting: str) -> str:
    """Returns the path of etcd, by the setting or on PATH; "" where there is none."""
    return shutil.which(setting or "etcd") or ""


class EtcdProcess:
    """One member's process. Lives on one event loop."""

    def __init__(self) -> None:
        self.starts = 0
        self.failures = 0  # deaths since it was last sound
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)  # its last log lines
        self._plain: list[str] = []  # its first words outside the log: a panic, a wrong option
        self.plan: MemberPlan | None = None  # of the running process
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._began_s, self._next_s, self._backoff_s = 0.0, 0.0, FIRST_BACKOFF_S

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The process id; 0 while there is none."""
        return self._process.pid if self._process is not None and self.is_running else 0

    def take_death(self) -> str:
        """Returns the last words of a process that has died by itself, once; "" otherwise."""
        if self._process is None or self._process.returncode is None:
            return ""
        code, self._process = self._process.returncode, None
        if time.monotonic() - self._began_s > SOUND_S:
            self._backoff_s = FIRST_BACKOFF_S
        self._next_s = time.monotonic() + self._backoff_s
        self._backoff_s = min(LAST_BACKOFF_S, 2 * self._backoff_s)
        self.failures += 1
        said = " | ".join([*self._plain, *self._lines])[-SAID_CHARS:] or "no word"
        log.error("etcd has ended and is started again", extra={"status": code, "said": said})
        return said

    async def start(self, plan: MemberPlan) -> None:
        """Starts the member, unless it ended a moment ago. Raises OSError."""
        if self.is_running or time.monotonic() < self._next_s:
            return
        remove_file(plan.folder / SOCKET, missing_ok=True)
        self._lines.clear()
        self._plain.clear()
        self._process = await asyncio.create_subprocess_exec(
            *tied(plan.words()),
            cwd=plan.folder,
            env={key: value for key, value in os.environ.items() if key in PASSED_ON},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
            limit=LINE_BYTES,
        )
        self.plan, self._began_s = plan, time.monotonic()
        self.starts += 1
        self._reading = asyncio.create_task(self._read(self._process), name="etcd's stderr")

    async def stop(self) -> None:
        """Ends the process; every entry that it has agreed to is on disk."""
        process, self._process, self.plan = self._process, None, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=STOP_S)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a longer line than is kept
                continue
            if not line:
                return
            self._keep_line(line)

    def _keep_line(self, line: bytes) -> None:
        try:
            found = msgspec.json.decode(line, type=_LogLine)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if len(self._plain) < KEPT_LINES and not any(text.startswith("panic:") for text in self._plain):
                self._plain.append(line.decode(errors="replace").strip())
            return
        self._lines.append(f"{found.msg}: {found.error}" if found.error else found.msg)
