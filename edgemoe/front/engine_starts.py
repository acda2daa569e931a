"""Describes how engines ended, and decides when the next is started.

`FailedStarts` counts engines that died before any served; `RestartBackoff` spaces restarts afterwards.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgemoe.config.settings import ServiceSettings
from edgemoe.config.sizes import format_size
from edgemoe.errors import EngineUnavailable
from edgemoe.telemetry.probes import MemoryKills

FIRST_DELAY_S = 0.1  # before a second start; doubles with each death within the window
LONGEST_DELAY_S = 15.0
WINDOW_S = 300.0  # in which deaths count
DOUBLINGS = 10  # bound of the exponent
KEPT_LINES, LINE_CHARS = 100, 500  # of stderr
TOLD_LINES, TOLD_CHARS = 4, 240  # of those, in a message
ALIKE = 3  # deaths of one signal, exception or phase, after which no start is tried
LONGEST_BYTES = 64 << 10  # of a line
LOGGED = re.compile(r'<[0-7]>|\d{4}-\d\d-\d\dT\S+ [A-Z]+ |\{"time": ')
DETAIL = re.compile(
    r'<[4-7]>|\d{4}-\d\d-\d\dT\S+ (DEBUG|INFO|WARNING) |\{"time": "[^"]*", "level": "(debug|info|warning)"'
)
CARETS = re.compile(r"[\s~^]+$")  # a traceback's, below a line of code
JOURNAL_PREFIX = re.compile(r"^<[0-7]>")
FAULT = "Fatal Python error: "  # first line of a faulthandler dump

REPORT = "this is a fault of edgemoe: report it with the engine's lines in the log and `edgemoe doctor --json`"
INSTALL_AGAIN = "a library is missing or does not fit: install edgemoe again, in the environment of the daemon"
REMEDIES = {
    "ImportError": INSTALL_AGAIN,
    "ModuleNotFoundError": INSTALL_AGAIN,
    "SIGKILL": "the kernel ends what takes too much memory (`journalctl --dmesg` says so): set lower budgets "
    "(memory.ram_bytes, memory.kv_bytes), or raise the control group's limit (MemoryMax)",
    "SIGILL": "code was compiled for another processor: remove the folder of compiled kernels beside the stores",
    "MemoryError": "set lower budgets (memory.ram_bytes, memory.kv_bytes), or raise the limit of the process's memory",
    "hang": "a disk or a driver may not answer: the kernel's log (`journalctl --dmesg`) tells; a slow disk needs a "
    "smaller model or a faster place (model.store_dir)",
    "spawn": "free memory or processes (`ulimit -u`), or install edgemoe again",
}
SIGNS = {  # in the last line, with the exception or kind whose remedy helps
    "cannot open shared object|undefined symbol": "ImportError",
    "(?i)ca(nno|n')t allocate memory|bad_alloc|failed to map segment": "MemoryError",
    "can't start new thread|Resource temporarily unavailable": "spawn",
}
AGAIN = "`edgemoe reload`, a changed setting of the engine, or a restart of the daemon has it tried again"


def why_killed(before: MemoryKills, now: MemoryKills, limit_bytes: int | None) -> str:
    """Returns the words behind "killed by SIGKILL" where the kernel has killed for want of memory; else ""."""
    if now.group == before.group and now.machine == before.machine:
        return ""
    lacks = "the machine has no more"
    if limit_bytes is not None and now.group > before.group:
        lacks = (
            f"its control group may take {format_size(limit_bytes)} (MemoryMax of the unit, --memory of a container)"
        )
    return f" by the kernel for want of memory: {lacks}; set lower budgets (memory.ram_bytes, memory.kv_bytes)"


class LastLines:
    """The last lines of a process's stderr, bounded in number and length.

    Of a faulthandler dump it keeps two lines: the fault and the first frame of its thread.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._begun = b""  # an incomplete line
        self._faulted = self._frame_follows = False

    def add(self, data: bytes) -> bytes:
        """Adds bytes that were read. Returns the completed lines; 64 KiB without an end count as a line."""
        whole, end, begun = (self._begun + data).rpartition(b"\n")
        if len(begun) > LONGEST_BYTES:
            whole, end, begun = whole + end + begun, b"", b""
        self._begun = begun
        self._keep(whole)
        return whole + end

    def finish(self) -> bytes:
        """Completes and returns the last line, which has no end."""
        begun, self._begun = self._begun, b""
        self._keep(begun)
        return begun

    def last_errors(self) -> tuple[str, ...]:
        """Returns the last few lines, without carets and log lines below the level of errors."""
        chosen = [line for line in self._lines if not DETAIL.match(line) and not CARETS.match(line)]
        return tuple(JOURNAL_PREFIX.sub("", line).strip()[:TOLD_CHARS] for line in chosen[-TOLD_LINES:])

    def _keep(self, whole: bytes) -> None:
        for raw in whole.split(b"\n"):
            line = raw[:LINE_CHARS].decode("utf-8", "replace").rstrip()
            if not line:
                continue
            if self._faulted and LOGGED.match(line):  # a child's fault: the engine goes on
                self._faulted = False
            if not self._faulted or self._frame_follows:
                self._lines.append(line)
            self._frame_follows = self._faulted and line.startswith("Current thread")
            self._faulted |= line.startswith(FAULT)


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """The death of one engine."""

    kind: str  # a signal's or exception's name, "exit status N", "hang" or "spawn"
    how: str  # "killed by SIGABRT"
    phase: str = ""  # of loading; "" of an engine that was ready
    lines: tuple[str, ...] = ()
    fatal: bool = False  # an error of edgemoe's own with its remedy; another start would fail alike

    @property
    def cause(self) -> str:
        """Returns the cause of death with the phase of loading, if any."""
        return f"{self.how} (in the phase {self.phase})" if self.phase and not self.fatal else self.how

    @property
    def remedy(self) -> str:
        """Returns the remedy for this kind of death, or for the exception in the last line."""
        exception = self.lines[-1].partition(":")[0] if self.lines else ""
        for words, like in SIGNS.items():
            if self.lines and re.search(words, self.lines[-1]):
                exception = like
        return "" if self.fatal else REMEDIES.get(self.kind) or REMEDIES.get(exception, REPORT)


