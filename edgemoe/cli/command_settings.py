"""Reads the settings of a command, and shows its progress."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from edgemoe.config.loading import LoadedSettings, SettingValue, load
from edgemoe.store.packer import Progress

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
LOCAL, PORT = "127.0.0.1", 8080  # defaults if only one of --port and --host is given


def read_settings(args: argparse.Namespace) -> LoadedSettings:
    """Returns the settings of files and command line. Raises ConfigError."""
    given = {
        "model.path": ("--model", getattr(args, "model", None)),
        "api.socket": ("--socket", getattr(args, "socket", None)),
        "api.tcp": ("--host, --port", _address(args)),
        "model.experts": ("--experts", getattr(args, "experts", None) if args.command == "serve" else None),
        "cluster.join": ("--join", " ".join(getattr(args, "join", None) or ())),
    }
    options = {key: SettingValue(value, origin) for key, (origin, value) in given.items() if value}
    begins = bool(getattr(args, "invite", "")) or (args.command, getattr(args, "action", "")) == ("cluster", "init")
    return load(Path(args.config) if args.config else None, args.set, options, is_named_later=begins)


def _address(args: argparse.Namespace) -> str | None:
    """Returns the HOST:PORT of --host and --port, where one of them is given."""
    host, port = getattr(args, "host", None), getattr(args, "port", None)
    if host is None and port is None:
        return None
    host = f"[{host}]" if host and ":" in host and not host.startswith("[") else host or LOCAL
    return f"{host}:{PORT if port is None else port}"


def show_progress(what: str) -> AbstractContextManager[Progress]:
    """Returns a progress bar on a terminal, else a progress that logs a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        from edgemoe.store import catalog as models

        return models.progress_bar(what, Console(stderr=True))
    return contextlib.nullcontext(_logged(what))


def _logged(what: str) -> Progress:
    logged_s = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s > LOG_EVERY_S or done_bytes == total_bytes:
            logged_s = time.monotonic()
            percent = 100 * done_bytes // max(1, total_bytes)
            log.info(what, extra={"percent": percent, "done_bytes": done_bytes, "total_bytes": total_bytes})

    return progress
