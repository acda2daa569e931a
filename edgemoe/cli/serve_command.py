"""Runs `edgemoe serve`, and `edgemoe witness`, which only votes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from edgemoe.api.api_keys import new_key
from edgemoe.cli.key import FIRST
from edgemoe.config.loading import Loaded, Value, load
from edgemoe.config.paths import default_socket
from edgemoe.config.settings import Settings
from edgemoe.errors import ConfigError, UnsupportedProcessor
from edgemoe.guard import refuse_pickle
from edgemoe.rights import become_owner
from edgemoe.store.packer import Progress
from edgemoe.telemetry.log import configure, goes_to_journal

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
ASK_S = 60.0  # that LLVM may take to load
LOCAL, PORT = "127.0.0.1", 8080  # defaults if only one of --port and --host is given
EVERYWHERE = ("0.0.0.0", "[::]")


def serve(args: argparse.Namespace) -> int:
    """Packs the model where it is not packed yet, then runs the daemon until a signal ends it."""
    from edgemoe.front import main as daemon
    from edgemoe.store.catalog import store_of

    loaded = read_settings(args)
    configure(loaded.settings.log, journal=goes_to_journal(os.environ))
    log.info("settings read", extra={"files": ",".join(map(str, loaded.files)), "set": " ".join(args.set)})
    become_owner(*_written(loaded.settings), env=os.environ)
    if loaded.settings.api.needs_keys:
        _have_a_key(loaded)
    check_processor()
    ports = daemon.reserve(loaded.settings)
    model = store_of(loaded.settings.model, show_progress)
    settings = msgspec.structs.replace(loaded.settings, model=model)
    return daemon.run(
        settings,
        on_ready=lambda: print(ready_text(settings), flush=True),
        ports=ports,
        reread=lambda: read_settings(args).settings,
    )


def witness(args: argparse.Namespace) -> int:
    """Votes in the cluster's elections until a signal ends it."""
    from edgemoe.front.witness import witness as vote

    settings = load(Path(args.config) if args.config else None, args.set).settings
    if settings.cluster.coordination != "raft" or not settings.cluster.node:
        raise ConfigError('a witness needs cluster.node and cluster.coordination = "raft": nothing else has voters')
    configure(settings.log, journal=goes_to_journal(os.environ))
    become_owner(Path(settings.cluster.state_dir), env=os.environ)
    refuse_pickle()
    asyncio.run(vote(settings.cluster))
    return 0


def check_processor() -> None:
    """Raises UnsupportedProcessor where kernels cannot run here. Asks in a process of its own: LLVM takes 50 MB, which
    this one would keep."""
    command = [sys.executable, "-m", "edgemoe.jit.compile_target"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("whether the processor will do is not known", extra={"why": str(error)})
        return
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["LLVM cannot be loaded"])[-1]
        raise UnsupportedProcessor(said.removeprefix(f"{UnsupportedProcessor.__module__}.UnsupportedProcessor: "))


def _written(settings: Settings) -> tuple[Path, ...]:
    """Returns the folders that the daemon writes to."""
    api, cluster = settings.api, settings.cluster
    named = [settings.model.store_dir, settings.service.runtime_dir, str(Path(api.socket).parent)]
    named += [str(Path(api.api_key_file).parent)] if api.needs_keys else []
    named += [cluster.state_dir] if cluster.node else []
    named += [settings.record.dir, settings.cache.state_file, settings.cache.scoutgate]
    return tuple(Path(each) for each in named if each)


def ready_text(settings: Settings) -> str:
    """Returns the addresses of the model, and the commands to try next."""
    api, places = settings.api, []
    if api.tcp:
        places.append(f"{url_of(api.tcp)}/v1 (`edgemoe key show` prints the key)")
    if api.ollama_tcp:
        places.append(f"{url_of(api.ollama_address)} (Ollama's API)")
    is_default = Path(api.socket) == default_socket(os.environ)
    chat = "edgemoe chat" + ("" if is_default else f" --socket {shlex.quote(api.socket)}")
    places.append(api.socket)
    page = f"; in a browser: {url_of(api.tcp)}/" if api.tcp else ""
    return f"{settings.model.name} is ready at {' and '.join(places)}\nNext, in another terminal: {chat}{page}"


def url_of(address: str) -> str:
    """Returns the URL of a TCP listener, for a browser on this machine or, where it listens to all, on others."""
    host, _, port = address.rpartition(":")
    return f"http://{socket.gethostname() if host in EVERYWHERE else host}:{port}"


def _have_a_key(loaded: Loaded) -> None:
    """Makes the first key, in the default file only: one that is named and not there is a mistake."""
    file = Path(loaded.settings.api.api_key_file)
    if not file.exists() and loaded.origins["api.api_key_file"] == "default":
        new_key(file, FIRST)
        log.info("a key is made", extra={"file": file})


def read_settings(args: argparse.Namespace) -> Loaded:
    """Returns the settings of files and command line. Raises ConfigError."""
    given = {
        "model.path": ("--model", getattr(args, "model", None)),
        "api.socket": ("--socket", getattr(args, "socket", None)),
        "api.tcp": ("--host, --port", _address(args)),
        "cluster.join": ("--join", getattr(args, "join", None)),
    }
    options = {key: Value(value, origin) for key, (origin, value) in given.items() if value}
    return load(Path(args.config) if args.config else None, args.set, options)


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
