"""Watermarks, the price of a byte in each tier, and the moves between tiers that are worth it.

Source: [Two-Tier, 1] and [Two-Tier, 4.3]. An expert is worth b = p C / S a byte: the probability of its use, the cost
of a miss, its size. The source raises the price where resident bytes exceed the tier, which never happens. Here the
price follows the bytes *demanded* at it, sum S [b >= lambda], by steps that grow until they turn.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from edgemoe.policy.forecast_mix import Calibration
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertId, Move, Tier

FIRST_STEP, LEAST_STEP, MOST_STEP = 0.1, 0.002, 0.5  # relative to the price
GROWTH, SHRINKAGE = 1.3, 0.5
SLACK = 0.02  # demand this close to capacity leaves the price alone


def miss_cost(sizes: IntArray, fixed_s: float | FloatArray, per_byte_s: float | FloatArray) -> FloatArray:
    """Returns C, the seconds of bringing each expert in, from the measured times of its link."""
    cost: FloatArray = (fixed_s + per_byte_s * sizes).astype(np.float32)
    return cost


def density(p: FloatArray, cost_s: FloatArray, sizes: IntArray) -> FloatArray:
    """Returns b = p C / S, the expected seconds saved per byte."""
    b: FloatArray = (p * cost_s / sizes).astype(np.float32)
    return b


class TierChanges(NamedTuple):
    """The experts that a tier should admit and drop. No expert is both."""

    admit: BoolArray  # not here, and well worth its bytes
    drop: BoolArray  # here, and well below the price


class Watermark:
    """One tier's price. Pure: the caller passes the resident experts."""

    def __init__(self, capacity_bytes: int, *, hysteresis: float = 0.1) -> None:
        self.capacity_bytes, self.hysteresis = capacity_bytes, hysteresis
        self.price = 0.0  # lambda
        self._step, self._way = FIRST_STEP, 0

    def demanded_bytes(self, b: FloatArray, sizes: IntArray) -> int:
        """Returns the bytes of all experts that are worth the present price."""
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

    def verdict(self, b: FloatArray, resident: BoolArray) -> TierChanges:
        """Returns the verdict: admit above (1 + h) lambda, drop below (1 - h) lambda."""
        high, low = (1 + self.hysteresis) * self.price, (1 - self.hysteresis) * self.price
        return TierChanges(~resident & (b >= high), resident & (b < low))


def floor(b: FloatArray, sizes: IntArray, capacity_bytes: int, working_set_bytes: int) -> BoolArray:
    """Returns the experts to pin: the densest that fit if a tier cannot hold one token's working set, else none.

    All other experts stream through the room of the largest expert, which stays free.
    """
    pinned = np.zeros(b.shape, np.bool_)
    if capacity_bytes >= working_set_bytes:
        return pinned
    order = np.argsort(-b, axis=None, kind="stable")
    room = capacity_bytes - int(sizes.max())
    pinned.ravel()[order[np.cumsum(sizes.ravel()[order]) <= room]] = True
    return pinned


WATCHED = 16  # experts that a tier lacks, and as many that it has, whose needs each plan is judged by
TRIAL = 12  # plans that have been judged before moves are carried out
LOW, HIGH, BINS = -6.0, 6.0, 25  # of log odds
RECENT = 0.02  # of `right`, per plan


class TierBudget(NamedTuple):
    """One tier as a plan sees it; arrays are [L, E]."""

    b: FloatArray  # density at this tier's horizon
    resident: BoolArray
    watermark: Watermark
    idle_bytes: float  # that its link can carry before the next demand, or at this plan's rate


def plan(vram: TierBudget, ram: TierBudget, sizes: IntArray) -> list[Move]:
    """Returns promotions RAM -> VRAM, then stagings NVMe -> RAM, each densest first."""
    promote = vram.watermark.verdict(vram.b, vram.resident).admit & ram.resident
    stage = ram.watermark.verdict(ram.b, ram.resident).admit & ~vram.resident
    near = _densest(promote, vram, sizes, Tier.RAM, Tier.VRAM)
    return near + _densest(stage, ram, sizes, Tier.NVME, Tier.RAM)


def _densest(wanted: BoolArray, side: TierBudget, sizes: IntArray, source: Tier, target: Tier) -> list[Move]:
    keys = np.flatnonzero(wanted)
    if not len(keys):
        return []
    utility = side.b.ravel()[keys]
    keys = keys[np.argsort(-utility, kind="stable")]
    keys = keys[np.cumsum(sizes.ravel()[keys]) <= side.idle_bytes]
    experts = side.b.shape[1]
    return [Move(ExpertId(*divmod(key, experts)), source, target, float(side.b.ravel()[key])) for key in keys.tolist()]


class WatchedPlan(NamedTuple):
    """Experts [n] of a plan whose needs are not known yet; the first `lacking` of them were missing."""

    step: int
    keys: IntArray  # layer * E + expert
    odds: FloatArray  # log odds
    since: IntArray  # steps; later needs count
    lacking: int
    wished: BoolArray  # [lacking] whether the plan moved them


class NeedRecord:
    """Learns the log odds that an expert of a given rank is needed within the window.

    Not in the source. It learns missing and resident experts apart, because ranks overrate the highest missing expert
    and underrate the lowest resident one. It also learns from steps without moves; otherwise holding back would never
    end.
    """

    def __init__(self, window: int) -> None:
        """Counts needs within `window` steps."""
        self._window = window
        self.judged = 0  # plans
        self.right = 0.0  # share of the wishes that were needed, lately
        self._missing, self._there = Calibration(LOW, HIGH, BINS), Calibration(LOW, HIGH, BINS)
        self._watched: deque[WatchedPlan] = deque()

    @property
    def tried(self) -> bool:
        """Whether enough plans were judged for the chances to count."""
        return self.judged >= TRIAL

    def chance(self, odds: FloatArray) -> FloatArray:
        """Returns the probability that experts which the tier lacks are needed within the window."""
        return self._missing(odds)

    def chance_there(self, odds: FloatArray) -> FloatArray:
        """Returns the same probability of experts that the tier has."""
        return self._there(odds)

    def watch(self, plan: WatchedPlan) -> None:
        """Keeps a plan until its outcome is known."""
        self._watched.append(plan)

    def judge_plans(self, step: int, last: IntArray) -> None:
        """Learns from plans whose window has passed; `last` [L * E] is the step of each expert's latest need."""
        while self._watched and self._watched[0].step + self._window < step:
            plan = self._watched.popleft()
            if plan.step + self._window + 1 < step:  # no plan was made for a while: needs after the window would count
                continue
            came, n = last[plan.keys] > plan.since, plan.lacking
            self._missing.learn(plan.odds[:n], came[:n])
            self._there.learn(plan.odds[n:], came[n:])
            self.judged += 1
            if plan.wished.any():
                self.right += RECENT * (float(came[:n][plan.wished].mean()) - self.right)
