"""Runs `edgemoe pack`: converts a Hugging Face checkpoint to a store."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from edgemoe.cli.auto_encoding import AUTO, ask, resolve_experts
from edgemoe.cli.command_settings import read_settings, show_progress
from edgemoe.cli.model_texts import check_texts
from edgemoe.errors import ConfigError
from edgemoe.rights import become_owner
from edgemoe.store.arriving import arriving_store, pack_arrived
from edgemoe.store.catalog import is_store, spec_at
from edgemoe.store.checkpoint import CONFIG
from edgemoe.store.files import ARRIVING, lock_store, os_errors_as_store_error
from edgemoe.store.gguf.checkpoint_of_gguf import gguf_at, open_checkpoint
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import MANIFEST
from edgemoe.store.packer import AS_IT_IS, Progress, ensure_store, pack, place_of
from edgemoe.telemetry.log import configure

MOST_TEXT_BYTES = 16 << 20
MOST_NAMES = 3  # of missing shards that a message lists
POLL_S = 2.0  # between checks for shards that have arrived


def run(args: argparse.Namespace) -> int:
    """Packs one checkpoint, prints the path of the store, and with --check the loss of its encodings."""
    settings = read_settings(args).settings
    configure(settings.log)
    become_owner(Path(args.store or settings.model.store_dir))
    if args.check and args.delete_shards:
        raise ConfigError("--check reads the checkpoint, whose shards --delete-shards deletes; drop one of the two")
    text = _read(Path(args.check)) if args.check else ""
    source = Path(args.checkpoint).expanduser()
    wanted = _wanted(args, source, settings.model.store_dir)
    if (source / MANIFEST).is_file() and (wanted != AS_IT_IS or args.store or args.wait or args.delete_shards):
        raise ConfigError(f"{source} is a packed store, which stays as it is; name the checkpoint to pack")
    if not is_store(source):
        spec_at(source)
    if (args.wait or args.delete_shards) and gguf_at(source) is not None:
        raise ConfigError(
            "--wait and --delete-shards are for shards of safetensors; fetch the whole GGUF, then pack it"
        )
    check_texts(source)
    with show_progress(f"packing {args.checkpoint}") as progress:
        if args.wait or args.delete_shards:
            store = Path(args.store or arriving_store(args.checkpoint, settings.model.store_dir, wanted))
            if missing := _pack_arriving(args, store, wanted, progress):
                print(
                    f"packed as far as it goes; run it again when these have arrived: {_some(missing)}", file=sys.stderr
                )
                return 0
        elif args.store:
            pack(args.checkpoint, args.store, progress, wanted)
            store = Path(args.store)
        else:
            store = _pack_in_place(args.checkpoint, Path(settings.model.store_dir), wanted, progress)
    print(store)
    if text:
        from edgemoe.worker.quality import compare

        with show_progress(f"checking {store}") as progress:
            quality = compare(store, Path(args.checkpoint), text, progress)
        print(quality)
    return 0


def _wanted(args: argparse.Namespace, source: Path, store_dir: str) -> WantedEncodings:
    """Returns the encodings of the options. Raises ConfigError, CapacityError, CheckpointError."""
    experts = args.experts
    if experts == AUTO and (args.wait or args.delete_shards):
        experts = ask(source / CONFIG, args)
    elif experts == AUTO:
        experts = resolve_experts(AUTO, source, args, store_dir, args.dense)
    return replace(WantedEncodings.parse(experts, args.dense), finite=not args.allow_nonfinite)


def _pack_in_place(checkpoint: str, store_dir: Path, wanted: WantedEncodings, progress: Progress) -> Path:
    """Packs a checkpoint to its place below `store_dir`. Verifies a finished store and packs damaged parts again."""
    source = Path(checkpoint).expanduser()
    if (source / MANIFEST).is_file():
        return source
    place = place_of(store_dir, open_checkpoint(source), wanted)
    finished = (place / MANIFEST).is_file()
    store = ensure_store(source, store_dir, progress, wanted)
    if finished:
        pack(source, store, progress, wanted)
    return store


def _pack_arriving(
    args: argparse.Namespace, store: Path, wanted: WantedEncodings, progress: Progress
) -> tuple[str, ...]:
    """Packs the shards that have arrived, and with --wait later ones, too. Returns the names of missing shards."""
    told: tuple[str, ...] = ()
    missing = pack_arrived(args.checkpoint, store, progress, wanted, delete=args.delete_shards).missing
    if not missing or not args.wait:
        return missing
    with os_errors_as_store_error(store), lock_store(store, exclusive=True, lock=ARRIVING):
        while missing:
            if missing != told:
                print(f"waiting for {_some(missing)}", file=sys.stderr)
                told = missing
            time.sleep(POLL_S)
            missing = pack_arrived(args.checkpoint, store, progress, wanted, delete=args.delete_shards).missing
    return ()


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_TEXT_BYTES:
            raise ConfigError(f"--check: {path} is too large; a few thousand words are enough")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--check: {path} cannot be read as text: {error}") from error
