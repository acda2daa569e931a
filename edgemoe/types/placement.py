"""Placement plans: which box keeps which expert in memory."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from edgemoe.types.arrays import BoolArray
from edgemoe.types.bounds import MAX_NODES, Bitmap, Count, Small, Text


def digest_of(data: bytes | memoryview) -> str:
    """Names what a plan was written as."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class PlacementPlan(msgspec.Struct, frozen=True):
    """Where every expert is at home: a home keeps it in memory for all. Named by epoch, version and digest."""

    epoch: Count
    version: Count
    model: Text  # digest
    layers: Small
    experts: Small
    nodes: Annotated[tuple[Text, ...], Meta(max_length=MAX_NODES)]
    homes: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)]  # per node, of L * E bits, see `pack_bits`

    def digest(self) -> str:
        """Names the plan as this release writes it; one that was received goes by the bytes that came."""
        return digest_of(msgspec.msgpack.encode(self))

    def homes_of(self, node: str) -> BoolArray:
        """Experts [L, E] that are at home at the node; none where the plan does not name it."""
        if node not in self.nodes:
            return np.zeros((self.layers, self.experts), np.bool_)
        return unpack_bits(self.homes[self.nodes.index(node)], self.layers, self.experts)


def pack_bits(which: BoolArray) -> bytes:
    """Booleans [L, E] as a bitmap: bit l * E + e, the lowest of each byte first."""
    return np.packbits(which.ravel(), bitorder="little").tobytes()


def unpack_bits(bitmap: bytes, layers: int, experts: int) -> BoolArray:
    """Booleans [L, E] from a bitmap. Raises ValueError where it has another size."""
    bits = layers * experts
    if len(bitmap) != -(-bits // 8):
        raise ValueError(f"a bitmap of {len(bitmap)} bytes for {layers} layers of {experts} experts")
    flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=bits, bitorder="little")
    return flags.reshape(layers, experts).astype(np.bool_)
