"""Formats log events with fields, `log.info("engine ready", extra={"boot": id, "start_s": 3.2})`, as text or as JSON.

Any logger of the standard library can be used. Under systemd the text form omits the time, which the journal adds, and
carries the level as a priority prefix.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from edgemoe.config.settings import LogSettings

_PRIORITY = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(settings: LogSettings, *, stream: TextIO | None = None, journal: bool = False) -> None:
    """Sends every log of the process to `stream` (stderr by default). May be called again; the last call counts."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter(journal=journal))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # of libraries: warnings and errors only
    logging.getLogger("edgemoe").setLevel(settings.level.upper())
    logging.captureWarnings(True)


def goes_to_journal(env: Mapping[str, str]) -> bool:
    """Returns whether stderr is connected to the journal, by JOURNAL_STREAM as in systemd.exec(5).

    The variable alone does not say so: it may be inherited from a process with another stderr.
    """
    status = os.fstat(sys.stderr.fileno())
    return env.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class TextFormatter(logging.Formatter):
    """Formats an event as `2026-01-31T12:00:00.123 INFO engine ready boot=ab start_s=3.2`."""

    def __init__(self, *, journal: bool = False) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        words = [record.getMessage(), *(f"{key}={_word(value)}" for key, value in _fields(record).items())]
        line = " ".join(words) + _traceback(self, record)
        if self._journal:
            prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
            return "\n".join(prefix + part for part in line.splitlines())
        return f"{_stamp(record)} {record.levelname} {line}"


class JsonFormatter(logging.Formatter):
    """Formats an event as one JSON object a line: time, level, logger, event, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _stamp(record), "level": record.levelname.lower(), "logger": record.name}
        row = head | {"event": record.getMessage()} | _fields(record)
        if trace := _traceback(self, record).strip():
            row["traceback"] = trace
        return json.dumps(row, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _stamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
