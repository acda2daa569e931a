"""Runs `edgemoe pack`."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgemoe.cli.serve import read_settings, show_progress
from edgemoe.errors import ConfigError
from edgemoe.store.packer import ensure_store, pack
from edgemoe.store.wanted import WantedEncodings
from edgemoe.telemetry.log import configure

MOST_TEXT_BYTES = 16 << 20


def run(args: argparse.Namespace) -> int:
    """Packs one checkpoint, prints the path of the store, and what its encodings cost where that is asked for."""
    settings = read_settings(args).settings
    configure(settings.log)
    wanted = WantedEncodings.parse(args.experts, args.dense)
    text = _read(Path(args.check)) if args.check else ""
    with show_progress(f"packing {args.checkpoint}") as progress:
        if args.store:
            pack(args.checkpoint, args.store, progress, wanted)
            store = Path(args.store)
        else:
            store = ensure_store(args.checkpoint, settings.model.store_dir, progress, wanted)
    print(store)
    if text:
        from edgemoe.worker.quality import compare

        with show_progress(f"checking {store}") as progress:
            quality = compare(store, Path(args.checkpoint), text, progress)
        print(quality)
    return 0


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_TEXT_BYTES:
            raise ConfigError(f"--check: {path} is too large; a few thousand words are enough")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--check: {path} cannot be read as text: {error}") from error