class FailedStarts:
    """The deaths of engines before any engine served."""

    def __init__(self, most: int) -> None:
        """Takes `most`, the bound on deaths of any kind."""
        self._most = most
        self._deaths: list[ProcessDeath] = []

    def count_death(self, death: ProcessDeath) -> bool:
        """Counts a death. Returns whether to stop trying: it is fatal, the third alike, or one too many."""
        self._deaths.append(death)
        return death.fatal or self.alike >= ALIKE or len(self._deaths) > self._most

    @property
    def alike(self) -> int:
        """Counts the deaths with the signal, the exception or the phase of the last one."""
        last = self._deaths[-1]
        kinds, phases = (Counter(words) for words in zip(*((one.kind, one.phase) for one in self._deaths), strict=True))
        return max(kinds[last.kind], phases[last.phase])

    @property
    def reason(self) -> str:
        """Returns the reason why no start is tried: the last death and its remedy."""
        last, times = self._deaths[-1], len(self._deaths)
        often = "" if times == 1 else f", {times} times"
        said = f"the engine cannot start: {last.cause}{often}"
        if last.lines and not last.fatal:
            said += f"; its last lines: {' | '.join(last.lines)}"
        return f"{said}. {_sentence(last.remedy)}{AGAIN}"

    def describe(self) -> dict[str, Any]:
        """Returns the parts of `reason` for /health."""
        last = self._deaths[-1]
        return {
            "reason": self.reason,
            "ended": last.how,
            "phase": last.phase,
            "last_lines": list(last.lines),
            "remedy": last.remedy,
            "deaths": len(self._deaths),
        }


class StartDelay(NamedTuple):
    """The wait before the next start."""

    delay_s: float
    gives_up: bool  # requests are refused until then


class RestartBackoff:
    """Counts the deaths within the window for which no request was blamed."""

    def __init__(self, service: ServiceSettings) -> None:
        self._service = service
        self._deaths: deque[float] = deque()
        self._blamed = 0  # requests blamed before the last death

    def after_death(self, now: float, blamed: int) -> StartDelay:
        """Returns a wait that doubles with each death; after too many deaths, until the window has moved on.

        `blamed` counts the requests that were given up so far because engines died of them.
        """
        service, deaths = self._service, self._deaths
        if blamed != self._blamed:  # a request explained the deaths before
            self._blamed = blamed
            deaths.clear()
        deaths.append(now)
        while deaths and deaths[0] < now - WINDOW_S:
            deaths.popleft()
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(len(deaths) - 1, DOUBLINGS))
        if len(deaths) > service.max_restarts:
            return StartDelay(max(LONGEST_DELAY_S, deaths[0] + WINDOW_S - now), gives_up=True)
        return StartDelay(delay_s, gives_up=False)


def keeps_failing(why: str, left_s: float) -> EngineUnavailable:
    """Returns the error for clients while the next start is `left_s` away."""
    reason = f"the engine keeps failing ({why}) and is started again in {left_s:.0f} s; see the log"
    return EngineUnavailable(reason, code="engine_failed", retry_after_s=left_s)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}. " if words else ""
