"""Runs `edgemoe run`: finds a model or fetches it, serves it, and chats with it. The daemon ends with the chat.

Where a daemon runs at the socket already, the chat is with that one, and it goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from edgemoe import demo
from edgemoe.cli import conversation
from edgemoe.cli.auto_encoding import AUTO, ask_for_repository, with_encoding
from edgemoe.cli.client import Client, WaitingLine, socket_of, wait_for_engine
from edgemoe.cli.command_settings import check_processor, read_settings, show_progress, written_paths
from edgemoe.cli.model_texts import check_texts
from edgemoe.config.settings import ModelSettings, Settings
from edgemoe.durable import NewFile, make_folder
from edgemoe.errors import ServiceError, StoreError
from edgemoe.helper.tied_program import tied
from edgemoe.rights import become_owner
from edgemoe.store.catalog import HUB_NAME, resolve, store_of
from edgemoe.store.download import download
from edgemoe.store.hub_names import hub_name
from edgemoe.store.layout import KEEP, WantedEncodings
from edgemoe.store.manifest import model_of
from edgemoe.telemetry.log import configure

DEMO = "demo"
SHOWN_LINES = 12  # of the log of a daemon that ended
STOP_S = 10.0  # beyond the time in which requests may end


def run(args: argparse.Namespace) -> int:
    """Chats with the model until the user ends it. Raises EdgemoeError."""
    settings = read_settings(args).settings
    path = socket_of(args)
    with Client(path) as client:
        if client.is_listening() or client.starting():
            wait_for_engine(client)
            args.model = _served_name(client, path, args.model)
            return conversation.chat(args)
    configure(settings.log)
    become_owner(*written_paths(settings), env=os.environ)
    check_processor()
    experts = settings.model.experts if args.experts == KEEP else args.experts
    found = msgspec.structs.replace(settings.model, path=_find(args, settings.model), experts=experts)
    store = store_of(with_encoding(found, args), show_progress, check_texts).path
    with _daemon(args, settings, store) as process, Client(path) as client:
        line = WaitingLine()
        try:
            client.wait_while_loading(line.show, lambda: process.poll() is None)
        finally:
            line.clear()
        args.model = None  # the only one
        return conversation.chat(args)


def _served_name(client: Client, path: Path, name: str) -> str:
    """Returns the name under which the running daemon serves a model. Raises ServiceError where it serves others."""
    served = [str(model["id"]) for model in json.loads(client.text("/v1/models"))["data"]]
    asked = {name, Path(hub_name(name)).name, model_of(Path(name).name), demo.NAME if name == DEMO else name}
    if (found := next((each for each in served if each.lower() in {one.lower() for one in asked}), None)) is None:
        raise ServiceError(
            f"the daemon at {path} serves {', '.join(served)}; `edgemoe chat` talks to it, --socket names another "
            f"place for a daemon with {name}"
        )
    return found


def _find(args: argparse.Namespace, model: ModelSettings) -> str:
    """Returns a path, a store here, or one that is fetched from the hub now; "" for the demo model."""
    name = str(args.model)
    is_variant = args.experts not in (KEEP, AUTO) or bool(args.quant)
    if Path(name).expanduser().exists():
        return name
    if name == DEMO:
        return ""
    try:
        if not is_variant:
            return str(resolve(name, model.store_dir))
    except StoreError:
        if not HUB_NAME.fullmatch(hub_name(name)):
            raise
    print(f"{hub_name(name)} is fetched from the hub.", file=sys.stderr)
    experts = args.experts
    if experts == AUTO:
        experts = KEEP if args.quant else ask_for_repository(name, "main", args)
    with show_progress(f"pulling {name}") as progress:
        wanted = WantedEncodings.parse(experts, KEEP)
        return str(download(name, model.store_dir, wanted, progress, quant=args.quant, check=check_texts))


@contextlib.contextmanager
def _daemon(args: argparse.Namespace, settings: Settings, store: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `edgemoe serve` while the block runs. Raises ServiceError with its last lines if it ends before."""
    socket = Path(settings.api.socket)
    make_folder(socket.parent, 0o700)
    command = [sys.executable, "-m", "edgemoe", "serve", "--socket", str(socket), "--model", store]
    command += ["--config", args.config] if args.config else []
    command += [word for given in args.set for word in ("--set", given)]
    with NewFile(socket.with_name(f"{socket.name}.log")) as log:
        log.put_in_place()
        process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, stdout=log.fd, stderr=log.fd, process_group=0
        )
        before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield process
        except ServiceError as error:
            if process.poll() is None:
                raise
            raise ServiceError(f"{error}; the daemon ended so:\n{_last_lines(log.path)}") from error
        finally:
            _stop(process, settings.service.drain_s)
            for number, handler in before.items():
                signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _stop(process: subprocess.Popen[bytes], drain_s: float) -> None:
    """Stops the daemon; kills it if it takes too long."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(drain_s + STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])
