"""How an engine ended, in words: the signal or exception, the phase, its last lines of stderr, and what to do.

`FailedStarts` counts the engines that ended before one ever served, and says when another start would end alike.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

KEPT_LINES, LINE_CHARS = 100, 500  # of stderr
TOLD_LINES, TOLD_CHARS = 4, 240  # of those, in a message
ALIKE = 3  # deaths of one signal, exception or phase after which another start is taken to end alike
LONGEST_BYTES = 64 << 10  # of a line
LOGGED = re.compile(r'<[0-7]>|\d{4}-\d\d-\d\dT\S+ [A-Z]+ |\{"time": ')
DETAIL = re.compile(
    r'<[4-7]>|\d{4}-\d\d-\d\dT\S+ (DEBUG|INFO|WARNING) |\{"time": "[^"]*", "level": "(debug|info|warning)"'
)
JOURNAL_PREFIX = re.compile(r"^<[0-7]>")
FAULT = "Fatal Python error: "  # begins what faulthandler writes

REPORT = "this is a fault of edgemoe: report it with the engine's lines in the log and `edgemoe doctor --json`"
REMEDIES = {
    "SIGKILL": "the kernel ends what takes too much memory (`journalctl --dmesg` says so): set lower budgets "
    "(memory.ram_bytes, memory.kv_bytes), or raise the control group's limit (MemoryMax)",
    "SIGILL": "code was compiled for another processor: remove the folder of compiled kernels beside the stores",
    "MemoryError": "set lower budgets (memory.ram_bytes, memory.kv_bytes), or raise the limit of the process's memory",
    "hang": "a disk or a driver may not answer: the kernel's log (`journalctl --dmesg`) tells; a slow disk needs a "
    "smaller model or a faster place (model.store_dir)",
    "spawn": "free memory or processes (`ulimit -u`), or install edgemoe again",
}
AGAIN = "`edgemoe reload`, a changed setting of the engine, or a restart of the daemon has it tried again"


class LastLines:
    """The last lines of a process's stderr. Lines and their lengths are bounded.

    Of what faulthandler writes of all threads, two lines are kept: the fault, and where its thread was.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._begun = b""  # a line whose end has not come
        self._faulted = self._frame_follows = False

    def take(self, data: bytes) -> bytes:
        """Takes what was read; returns the lines that it completes. A line of 64 KiB counts as complete."""
        whole, end, begun = (self._begun + data).rpartition(b"\n")
        if len(begun) > LONGEST_BYTES:
            whole, end, begun = whole + end + begun, b"", b""
        self._begun = begun
        self._keep(whole)
        return whole + end

    def finish(self) -> bytes:
        """Takes a last line that has no end; returns it."""
        begun, self._begun = self._begun, b""
        self._keep(begun)
        return begun

    def told(self) -> tuple[str, ...]:
        """Returns the few lines that say why it ended: none of the log below errors."""
        chosen = [line for line in self._lines if not DETAIL.match(line)]
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
class Death:
    """How one engine ended."""

    kind: str  # a signal's or exception's name, "exit status N", "hang" or "spawn"
    how: str  # "killed by SIGABRT"
    phase: str = ""  # of loading; "" of an engine that was ready
    lines: tuple[str, ...] = ()
    fatal: bool = False  # an error of edgemoe's own, which says what to do: another start would end alike

    @property
    def said(self) -> str:
        """Returns how it ended, and in which phase."""
        return f"{self.how} (in the phase {self.phase})" if self.phase and not self.fatal else self.how

    @property
    def remedy(self) -> str:
        """Returns what to do about it."""
        return "" if self.fatal else REMEDIES.get(self.kind, REPORT)


class FailedStarts:
    """The deaths of engines before one ever served."""

    def __init__(self, most: int) -> None:
        """`most` is how many may die, however they do."""
        self._most = most
        self._deaths: list[Death] = []

    def end_with(self, death: Death) -> bool:
        """Counts a death. Returns whether that ends the trying: it is fatal, the third alike, or one too many."""
        self._deaths.append(death)
        return death.fatal or self.alike >= ALIKE or len(self._deaths) > self._most

    @property
    def alike(self) -> int:
        """Returns how many deaths have the signal, the exception or the phase of the last one."""
        last = self._deaths[-1]
        kinds, phases = (Counter(words) for words in zip(*((one.kind, one.phase) for one in self._deaths), strict=True))
        return max(kinds[last.kind], phases[last.phase])

    @property
    def reason(self) -> str:
        """Returns why no further start is tried: the last death's words, and what to do."""
        last, times = self._deaths[-1], len(self._deaths)
        often = "" if times == 1 else f", {times} times"
        said = f"the engine cannot start: {last.said}{often}"
        if last.lines and not last.fatal:
            said += f"; its last lines: {' | '.join(last.lines)}"
        return f"{said}. {_sentence(last.remedy)}{AGAIN}"

    def describe(self) -> dict[str, Any]:
        """Returns the same in parts, for /health."""
        last = self._deaths[-1]
        return {
            "reason": self.reason,
            "ended": last.how,
            "phase": last.phase,
            "last_lines": list(last.lines),
            "remedy": last.remedy,
            "deaths": len(self._deaths),
        }


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}. " if words else ""
