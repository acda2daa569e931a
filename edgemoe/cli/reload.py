"""`edgemoe reload`: has the running daemon load its ScoutGate again."""

from __future__ import annotations

import argparse

from edgemoe.cli.client import Client, socket_of


def run(args: argparse.Namespace) -> int:
    """Prints what is in use then. Raises EdgemoeError where the old one stays, or no daemon answers."""
    with Client(socket_of(args)) as client:
        print(client.post("/reload")["message"])
    return 0
