"""What lies in a store while it is unfinished, and how that is cleared away."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path

from edgemoe.durable import sync
from edgemoe.errors import StoreError
from edgemoe.store.files import ARRIVING, LOCK, lock_store
from edgemoe.store.manifest import DENSE, JOURNAL, MANIFEST, Manifest

SHARDS = "shards"  # folder of what is kept of shards that are packed as they arrive
IDENTITY = f"{SHARDS}/arriving.json"  # the checkpoint and the encodings that they are packed for
log = logging.getLogger(__name__)


def start_over(store: Path) -> None:
    """Clears away what cannot be told to come from this checkpoint; only in a directory of ours."""
    if (store / IDENTITY).is_file():
        how = "go on as before, with --wait or --delete-shards and the same encodings, or remove the directory"
        raise StoreError(f"{store} holds shards that were packed as they arrived: {how}")
    if (store / MANIFEST).exists() or (store / JOURNAL).exists():
        log.warning("%s is damaged, or part of another checkpoint's store; starting over", store)
        for file in (store / DENSE, *store.glob("experts/layer_*.safetensors")):
            file.unlink(missing_ok=True)
        return
    ours = (LOCK, ARRIVING, f"{JOURNAL}.tmp", "lost+found")
    others = [path.name for path in store.iterdir() if path.name not in ours]
    if others:
        raise StoreError(f"{store} is not empty and no store (it has {others[0]}); choose another directory")


def finish_clearing(store: Path) -> None:
    """Clears away what is left in a finished store whose packer was killed; nothing where it is in use or read-only."""
    if (store / JOURNAL).is_file() or (store / SHARDS).is_dir():
        with contextlib.suppress(StoreError, OSError), lock_store(store, exclusive=True):
            Manifest.load(store)  # of a damaged one the journal says how to go on
            clear(store)


def clear(store: Path) -> None:
    """Clears away what a finished store needs no more."""
    (store / JOURNAL).unlink(missing_ok=True)
    shutil.rmtree(store / SHARDS, ignore_errors=True)
    sync(store)
