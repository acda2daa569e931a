"""Runs `edgemoe pull`: has a model on this box, packed, from the hub."""

from __future__ import annotations

import argparse

from edgemoe.cli.serve import read_settings, show_progress
from edgemoe.store.wanted import WantedEncodings
from edgemoe.telemetry.log import configure


def run(args: argparse.Namespace) -> int:
    """Fetches and packs a repository, and prints the store's directory."""
    from edgemoe.store.hub.pull import pull

    settings = read_settings(args).settings
    configure(settings.log)
    wanted = WantedEncodings.parse(args.experts, args.dense)
    with show_progress(f"pulling {args.repository}") as progress:
        store = pull(args.repository, settings.model.store_dir, wanted, progress, revision=args.revision)
    print(store)
    return 0
