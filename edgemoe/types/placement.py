"""Placement plans: the boxes that keep each expert in memory."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from edgemoe.types.arrays import BoolArray
from edgemoe.types.bounds import MAX_NODES, Bitmap, Count, Small, Text, Word

PlacementPolicy = Literal["rendezvous", "prism", "gimbal", "uniform"]
ACTIVITY_HALF_LIFE_S = 600.0  # after which a box's expert counts weigh half
ACTIVITY_UNIT = 65535  # the share 1 of the tokens, in reported activity


PLAN_FORMAT = 2


def digest_of(data: bytes | memoryview) -> str:
    """Returns the digest of an encoded plan."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class PlacementPlan(msgspec.Struct, frozen=True):
    """Lists every expert's homes: the boxes that keep it, for all. Named by epoch, version and digest.

    Fields added since format 1 have defaults, so that an older release can follow `homes`.
    """

    epoch: Count
    version: Count
    model: Text  # digest
    layers: Small
    experts: Small
    nodes: Annotated[tuple[Text, ...], Meta(max_length=MAX_NODES)]
    # bitmaps are of L * E bits for each node, see `pack_bits`; () where there are none
    homes: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)]  # in memory
    goal: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()  # homes after those, while experts move
    format: Small = 1
    disk: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)] = ()  # on disk: no memory holds them
    policy: Word = ""  # the placement policy that made it

    def digest(self) -> str:
        """Returns the digest of the plan as this release encodes it. A received plan is named by the bytes received."""
        return digest_of(msgspec.msgpack.encode(self))

    def homes_of(self, node: str) -> BoolArray:
        """Returns whether each expert [L, E] is at home at the node; all False where the plan does not name it."""
        if node not in self.nodes:
            return np.zeros((self.layers, self.experts), np.bool_)
        return unpack_bits(self.homes[self.nodes.index(node)], self.layers, self.experts)

    @property
    def goal_homes(self) -> BoolArray:
        """Returns the homes [N, L, E] that this plan is a step to: its own where it is none."""
        return np.stack([unpack_bits(bits, self.layers, self.experts) for bits in self.goal or self.homes])

    @property
    def disk_homes(self) -> BoolArray:
        """Returns the homes [N, L, E] on disk."""
        if not self.disk:
            return np.zeros((len(self.nodes), self.layers, self.experts), np.bool_)
        return np.stack([unpack_bits(bits, self.layers, self.experts) for bits in self.disk])


def pack_bits(which: BoolArray) -> bytes:
    """Returns booleans [L, E] as a bitmap: bit l * E + e, the lowest bit of each byte first."""
    return np.packbits(which.ravel(), bitorder="little").tobytes()


def unpack_bits(bitmap: bytes, layers: int, experts: int) -> BoolArray:
    """Returns booleans [L, E] from a bitmap. Raises ValueError where its size is wrong."""
    bits = layers * experts
    if len(bitmap) != -(-bits // 8):
        raise ValueError(f"a bitmap of {len(bitmap)} bytes for {layers} layers of {experts} experts")
    flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=bits, bitorder="little")
    return flags.reshape(layers, experts).astype(np.bool_)
