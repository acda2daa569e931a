"""Messages between the leader's front and its helper processes.

The placement process answers a PlacementQuestion (boxes, reports, homes in force) with a PlacementAnswer. The fitting
process answers a ClusterQuestion (experts that requests chose, engines) with a ClusterAnswer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.control.messages import BoxReport
from edgemoe.helper.child_process import MAX_FRAME_BYTES, NumberedMessage
from edgemoe.types.bounds import (
    MAX_NODES,
    Bitmap,
    Bytes,
    Count,
    Counts,
    Finite,
    LayerBytes,
    LayerCounts,
    LongText,
    Rate,
    Small,
    Word,
)
from edgemoe.types.expert_signatures import EndedRequest
from edgemoe.types.placement import PlacementPolicy

MAX_REQUESTS = 1000  # in one fit
Table = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]


class PlacementBox(msgspec.Struct, frozen=True):
    """Describes a box as a home of experts."""

    rooms: Counts  # for experts of each size, the smallest first
    disk: Bitmap
    ram: Bitmap
    homes: Bitmap = b""  # in force; empty without a plan
    report: BoxReport | None = None


class PlacementQuestion(NumberedMessage, frozen=True):
    """Asks for a placement."""

    policy: PlacementPolicy
    layers: Small
    experts: Small
    layer_experts: LayerCounts
    layer_bytes: LayerBytes
    replicas: Count
    boxes: Annotated[tuple[PlacementBox, ...], Meta(max_length=MAX_NODES)]
    horizon_s: Rate = 0.0  # within which a move must pay; 0: moves cost nothing


class PlacementAnswer(NumberedMessage, frozen=True):
    """Carries each box's homes in memory and on disk, and how long requests wait for peers."""

    homes: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()
    disk: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()
    now_s: Rate = 0.0  # waiting per second under the homes in force
    then_s: Rate = 0.0  # the same under these homes
    known: bool = False  # whether any reports support the two times
    policy: PlacementPolicy = "uniform"
    infeasible: LongText = ""
    missing_bytes: Bytes = 0


class ClusterQuestion(NumberedMessage, frozen=True):
    """Asks for expert clusters of these requests.

    `before` has each request's former cluster by engine, -1 if that engine is gone; () if there were no clusters.
    """

    layers: Small
    experts: Small
    requests: Annotated[tuple[EndedRequest, ...], Meta(max_length=MAX_REQUESTS)]
    slots: Annotated[tuple[Small, ...], Meta(max_length=MAX_NODES)]  # of each engine
    before: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=MAX_NODES)], ...], Meta(max_length=MAX_REQUESTS)] = ()


class ClusterAnswer(NumberedMessage, frozen=True):
    """Carries float32 tables: weights [L, E], centroids [K, L * E] and decoded choices [K, L, E].

    `similarity` and `spread` describe the requests' distances to their nearest clusters. `nearest` counts the requests
    of each cluster.
    """

    weights: Table
    centroids: Table
    decode: Table
    similarity: Finite
    spread: Finite
    nearest: Annotated[tuple[Small, ...], Meta(max_length=MAX_NODES)]
    chosen: Word  # name of the weighting
    rho: Finite  # rank correlation between predicted and actual similarity, on held-out requests
