"""Experts, where they can be, and the cache policies that rank them."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from edgemoe.types.arrays import FloatArray, IntArray


class Tier(enum.IntEnum):
    """Where an expert can be. Lower is faster."""

    VRAM = 0
    RAM = 1
    NVME = 2


class ExpertId(NamedTuple):
    """One expert of one layer, both counted from 0."""

    layer: int
    expert: int


class Move(NamedTuple):
    """A copy of one expert to a faster tier, wished for before it is needed.

    `score` is its worth in the units of the target tier's `CachePolicy.rank`: it takes the place of an expert
    ranked lower, or none. Where the order alone is known, infinity stands for "needed for certain". `chance` that it
    is needed soon: how much it may get in the way of a demand.
    """

    expert: ExpertId
    source: Tier
    target: Tier
    score: float
    chance: float = 1.0


class CachePolicy(Protocol):
    """Ranks experts for one tier. Pure: no clock, thread or device; runs the same live and in replay."""

    def touch(self, layer: int, experts: IntArray) -> None:
        """One layer-step demanded these distinct experts [n]."""

    def rank(self, layer: int) -> FloatArray:
        """Worth of keeping each expert while `layer` executes, [L, E]; the lowest unpinned one goes first."""


class LivePolicy(CachePolicy, Protocol):
    """A policy that an engine may run: it can tell what a prefetch may replace."""

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What the gate of a layer that runs next says of some experts [n], weighed with all else that is known.

        `chance` [n] is that each is needed there. The chance to go by, and the worth in units of `rank`; both [n].
        """


class Store(Protocol):
    """Where experts are read from: the NVMe tier."""

    def expert_bytes(self, layer: int, expert: int) -> int:
        """Size of one expert as stored, padding excluded."""

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads one expert into `into` and verifies it. Raises CorruptExpert, MissingExpert."""
