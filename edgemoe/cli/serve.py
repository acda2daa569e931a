"""Runs `edgemoe serve`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from edgemoe.config.loading import Loaded, Value, load
from edgemoe.store.packer import Progress
from edgemoe.telemetry.log import configure, goes_to_journal

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


def serve(args: argparse.Namespace) -> int:
    """Packs the model where it is not packed yet, then runs the daemon until a signal ends it."""
    from edgemoe.front import main as daemon
    from edgemoe.store.catalog import store_of

    loaded = read_settings(args)
    configure(loaded.settings.log, journal=goes_to_journal(os.environ))
    log.info("settings read", extra={"files": ",".join(map(str, loaded.files)), "set": " ".join(args.set)})
    for warning in loaded.warnings:
        log.warning(warning)
    model = store_of(loaded.settings.model, show_progress)
    return daemon.run(msgspec.structs.replace(loaded.settings, model=model))


def read_settings(args: argparse.Namespace) -> Loaded:
    """Returns the settings of files and command line. Raises ConfigError."""
    given = {
        "model.path": ("--model", getattr(args, "model", None)),
        "api.socket": ("--socket", getattr(args, "socket", None)),
        "cluster.join": ("--join", getattr(args, "join", None)),
    }
    options = {key: Value(value, origin) for key, (origin, value) in given.items() if value}
    return load(Path(args.config) if args.config else None, args.set, options)


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
