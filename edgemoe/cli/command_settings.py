"""Prepares a command: reads its settings, asks whether the processor will do, and shows its progress."""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from edgemoe.config.loading import LoadedSettings, SettingValue, load
from edgemoe.config.settings import Settings
from edgemoe.errors import UnsupportedProcessor
from edgemoe.store.packer import Progress

log = logging.getLogger(__name__)

ASK_S = 60.0  # that LLVM may take to load
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


def check_processor() -> None:
    """Raises UnsupportedProcessor where kernels cannot run here. Asks in a process of its own: LLVM takes 50 MB, which
    this one would keep."""
    command = [sys.executable, "-m", "edgemoe.jit.compile_target"]
    try:
        asked = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("whether the processor will do is not known", extra={"why": str(error)})
        return
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["LLVM cannot be loaded"])[-1]
        raise UnsupportedProcessor(said.removeprefix(f"{UnsupportedProcessor.__module__}.UnsupportedProcessor: "))


def written_paths(settings: Settings) -> tuple[Path, ...]:
    """Returns the folders that the daemon writes to."""
    api, cluster = settings.api, settings.cluster
    named = [settings.model.store_dir, settings.service.runtime_dir, str(Path(api.socket).parent)]
    named += [str(Path(api.api_key_file).parent)] if api.needs_keys else []
    named += [cluster.state_dir] if cluster.node else []
    named += [settings.record.dir, settings.cache.state_file, settings.cache.scoutgate]
    return tuple(Path(each) for each in named if each)


def show_progress(what: str) -> AbstractContextManager[Progress]:
    """Returns a progress bar on a terminal, else a progress that logs a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        from edgemoe.cli.output import progress_bar

        return progress_bar(what, Console(stderr=True))
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
