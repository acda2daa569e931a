"""Runs `edgemoe keygen` and `edgemoe witness`."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from edgemoe.cluster.rpc.keys import Peer, check_peer, generate
from edgemoe.config.loading import load
from edgemoe.errors import ConfigError
from edgemoe.guard import refuse_pickle
from edgemoe.rights import become_owner
from edgemoe.telemetry.log import configure, goes_to_journal

PLACEHOLDERS = {"node": "NODE", "address": "HOST:PORT"}


def keygen(args: argparse.Namespace) -> int:
    """Writes a secret key (0600) and prints the entry for the other boxes' lists of peers."""
    path = Path(args.file)
    become_owner(path)
    node, address = args.node or PLACEHOLDERS["node"], args.address or PLACEHOLDERS["address"]
    check_peer(Peer(args.node or "node", args.address or "host:1", "." * 40), path)
    secret = generate(path)
    key = secret.public.decode()
    print(f'[[peer]]\nnode = "{node}"\naddress = "{address}"\nkey = "{key}"')
    print(f"# to join the cluster by this box: edgemoe serve --join '{node},{address},{key}'")
    return 0


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
