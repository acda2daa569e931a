"""Cache policies that others use, by name, as baselines for `edgemoe replay`. Each knows only its own demands.

A policy with `observe_residents` knows the cache too, and is replayed once for each capacity. Ranks decide which expert
is evicted next; `AWAY` moves a whole class of experts behind the others.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

AWAY = np.float32(1 << 22)  # layer-steps: above the clock of a trace, and exact with it in float32
PROTECTED = 0.8  # share of the cache that SLRU protects
RING = 0.1  # share of the cache that `calibrated-ring` leaves to experts outside its profile
PROFILE_TOKENS = 256  # between two profiles of it


def away(mask: BoolArray) -> FloatArray:
    """Returns the addition to ranks that moves these experts behind the others."""
    moved: FloatArray = np.where(mask, AWAY, np.float32(0))
    return moved


class LFU(LRU):
    """Ranks experts by how often they were used since the start, then by their last use."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self.count: IntArray = np.zeros((layers, experts), np.int64)  # [L, E]

    def touch(self, layer: int, experts: IntArray) -> None:
        super().touch(layer, experts)
        self.count[layer, experts] += 1

    def rank(self, layer: int) -> FloatArray:
        recency = 1.0 / (1.0 + self.age())  # below 1: decides between equal counts only
        return (self.count + recency).astype(np.float32)


class LFRU(LFU):
    """Ranks experts by frequency over age."""

    def rank(self, layer: int) -> FloatArray:
        return (self.count / (1.0 + self.age())).astype(np.float32)


class LeastStale(LRU):
    """Evicts experts that this token did not use, of layers that it has passed; then the others by their layers.

    Written after the abstract of [SpecMD], for its definition was not at hand.
    """

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._ran: IntArray = np.zeros(layers, np.int64)  # the clock of each layer's latest run

    def touch(self, layer: int, experts: IntArray) -> None:
        super().touch(layer, experts)
        self._ran[layer] = self.clock

    def rank(self, layer: int) -> FloatArray:
        recent = (self.last - self.clock).astype(np.float32)
        recent[layer + 1 :] += 2 * AWAY
        recent[: layer + 1] += away(self.last == self._ran[:, None])[: layer + 1]
        return recent


class FIFO(LRU):
    """Evicts the expert that came first."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self.came: IntArray = np.zeros((layers, experts), np.int64)  # the clock of each expert's arrival, [L, E]
        self.resident: BoolArray = np.zeros((layers, experts), np.bool_)
        self.capacity = 0

    def observe_residents(self, resident: BoolArray, capacity: int) -> None:
        """Takes the experts in the cache [L, E] before the next layer's demands, and how many experts fit."""
        self.resident, self.capacity = resident, capacity

    def touch(self, layer: int, experts: IntArray) -> None:
        super().touch(layer, experts)
        self.came[layer, experts[~self.resident[layer, experts]]] = self.clock

    def rank(self, layer: int) -> FloatArray:
        return self.came.astype(np.float32)


class SecondChance(FIFO):
    """Evicts in order of arrival, but moves an expert that was used since to the end once."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._used: BoolArray = np.zeros((layers, experts), np.bool_)
        self._end = 0  # of the queue; behind it a place is free for each expert that the next eviction passes

    def observe_residents(self, resident: BoolArray, capacity: int) -> None:
        super().observe_residents(resident, capacity)
        gone = (self.came > 0) & ~resident
        if gone.any():
            unused = gone & ~self._used
            hand = self.came[unused].max() if unused.any() else self._end + 1
            passed = np.flatnonzero(resident & self._used & (self.came < hand))
            ordered = passed[np.argsort(self.came.ravel()[passed])]
            self.came.ravel()[ordered] = self._end + 1 + np.arange(len(ordered))
            self._used.ravel()[ordered] = False
            self._used[gone], self.came[gone] = False, 0
        self._end = int(self.came.max())

    def touch(self, layer: int, experts: IntArray) -> None:
        here = self.resident[layer, experts]
        self._used[layer, experts] |= here
        self.came[layer, experts[~here]] = self._end + 1 + self.came.size + np.arange(int((~here).sum()))

    def rank(self, layer: int) -> FloatArray:
        queued = np.flatnonzero(self.came)
        order = np.zeros(self.came.size, np.float32)
        order[queued[np.argsort(self.came.ravel()[queued])]] = np.arange(len(queued))
        return order.reshape(self.came.shape) + away(self._used)


class SLRU(FIFO):
    """Protects experts that were used again, up to a share of the cache; evicts the least recently used others
    [SLRU]."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._protected: BoolArray = np.zeros((layers, experts), np.bool_)

    def touch(self, layer: int, experts: IntArray) -> None:
        self._protected &= self.resident
        self._protected[layer, experts] = self.resident[layer, experts]
        LRU.touch(self, layer, experts)
        over = int(self._protected.sum()) - int(PROTECTED * self.capacity)
        if over > 0:
            those = np.flatnonzero(self._protected)
            oldest = those[np.argsort(self.last.ravel()[those], kind="stable")[:over]]
            self._protected.ravel()[oldest] = False
            self.last.ravel()[oldest] = self.clock

    def rank(self, layer: int) -> FloatArray:
        return (self.last - self.clock).astype(np.float32) + away(self._protected)


class LayerLFU(LFU):
    """Divides the cache evenly among the layers, and evicts a layer's least frequently used expert."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._full: BoolArray = np.zeros(layers, np.bool_)

    def observe_residents(self, resident: BoolArray, capacity: int) -> None:
        """Takes the experts in the cache [L, E] before the next layer's demands, and how many experts fit."""
        self._full = resident.sum(1) >= capacity // len(self._full)
        self._over: BoolArray = resident.sum(1) > -(-capacity // len(self._full))

    def rank(self, layer: int) -> FloatArray:
        first = self._over.copy()
        first[layer] |= self._full[layer]
        return super().rank(layer) + away(~first[:, None])


class CalibratedRing(FIFO):
    """Pins the experts used most until the latest profile; the others share a ring, in order of arrival [Spark]."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._count: IntArray = np.zeros((layers, experts), np.int64)
        self._pinned: BoolArray = np.zeros((layers, experts), np.bool_)
        self._tokens = 0

    def touch(self, layer: int, experts: IntArray) -> None:
        super().touch(layer, experts)
        self._count[layer, experts] += 1
        self._tokens += layer == 0
        if layer == 0 and self._tokens % PROFILE_TOKENS == 0:
            pins = self.capacity - int(RING * self.capacity)
            self._pinned[:] = False
            self._pinned.ravel()[np.argsort(-self._count.ravel(), kind="stable")[:pins]] = True

    def rank(self, layer: int) -> FloatArray:
        return super().rank(layer) + away(self._pinned)


NAMED = {
    "fifo": FIFO,
    "lru": LRU,
    "lfu": LFU,
    "lfru": LFRU,
    "slru": SLRU,
    "second-chance": SecondChance,
    "least-stale": LeastStale,
    "layer-lfu": LayerLFU,
    "calibrated-ring": CalibratedRing,
}
