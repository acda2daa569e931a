"""Movement plans: which experts to bring up a tier ahead of need, densest first.

Source: two-tier-cache 1 and 4.3: near horizon RAM -> VRAM, medium horizon NVMe -> RAM. A move is planned only for what
is worth more than the price of its tier and than what it would replace, and only as many bytes as the link can carry
while nobody demands anything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgemoe.policy.watermark import Watermark
from edgemoe.types import BoolArray, ExpertId, FloatArray, IntArray, Move, Tier


class Side(NamedTuple):
    """One tier as a plan sees it; arrays are [L, E]."""

    b: FloatArray  # density at this tier's horizon
    resident: BoolArray
    watermark: Watermark
    idle_bytes: float  # what its link can carry before the next demand, or at this plan's pace


def plan(vram: Side, ram: Side, sizes: IntArray) -> list[Move]:
    """Promotions RAM -> VRAM, then stagings NVMe -> RAM, each densest first."""
    promote = vram.watermark.verdict(vram.b, vram.resident).admit & ram.resident
    stage = ram.watermark.verdict(ram.b, ram.resident).admit & ~vram.resident
    near = _densest(promote, vram, sizes, Tier.RAM, Tier.VRAM)
    return near + _densest(stage, ram, sizes, Tier.NVME, Tier.RAM)


def _densest(wanted: BoolArray, side: Side, sizes: IntArray, source: Tier, target: Tier) -> list[Move]:
    keys = np.flatnonzero(wanted)
    if not len(keys):
        return []
    worth = side.b.ravel()[keys]
    keys = keys[np.argsort(-worth, kind="stable")]
    keys = keys[np.cumsum(sizes.ravel()[keys]) <= side.idle_bytes]
    experts = side.b.shape[1]
    return [Move(ExpertId(*divmod(key, experts)), source, target, float(side.b.ravel()[key])) for key in keys.tolist()]
