"""What the leader's front and its solver say to each other: frames of a length, four bytes, and so many of msgpack.

PlacementQuestion  to the solver: the boxes, what they report, the homes of now
PlacementAnswer    back: homes, and how long requests wait for others by them; or why there are none
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.rpc.control_messages import Report
from edgemoe.types.bounds import MAX_NODES, Bitmap, Bytes, Count, Counts, LayerBytes, LayerCounts, LongText, Rate, Small
from edgemoe.types.placement import PlacementPolicy

MAX_FRAME_BYTES = 64 << 20
LENGTH_BYTES = 4


class QuestionedBox(msgspec.Struct, frozen=True):
    """Describes a box as a home of experts."""

    rooms: Counts  # experts of each size, the smallest first
    disk: Bitmap
    ram: Bitmap
    homes: Bitmap = b""  # of now; empty: there is no plan yet
    report: Report | None = None


class PlacementQuestion(msgspec.Struct, frozen=True):
    """Asks for a placement."""

    number: Count
    policy: PlacementPolicy
    layers: Small
    experts: Small
    layer_experts: LayerCounts
    layer_bytes: LayerBytes
    replicas: Count
    isolation: Rate
    boxes: Annotated[tuple[QuestionedBox, ...], Meta(max_length=MAX_NODES)]


class PlacementAnswer(msgspec.Struct, frozen=True):
    """Answers with each box's homes in memory and on disk, and how long requests wait for others."""

    number: Count
    homes: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()
    disk: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()
    now_s: Rate = 0.0  # by the homes of now, seconds a second
    then_s: Rate = 0.0  # by these homes
    known: bool = False  # whether there is anything to go by for that
    policy: PlacementPolicy = "uniform"
    infeasible: LongText = ""
    missing_bytes: Bytes = 0


def frame(message: PlacementQuestion | PlacementAnswer) -> bytes:
    """Returns the message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
