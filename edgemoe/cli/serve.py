"""`edgemoe serve` and `edgemoe pack`."""

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

from edgemoe import demo
from edgemoe.config.loading import Loaded, Value, load
from edgemoe.config.settings import Settings
from edgemoe.store.packer import Progress, ensure_store
from edgemoe.telemetry.log import configure, goes_to_journal

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


def serve(args: argparse.Namespace) -> int:
    """Packs the model if need be, then runs the daemon until a signal ends it."""
    from edgemoe.front import main as daemon

    loaded = _loaded(args)
    configure(loaded.settings.log, journal=goes_to_journal(os.environ))
    log.info("settings read", extra={"files": ",".join(map(str, loaded.files)), "set": " ".join(args.set)})
    return daemon.run(with_store(loaded.settings))


def pack(args: argparse.Namespace) -> int:
    """Packs one checkpoint and says where the store is."""
    from edgemoe.store.packer import pack as write_store

    configure(_loaded(args).settings.log)
    with _progress(f"packing {args.checkpoint}") as progress:
        if args.store:
            write_store(args.checkpoint, args.store, progress)
            store = Path(args.store)
        else:
            store = ensure_store(args.checkpoint, _loaded(args).settings.model.store_dir, progress)
    print(store)
    return 0


def with_store(settings: Settings) -> Settings:
    """`settings` whose model is a packed store, written now if it was a checkpoint."""
    model = settings.model
    if not model.path:
        model = msgspec.structs.replace(model, path=str(demo.model_path()), name=model.name or demo.NAME)
    path = Path(model.path).expanduser()
    if not path.exists():
        from edgemoe.store.catalog import resolve

        path = resolve(model.path, model.store_dir)
    with _progress(f"packing {path.name}") as progress:
        store = ensure_store(path, model.store_dir, progress)
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(model, path=str(store.absolute())))


def _loaded(args: argparse.Namespace) -> Loaded:
    given = {
        "model.path": ("--model", getattr(args, "model", None)),
        "api.socket": ("--socket", getattr(args, "socket", None)),
        "cluster.join": ("--join", getattr(args, "join", None)),
    }
    options = {key: Value(value, origin) for key, (origin, value) in given.items() if value}
    return load(Path(args.config) if args.config else None, args.set, options)


def _progress(what: str) -> AbstractContextManager[Progress]:
    """A bar with rate and time left on a terminal, else a line of log every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        from edgemoe.store import catalog as models

        return models.progress_bar(what, Console(stderr=True))
    return contextlib.nullcontext(_logged(what))


def _logged(what: str) -> Progress:
    said_s = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > LOG_EVERY_S or done_bytes == total_bytes:
            said_s = time.monotonic()
            percent = 100 * done_bytes // max(1, total_bytes)
            log.info(what, extra={"percent": percent, "done_bytes": done_bytes, "total_bytes": total_bytes})

    return progress
