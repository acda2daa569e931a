"""Runs `edgemoe models`: lists, verifies or removes the packed stores on this box."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from edgemoe.cli.client import Client, socket_of
from edgemoe.cli.model_tables import packed_listing, served_table
from edgemoe.cli.output import console, progress_bar
from edgemoe.config.loading import load
from edgemoe.errors import ConfigError, EdgemoeError
from edgemoe.outputs import CONTROL
from edgemoe.rights import become_owner
from edgemoe.store import catalog as models

EXIT_DAMAGED = 1


def run(args: argparse.Namespace) -> int:
    """Lists the stores, or verifies or removes one."""
    store_dir = Path(load(Path(args.config) if args.config else None, args.set).settings.model.store_dir)
    become_owner(store_dir)
    if args.action == "list":
        _list(store_dir, as_json=args.json)
        if not args.json:
            _show_served(args)
        return 0
    store = models.resolve(args.model, store_dir)
    return _verify(store) if args.action == "verify" else _remove(store, sure=args.yes)


def _list(store_dir: Path, *, as_json: bool) -> None:
    if as_json:
        cards = map(models.describe, models.find_stores(store_dir))
        print(json.dumps([asdict(card) for card in cards], indent=2))
    else:
        screen = console()
        listed = packed_listing(store_dir, screen.width)
        print(CONTROL.sub("", listed)) if isinstance(listed, str) else screen.print(listed)


def _show_served(args: argparse.Namespace) -> None:
    """Shows the models of a running daemon that serves several."""
    path = socket_of(argparse.Namespace(socket=None, config=args.config, set=args.set))
    with Client(path) as client, contextlib.suppress(EdgemoeError, ValueError):
        health = json.loads(client.text("/health", accept_unavailable=True)) if client.is_listening() else {}
        if health.get("models"):
            console().print(f"\nServed at {path}", served_table(health["models"]))


def _verify(store: Path) -> int:
    with progress_bar(f"verifying {store.name}", Console(stderr=True)) as progress:
        faults = models.verify(store, progress)
    print("\n".join(map(str, faults)) if faults else f"{store} is whole")
    return EXIT_DAMAGED if faults else 0


def _remove(store: Path, *, sure: bool) -> int:
    if not sure:
        if not sys.stdin.isatty():
            raise ConfigError(f"{store} would be removed; say --yes to confirm")
        if not _agreed(f"Remove {store}? [y/N] "):
            print("Nothing was removed.")
            return 0
    models.remove(store)
    print(f"{store} is removed")
    return 0


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
