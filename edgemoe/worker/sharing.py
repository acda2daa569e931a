"""What a box in a cluster has besides an engine, and what counts by what experts are placed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from edgemoe.cluster.data.expert_fetch import PeerStore
from edgemoe.config.budgets import Budgets
from edgemoe.config.settings import Settings
from edgemoe.experts.activity import ActivityCounter
from edgemoe.experts.compute.peer_compute import ExpertShelf
from edgemoe.store.files import checksum
from edgemoe.store.peer_copy import StorePieces
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.model_info import ServedModel
from edgemoe.worker.hand_over import LastChunks
from edgemoe.worker.store_growth import StoreGrowth


class Sharing(NamedTuple):
    """What a box in a cluster has besides: experts as bytes, a store that reads from peers too, what is told."""

    model: ServedModel
    shelf: ExpertShelf
    store: PeerStore
    activity: ActivityCounter
    last_chunks: LastChunks
    pieces: StorePieces
    growth: StoreGrowth


def activity_of(settings: Settings, geometry: ExpertGeometry, budgets: Budgets) -> ActivityCounter | None:
    """Returns what counts choices where the boxes of a cluster, or several devices of one, share experts by them."""
    if settings.cluster.node:
        return ActivityCounter(geometry, successions=settings.cluster.placement == "gimbal")
    return ActivityCounter(geometry) if len(budgets.devices) > 1 else None


def sharing_of(
    settings: Settings, directory: Path, served: ServedModel, store: ExpertStore, activity: ActivityCounter | None
) -> Sharing | None:
    """Returns it for a store, its parts idle yet; None where the box is in no cluster."""
    if not settings.cluster.node or activity is None:
        return None
    shelf, pieces = ExpertShelf(store.manifest, store, served.geometry), StorePieces(directory, store.manifest)
    peers = PeerStore(store, shelf, checksum, served.geometry)
    return Sharing(
        served,
        shelf,
        peers,
        activity,
        LastChunks(),
        pieces,
        StoreGrowth(directory, store, shelf, pieces),
    )
