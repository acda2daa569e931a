"""Spreads experts that tokens choose together over a box's devices, so that these compute them side by side.

A layer waits for the device that has most to compute. Even shares of experts, and of what is chosen, leave the busiest
of two devices 1.28 times its half of a token's experts; what counts is which are chosen together. So experts change
places, two at a time, while fewer pairs of a token lie on one device; the sum of the squares of what devices compute
for a token falls just as these pairs do. They are given to their new devices between steps, a few at a time: what a
device had of an expert is dropped, and copied to the other one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgemoe.experts.tiers.eviction import ALWAYS
from edgemoe.experts.tiers.prefetch_priority import PrefetchPriority
from edgemoe.experts.tiers.records import SharedRecord
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.jit.intrinsics import INT, code, f32_at, fields, i64_at, record
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier

log = logging.getLogger(__name__)
LOOK_S = 60.0
LEAST_TOKENS = 1000.0  # that have been counted before anything moves
LEAST_GAIN = 2e-3  # of a layer's pairs on one device, that an exchange saves
MOVES = 4  # between two steps
ASKED = 16  # experts last moved, which are copied to where they are now

# `experts` of `stride` that exist; `pairs` [stride, stride] float32, each in one of its two places or both; `device`
# [stride] of each; `together` [stride, devices] float32 scratch memory; `most` exchanges; `least` [1] float32.
SPREADING = fields("experts", "stride", "devices", "pairs", "device", "together", "most", "least")


@code(INT, result=INT)
def SPREAD(call: int) -> int:
    """Exchanges experts of a layer between devices while that leaves fewer pairs on one. Returns how often."""
    r = record(call, SPREADING)
    n, stride, devices = r.experts, r.stride, r.devices
    pairs, device, together = f32_at(r.pairs), i64_at(r.device), f32_at(r.together)
    within = np.float32(0)
    for i in range(n):
        for d in range(devices):
            together[i * devices + d] = 0
        for j in range(n):
            if i != j:
                together[i * devices + device[j]] += pairs[i * stride + j] + pairs[j * stride + i]
        within += together[i * devices + device[i]]
    least = f32_at(r.least)[0] * within * np.float32(0.5)
    for exchanged in range(r.most):
        best, a, b = least, -1, -1
        for i in range(n):
            for j in range(i + 1, n):
                x, y = device[i], device[j]
                if x != y:
                    gain = together[i * devices + x] - together[i * devices + y]
                    gain += together[j * devices + y] - together[j * devices + x]
                    gain += np.float32(2) * (pairs[i * stride + j] + pairs[j * stride + i])
                    if gain > best:
                        best, a, b = gain, i, j
        if a < 0:
            return exchanged
        x, y = device[a], device[b]
        for i in range(n):
            if i != a:
                both = pairs[i * stride + a] + pairs[a * stride + i]
                together[i * devices + x] -= both
                together[i * devices + y] += both
            if i != b:
                both = pairs[i * stride + b] + pairs[b * stride + i]
                together[i * devices + y] -= both
                together[i * devices + x] += both
        device[a], device[b] = y, x
    return r.most  # type: ignore[no-any-return]


CODES = (SPREAD,)


class CountedPairs(Protocol):
    """Counts what tokens chose together."""

    @property
    def tokens(self) -> float:
        """Returns how many tokens are counted."""

    @property
    def pairs(self) -> FloatArray:
        """Returns how often, [L, E, E], each pair in one of its places or both; [0, E, E] where it is not counted."""


class DeviceSpread:
    """Looks at times which experts are better exchanged, on a thread of its own, and exchanges them between steps."""

    def __init__(
        self, residency: Residency, loader: ExpertLoader, geometry: ExpertGeometry, activity: CountedPairs
    ) -> None:
        """Goes by the pairs in `activity`; where it counts none, nothing moves."""
        self._residency, self._loader, self._geometry, self._activity = residency, loader, geometry, activity
        self._moves: deque[tuple[ExpertId, int]] = deque()  # to be made, and to which device
        self._moved: deque[ExpertId] = deque(maxlen=ASKED)
        self.moved = 0

    async def run(self) -> None:
        """Looks every minute, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Finds what is to be moved. Does nothing while something is."""
        pairs = self._activity.pairs
        if not len(pairs) or self._moves or self._activity.tokens < LEAST_TOKENS:
            return
        now = self._residency.device_of
        goal = spread(pairs, now, list(map(self._geometry.experts_of, range(self._geometry.layers))))
        if moves := _in_turn(now, goal):
            log.info("experts that are chosen together go to different devices", extra={"experts": len(moves)})
            self._moves.extend(moves)

    def step_ended(self) -> None:
        """Gives a few experts to their new devices. On the compute thread, between steps."""
        if not self._moves:
            return
        for _ in range(min(MOVES, len(self._moves))):
            expert, device = self._moves.popleft()
            given = self._residency.dealing.give(*expert, device)
            self.moved += given > 0  # what is in use now the next look finds again
            if given == 2:
                self._moved.append(expert)
        requests = [Move(expert, Tier.RAM, Tier.VRAM, ALWAYS) for expert in self._moved]
        self._loader.prefetch(requests, PrefetchPriority.USED)
        if not self._moves:
            self._moved.clear()


def spread(pairs: FloatArray, device_of: IntArray, experts: Sequence[int]) -> IntArray:
    """Returns a better device of each expert [L, E], for pairs [L, E, E] and the numbers of each layer's experts.

    Every device keeps as many of each layer as it had. Releases the GIL.
    """
    goal = device_of.copy()
    layers, stride = goal.shape
    call = SharedRecord(SPREADING)
    call["stride"], call["devices"], call["most"] = stride, int(goal.max()) + 1, stride
    call.array("together", (stride, int(goal.max()) + 1), dtype=np.float32)
    call.take("least", np.array([LEAST_GAIN], np.float32))
    for layer in range(layers):
        call["experts"], call["pairs"], call["device"] = (
            experts[layer],
            pairs[layer].ctypes.data,
            goal[layer].ctypes.data,
        )
        SPREAD.call(call.address)
    return goal


def _in_turn(now: IntArray, goal: IntArray) -> list[tuple[ExpertId, int]]:
    """Returns what is to be moved, and to which device, layer by layer, from the devices in turn: so each has room."""
    moves = []
    for layer in range(len(now)):
        experts = np.flatnonzero(goal[layer] != now[layer])
        former = now[layer, experts]
        place = np.array([np.count_nonzero(former[:i] == former[i]) for i in range(len(former))], np.int64)
        for expert in experts[np.lexsort((former, place))].tolist():
            moves.append((ExpertId(layer, expert), int(goal[layer, expert])))
    return moves
