"""Runs `edgemoe pull`: downloads a model, packed, from the hub or from the other boxes of a cluster."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from edgemoe.cli.auto_encoding import AUTO, ask_for_repository
from edgemoe.cli.command_settings import read_settings, show_progress
from edgemoe.cli.model_texts import check_texts
from edgemoe.config.settings import Settings
from edgemoe.config.sizes import parse_rate
from edgemoe.errors import ConfigError
from edgemoe.rights import become_owner
from edgemoe.store.layout import KEEP, WantedEncodings
from edgemoe.store.packer import Progress
from edgemoe.telemetry.log import configure


def run(args: argparse.Namespace) -> int:
    """Fetches a model, and prints the store's directory."""
    settings = read_settings(args).settings
    configure(settings.log)
    become_owner(Path(settings.model.store_dir))
    with show_progress(f"pulling {args.model}") as progress:
        store = (_from_peers if args.from_peers else _from_hub)(args, settings, progress)
    print(store)
    return 0


def _from_hub(args: argparse.Namespace, settings: Settings, progress: Progress) -> Path:
    from edgemoe.store.download import download

    if args.rate:
        raise ConfigError("--rate is for --from-peers")
    experts = args.experts
    if experts == AUTO:
        experts = KEEP if args.quant else ask_for_repository(args.model, args.revision, args)
    wanted = replace(WantedEncodings.parse(experts, args.dense), finite=not args.allow_nonfinite)
    places = {"revision": args.revision, "quant": args.quant}
    return download(args.model, settings.model.store_dir, wanted, progress, **places, check=check_texts)


def _from_peers(args: argparse.Namespace, settings: Settings, progress: Progress) -> Path:
    from edgemoe.cli.store_download import pull

    if (args.experts, args.dense, args.revision, args.quant) != ("keep", "keep", "main", ""):
        raise ConfigError(
            "--from-peers takes the store as the boxes have it: without --experts, --dense, --revision, --quant"
        )
    rate = parse_rate(args.rate) if args.rate else 0.0
    return asyncio.run(pull(settings.cluster, Path(settings.model.store_dir).expanduser(), args.model, rate, progress))
