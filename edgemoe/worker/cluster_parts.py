"""The engine's parts that only a cluster needs: peers' stores, a growing store, expert counts, memory to lend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgemoe.cluster.data.expert_fetch import PeerStore
from edgemoe.errors import StoreError
from edgemoe.experts.activity import ActivityCounter
from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.compute.expert_shelf import ExpertShelf
from edgemoe.experts.compute.peer_compute import PeerCompute
from edgemoe.experts.compute.peer_layer_step import FEW_TOKENS
from edgemoe.policy.lending import LeastRecentCache, LendingChoice
from edgemoe.store.files import checksum
from edgemoe.store.manifest import MANIFEST, Manifest
from edgemoe.store.peer_copy import StorePieces
from edgemoe.store.reader import ExpertStore
from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import ServedModel
from edgemoe.types.step import StepRouting
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


class MemoryLending:
    """Owns the decision and the simulated cache. `on_step_ended` runs on the compute thread."""

    def __init__(self) -> None:
        self.choice = LendingChoice()
        self.settled = False  # all home experts are in memory
        self._tiers: ExpertTiers | None = None
        self._host: PeerCompute | None = None
        self._taken_s = self._units = 0.0
        self._given = self._got = 0

    def join(self, tiers: ExpertTiers, host: PeerCompute) -> None:
        """Observes the steps of these tiers from now on, if their disk has every expert; `host` computes for peers."""
        geometry = tiers.geometry
        self._cache = LeastRecentCache((geometry.layers, geometry.experts), tiers.residency.ram.slots)
        self._first = (np.arange(geometry.layers) * geometry.experts)[:, None, None]  # [L, 1, 1] each layer's first key
        sizes = geometry.strides_bytes
        self._mean_size = float(sizes.mean() / sizes[0])  # of an expert, beside one of the first layer
        self._host = host
        self._tiers = tiers if tiers.on_disk[geometry.exists].all() else None

    @property
    def keeps_memory(self) -> bool:
        """Returns whether memory follows own requests: former homes too are ranked like others, at once."""
        return not self.choice.lends

    def rooms(self, capacities: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of home experts of each size to offer room for."""
        return tuple(min(room, max(1, int(room * self.choice.share))) for room in capacities)

    def on_step_ended(self, routing: StepRouting) -> None:
        """Adds a step of few tokens that only decoded."""
        if self._tiers is None or self._host is None or (remote := self._tiers.experts.remote) is None:
            return
        lacking_s, units = remote.taken_s - self._taken_s, remote.units - self._units
        self._taken_s, self._units = remote.taken_s, remote.units
        if routing.meta.prompt_tokens or routing.ids.shape[1] > FEW_TOKENS:
            return
        misses = self._cache.count_misses(np.unique((routing.ids + self._first)[routing.ids >= 0]))
        if not self.settled:
            return
        costs = remote.costs
        alone_s = (
            max(0.0, routing.step_s - lacking_s) + units * costs.unit_s + misses * self._mean_size * costs.read_s(0)
        )
        given, got = self._host.experts - self._given, remote.experts - self._got
        self._given, self._got = self._host.experts, remote.experts
        if self.choice.observe(routing.step_s, alone_s, given, got):
            # as a box alone does, one that keeps its memory reads ahead, also if peers have the experts
            self._tiers.loader.elsewhere = remote.elsewhere if self.choice.lends else None
            whose = "the plan" if self.choice.lends else "this box's own requests, which are faster so"
            log.info(f"memory for experts follows {whose}")
