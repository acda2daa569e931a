"""Runs `edgemoe key`, for the keys of TCP clients, and `edgemoe keygen`, for a box's key in a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table

from edgemoe.api.api_keys import new_key, read_keys, remove_key
from edgemoe.cli.output import console
from edgemoe.cluster.rpc.keys import Peer, check_peer, generate
from edgemoe.config.loading import load
from edgemoe.durable import make_folder
from edgemoe.errors import ServiceError, write_remedy
from edgemoe.rights import become_owner

PLACEHOLDERS = {"node": "NODE", "address": "HOST:PORT"}


def run(args: argparse.Namespace) -> int:
    """Does one of the four. Raises ServiceError."""
    file = Path(load(Path(args.config) if args.config else None, args.set).settings.api.api_key_file)
    become_owner(file)
    if args.action == "new":
        print(new_key(file, args.name, args.at_once).secret)
    elif args.action == "remove":
        remove_key(file, args.name)
        print(f"{args.name} is removed from {file}")
    elif args.action == "show":
        print(_secret(file, args.name))
    else:
        _list(file, as_json=args.json)
    return 0


def _secret(file: Path, name: str | None) -> str:
    keys = read_keys(file)
    if not keys:
        raise ServiceError(f"there are no keys in {file}; `edgemoe key new NAME` makes one")
    found = [key.secret for key in keys if name in (None, key.name)]
    if not found:
        names = ", ".join(key.name for key in keys)
        raise ServiceError(f"{file}: there is no key of the name {name!r}; there is {names}")
    return found[0]


def _list(file: Path, *, as_json: bool) -> None:
    keys = read_keys(file) if file.exists() else ()
    if as_json:
        print(json.dumps([{"name": key.name, "at_once": key.at_once} for key in keys]))
    elif not keys:
        print(f"there are no keys in {file}; `edgemoe key new NAME` makes one")
    else:
        table = Table("key", "requests at once", title=f"Keys in {file}")
        for key in keys:
            table.add_row(key.name, str(key.at_once or "any number"))
        console().print(table)


def keygen(args: argparse.Namespace) -> int:
    """Writes a secret key (0600) and prints the entry for the other boxes' lists of peers."""
    path = Path(args.file)
    become_owner(path)
    try:
        make_folder(path.parent, 0o755)
    except OSError as error:
        remedy = write_remedy(error, "make it, or name another place")
        raise ServiceError(f"{path.parent} cannot be made: {error.strerror}; {remedy}") from error
    node, address = args.node or PLACEHOLDERS["node"], args.address or PLACEHOLDERS["address"]
    check_peer(Peer(args.node or "node", args.address or "host:1", "." * 40), path)
    secret = generate(path)
    key = secret.public.decode()
    print(f'[[peer]]\nnode = "{node}"\naddress = "{address}"\nkey = "{key}"')
    print(f"# to join the cluster by this box: edgemoe serve --join '{node},{address},{key}'")
    return 0
