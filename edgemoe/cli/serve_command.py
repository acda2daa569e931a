"""Runs `edgemoe serve`, and `edgemoe witness`, which only votes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from edgemoe.api.api_keys import new_key
from edgemoe.cli.command_settings import check_processor, read_settings, show_progress, written_paths
from edgemoe.config.loading import LoadedSettings, load
from edgemoe.config.paths import default_socket
from edgemoe.config.served_models import served_models
from edgemoe.config.settings import Settings
from edgemoe.errors import ConfigError
from edgemoe.front.start_note import start_note
from edgemoe.guard import refuse_pickle
from edgemoe.rights import become_owner
from edgemoe.store.packer import Progress
from edgemoe.telemetry.log import configure, goes_to_journal

log = logging.getLogger(__name__)

FIRST_KEY = "default"  # name of the key that is made where there is none
EVERYWHERE = ("0.0.0.0", "[::]")


def serve(args: argparse.Namespace) -> int:
    """Packs the model where it is not packed yet, then runs the daemon until a signal ends it."""
    from edgemoe.cli.auto_encoding import with_encoding
    from edgemoe.cli.model_texts import check_texts
    from edgemoe.front import main as daemon
    from edgemoe.store.catalog import store_of

    loaded = read_settings(args)
    configure(loaded.settings.log, journal=goes_to_journal(os.environ))
    if args.invite:
        from edgemoe.cli.joining import join_cluster, read_token

        join_cluster(loaded.settings, read_token(args.invite), os.environ)
        loaded = read_settings(args)
    log.info("settings read", extra={"files": ",".join(map(str, loaded.files)), "set": " ".join(args.set)})
    become_owner(*written_paths(loaded.settings), env=os.environ)
    if loaded.settings.api.needs_keys:
        _have_a_key(loaded)
    check_processor()
    ports = daemon.reserve(loaded.settings)
    settings = loaded.settings
    if settings.model.path or not settings.models:
        with start_note(Path(settings.service.runtime_dir)) as write:
            model = store_of(with_encoding(settings.model, args), partial(_noted_progress, write), check_texts)
        model = msgspec.structs.replace(model, experts=settings.model.experts)  # for further models
        settings = msgspec.structs.replace(settings, model=model)
    return daemon.run(
        settings,
        on_ready=lambda: print(ready_text(settings), flush=True),
        ports=ports,
        reread=lambda: read_settings(args).settings,
        find_store=lambda model, progress: store_of(
            with_encoding(model, args), lambda _: contextlib.nullcontext(progress), check_texts
        ),
    )


@contextlib.contextmanager
def _noted_progress(write: Callable[[str], None], what: str) -> Iterator[Progress]:
    """Shows progress, and writes it for commands that ask this daemon meanwhile."""
    noted = -1

    def advance(done_bytes: int, total_bytes: int) -> None:
        nonlocal noted
        show(done_bytes, total_bytes)
        if (percent := 100 * done_bytes // max(1, total_bytes)) != noted:
            noted = percent
            write(f"{what}, {percent} %")

    write(what)
    with show_progress(what) as show:
        yield advance


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
    ready = f"{', '.join(served_models(settings))} {'are' if settings.models else 'is'} ready"
    return f"{ready} at {' and '.join(places)}\nNext, in another terminal: {chat}{page}"


def url_of(address: str) -> str:
    """Returns the URL of a TCP listener, for a browser on this machine or, where it listens to all, on others."""
    host, _, port = address.rpartition(":")
    return f"http://{socket.gethostname() if host in EVERYWHERE else host}:{port}"


def _have_a_key(loaded: LoadedSettings) -> None:
    """Makes the first key, in the default file only: one that is named and not there is a mistake."""
    file = Path(loaded.settings.api.api_key_file)
    if not file.exists() and loaded.origins["api.api_key_file"] == "default":
        new_key(file, FIRST_KEY)
        log.info("a key is made", extra={"file": file})
