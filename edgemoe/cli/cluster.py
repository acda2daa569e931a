"""`edgemoe keygen`: what a box needs before it can join others."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgemoe.cluster.wire.keys import Peer, check_peer, generate

UNSAID = {"node": "NODE", "address": "HOST:PORT"}


def keygen(args: argparse.Namespace) -> int:
    """Writes a secret key (0600) and prints the entry for the others' list of peers."""
    path = Path(args.file)
    node, address = args.node or UNSAID["node"], args.address or UNSAID["address"]
    check_peer(Peer(args.node or "node", args.address or "host:1", "." * 40), path)
    secret = generate(path)
    print(f'[[peer]]\nnode = "{node}"\naddress = "{address}"\nkey = "{secret.public.decode()}"')
    return 0
