"""What the leader's front and its helpers say to each other.

PlacementQuestion  to one: the boxes, what they report, the homes of now
PlacementAnswer    back: homes, and how long requests wait for others by them; or why there are none
ClusterQuestion    to the other: what requests chose, and which engines there are
ClusterAnswer      back: expert clusters, one for each engine
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.control.messages import Report
from edgemoe.helper.process import MAX_FRAME_BYTES, NumberedMessage
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

MAX_REQUESTS = 1000  # that clusters are fitted to
Table = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]


class PlacementBox(msgspec.Struct, frozen=True):
    """Describes a box as a home of experts."""

    rooms: Counts  # experts of each size, the smallest first
    disk: Bitmap
    ram: Bitmap
    homes: Bitmap = b""  # of now; empty: there is no plan yet
    report: Report | None = None


class PlacementQuestion(NumberedMessage, frozen=True):
    """Asks for a placement."""

    policy: PlacementPolicy
    layers: Small
    experts: Small
    layer_experts: LayerCounts
    layer_bytes: LayerBytes
    replicas: Count
    isolation: Rate
    boxes: Annotated[tuple[PlacementBox, ...], Meta(max_length=MAX_NODES)]
    horizon_s: Rate = 0.0  # for which a move is to pay; 0: moves cost nothing


class PlacementAnswer(NumberedMessage, frozen=True):
    """Answers with each box's homes in memory and on disk, and how long requests wait for others."""

    homes: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()
    disk: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()
    now_s: Rate = 0.0  # by the homes of now, seconds a second
    then_s: Rate = 0.0  # by these homes
    known: bool = False  # whether there is anything to go by for that
    policy: PlacementPolicy = "uniform"
    infeasible: LongText = ""
    missing_bytes: Bytes = 0


class ClusterQuestion(NumberedMessage, frozen=True):
    """Asks for expert clusters of these requests.

    `before` has the engine whose cluster each was in till now, -1 where that is gone; () where there were no clusters.
    """

    layers: Small
    experts: Small
    requests: Annotated[tuple[EndedRequest, ...], Meta(max_length=MAX_REQUESTS)]
    slots: Annotated[tuple[Small, ...], Meta(max_length=MAX_NODES)]  # of each engine
    before: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=MAX_NODES)], ...], Meta(max_length=MAX_REQUESTS)] = ()


class ClusterAnswer(NumberedMessage, frozen=True):
    """Answers with clusters: float32 tables of weights [L, E], centroids [K, L * E] and what is decoded [K, L, E].

    `similarity` and `spread` are those of the requests to the nearest, `nearest` how many of them each is.
    """

    weights: Table
    centroids: Table
    decode: Table
    similarity: Finite
    spread: Finite
    nearest: Annotated[tuple[Small, ...], Meta(max_length=MAX_NODES)]
    chosen: Word  # which weights these are
    rho: Finite  # how well they foretold, for requests that they were not chosen by, who decodes alike
