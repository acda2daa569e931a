"""The cache policies that everything else is measured against.

Each ranks every (layer, expert) by how much it is worth keeping. Ages are counted in layer-steps: one `touch` is
one tick. Where two experts are equal the more recently used one is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray, IntArray

LIKELY = 0.5  # chance from which on an expert counts as needed, where ranks are no chances


class History:
    """When each expert was last used and how often: what the classical policies look at."""

    def __init__(self, layers: int, experts: int) -> None:
        self.clock = 0
        self.last: npt.NDArray[np.int64] = np.full((layers, experts), -(1 << 40), dtype=np.int64)  # [L, E]
        self.count: npt.NDArray[np.int64] = np.zeros((layers, experts), dtype=np.int64)  # [L, E]

    def touch(self, layer: int, experts: IntArray) -> None:
        self.clock += 1
        self.last[layer, experts] = self.clock
        self.count[layer, experts] += 1

    def age(self) -> IntArray:
        """Layer-steps since each expert's last use, [L, E]; huge where it was never used."""
        return self.clock - self.last

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Ranks cannot be compared with chances: what is likely is worth anything, all else nothing."""
        return chance, np.where(chance >= LIKELY, np.inf, -np.inf).astype(np.float32)


class LRU(History):
    """Keeps what was used last."""

    def rank(self, layer: int) -> FloatArray:
        return (-self.age()).astype(np.float32)


class LFU(History):
    """Keeps what was used most often since the start."""

    def rank(self, layer: int) -> FloatArray:
        recency = 1.0 / (1.0 + self.age())  # below 1: only decides between equal counts
        return (self.count + recency).astype(np.float32)


class LFRU(History):
    """Keeps what has the highest frequency over age."""

    def rank(self, layer: int) -> FloatArray:
        return (self.count / (1.0 + self.age())).astype(np.float32)


class FIFO:
    """Keeps what was loaded last. Its driver reports loads, so it runs in replay only."""

    def __init__(self, layers: int, experts: int) -> None:
        self._clock = 0
        self._loaded = np.zeros((layers, experts), dtype=np.int64)

    def touch(self, layer: int, experts: IntArray) -> None:
        self._clock += 1

    def loaded(self, layer: int, experts: IntArray) -> None:
        self._loaded[layer, experts] = self._clock

    def rank(self, layer: int) -> FloatArray:
        return (self._loaded - self._clock).astype(np.float32)


class Random:
    """Keeps anything: the floor of all policies."""

    def __init__(self, layers: int, experts: int, seed: int = 0) -> None:
        self._shape = (layers, experts)
        self._random = np.random.default_rng(seed)

    def touch(self, layer: int, experts: IntArray) -> None:
        pass

    def rank(self, layer: int) -> FloatArray:
        return self._random.random(self._shape, dtype=np.float32)


class Belady:
    """Keeps what is needed soonest: the optimum for equal sizes without bypass. Knows the future: replay only."""

    def __init__(self, layers: int, experts: int, next_use: IntArray, offsets: IntArray) -> None:
        """`next_use` [N]: for each demand in trace order, the step that demands the same expert again (or a step
        beyond the end); `offsets` [steps + 1]: where each step's demands start."""
        self._next_use, self._offsets = next_use, offsets
        self._step = 0
        self._next = np.full((layers, experts), np.iinfo(np.int64).max >> 1, dtype=np.int64)

    def touch(self, layer: int, experts: IntArray) -> None:
        start, end = self._offsets[self._step], self._offsets[self._step + 1]
        self._next[layer, experts] = self._next_use[start:end]
        self._step += 1

    def rank(self, layer: int) -> FloatArray:
        return (self._step - self._next).astype(np.float32)
