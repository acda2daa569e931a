"""The engine's parts that only a cluster needs: peers' stores, the watch of a growing store, expert counts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from edgemoe.cluster.data.expert_fetch import PeerStore
from edgemoe.errors import StoreError
from edgemoe.experts.activity import ActivityCounter
from edgemoe.experts.compute.expert_shelf import ExpertShelf
from edgemoe.store.files import checksum
from edgemoe.store.manifest import MANIFEST, Manifest
from edgemoe.store.peer_copy import StorePieces
from edgemoe.store.reader import ExpertStore
from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import ServedModel
from edgemoe.worker.memory_lending import MemoryLending
from edgemoe.worker.prefill_decode_transfer import LastChunkNotifier


class ClusterParts(NamedTuple):
    """Parts of an engine in a cluster: served experts and pieces, a store that reads from peers, notifiers."""

    model: ServedModel
    shelf: ExpertShelf
    store: PeerStore
    activity: ActivityCounter
    last_chunks: LastChunkNotifier
    pieces: StorePieces
    growth: StoreWatcher
    lending: MemoryLending


def cluster_parts_of(
    directory: Path, served: ServedModel, store: ExpertStore, activity: ActivityCounter
) -> ClusterParts:
    """Builds the parts for a store, idle until the engine joins the cluster."""
    shelf, pieces = ExpertShelf(store.manifest, store, served.geometry), StorePieces(directory, store.manifest)
    peers = PeerStore(store, shelf, checksum, served.geometry)
    return ClusterParts(
        served,
        shelf,
        peers,
        activity,
        LastChunkNotifier(),
        pieces,
        StoreWatcher(directory, store, shelf, pieces),
        MemoryLending(),
    )


log = logging.getLogger(__name__)


class StoreWatcher:
    """Polls a store's manifest for experts that arrive while the engine runs, as by `edgemoe pull --from-peers`."""

    def __init__(self, directory: Path, store: ExpertStore, shelf: ExpertShelf, pieces: StorePieces) -> None:
        self._file = directory / MANIFEST
        self._store, self._shelf, self._pieces = store, shelf, pieces
        self._seen = self._stamp()

    async def poll(self, on_disk: BoolArray) -> None:
        """Uses experts that the manifest lists since the last poll, and marks them in `on_disk` [L, E]."""
        if (stamp := self._stamp()) == self._seen:
            return
        self._seen, before = stamp, self._store.manifest
        try:
            manifest = await asyncio.to_thread(Manifest.load, self._file.parent)
            if manifest.digest != before.digest:
                raise StoreError(f"{self._file} names another model; restart the daemon")
            if _lacks(manifest, before):
                raise StoreError(f"{self._file} lists fewer experts than it did; restart the daemon to use it")
            self._store.grow(manifest)
        except StoreError as error:
            log.warning("a store that has changed is used as it was", extra={"why": str(error)})
            return
        self._shelf.grow(manifest)
        self._pieces.grow(manifest)
        on_disk |= self._shelf.on_disk()
        log.info("the store has grown", extra={"experts": int(on_disk.sum())})

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self._file.stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size


def _lacks(manifest: Manifest, before: Manifest) -> bool:
    """Returns whether an expert that was listed is so no longer."""
    layers = zip(manifest.layers, before.layers, strict=True)
    return any(then.by_expert.keys() - layer.by_expert.keys() for layer, then in layers)
