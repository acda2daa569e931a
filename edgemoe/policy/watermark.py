"""Watermarks: the price of a byte in each tier, and what it decides.

Source: [Two-Tier, 4.3]. An expert is worth b = p C / S a byte: the chance of its use, what a miss costs, its size.
The source raises the price lambda where resident bytes exceed the tier; they never can, so that it could only fall.
Here it follows the bytes *demanded* at the present price, sum S [b >= lambda], by steps relative to the tier's size and
to the price itself, which grow while they go one way and shrink where they turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

FIRST_STEP, LEAST_STEP, MOST_STEP = 0.1, 0.002, 0.5  # relative to the price
GROWTH, SHRINKAGE = 1.3, 0.5
SLACK = 0.02  # demand this close to capacity leaves the price alone


def miss_cost(sizes: IntArray, fixed_s: float | FloatArray, per_byte_s: float | FloatArray) -> FloatArray:
    """Seconds that it takes to bring each expert in: C, from what was measured of its link."""
    cost: FloatArray = (fixed_s + per_byte_s * sizes).astype(np.float32)
    return cost


def density(p: FloatArray, cost_s: FloatArray, sizes: IntArray) -> FloatArray:
    """b = p C / S, expected seconds saved a byte."""
    b: FloatArray = (p * cost_s / sizes).astype(np.float32)
    return b


class Verdict(NamedTuple):
    """What a tier should do with each expert. None is both."""

    admit: BoolArray  # not here, and well worth its bytes
    drop: BoolArray  # here, and well below the price


class Watermark:
    """One tier's price. Pure: the caller says what is where."""

    def __init__(self, capacity_bytes: int, *, hysteresis: float = 0.1) -> None:
        self.capacity_bytes, self.hysteresis = capacity_bytes, hysteresis
        self.price = 0.0  # lambda
        self._step, self._way = FIRST_STEP, 0

    def demanded_bytes(self, b: FloatArray, sizes: IntArray) -> int:
        """Bytes of all experts that are worth the present price."""
        return int(sizes[b >= self.price].sum()) if self.price > 0 else int(sizes.sum())

    def update(self, b: FloatArray, sizes: IntArray) -> None:
        """Moves the price one step, by densities and sizes of the same shape."""
        typical = float(b.mean())
        excess = (self.demanded_bytes(b, sizes) - self.capacity_bytes) / self.capacity_bytes
        way = 0 if abs(excess) <= SLACK else 1 if excess > 0 else -1
        if way and self._way:
            self._step *= GROWTH if way == self._way else SHRINKAGE
            self._step = min(max(self._step, LEAST_STEP), MOST_STEP)
        if way:
            self.price = max(0.0, self.price + way * self._step * max(self.price, 0.1 * typical))
            self._way = way

    def verdict(self, b: FloatArray, resident: BoolArray) -> Verdict:
        """Admit above (1 + h) lambda, drop below (1 - h) lambda."""
        high, low = (1 + self.hysteresis) * self.price, (1 - self.hysteresis) * self.price
        return Verdict(~resident & (b >= high), resident & (b < low))


def floor(b: FloatArray, sizes: IntArray, capacity_bytes: int, working_set_bytes: int) -> BoolArray:
    """What to pin where a tier does not hold one token's working set: the densest that fit; nothing where it does.

    All else streams through the room of the largest expert, which is left free.
    """
    pinned = np.zeros(b.shape, np.bool_)
    if capacity_bytes >= working_set_bytes:
        return pinned
    order = np.argsort(-b, axis=None, kind="stable")
    room = capacity_bytes - int(sizes.max())
    pinned.ravel()[order[np.cumsum(sizes.ravel()[order]) <= room]] = True
    return pinned
