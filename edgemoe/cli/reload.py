"""Runs `edgemoe reload`: makes the running daemon load its ScoutGate export again."""

from __future__ import annotations

import argparse

from edgemoe.cli.client import Client, socket_of


def run(args: argparse.Namespace) -> int:
    """Prints which export is in use now. Raises EdgemoeError where the old one stays, or no daemon answers."""
    with Client(socket_of(args)) as client:
        print(client.post("/reload")["message"])
    return 0
