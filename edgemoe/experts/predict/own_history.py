"""Each expert's own history: how often and how lately it was needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.jit.intrinsics import carray, f32_at, fields, i64_at, jit, record
from edgemoe.kernels.cpu.vector import log32
from edgemoe.types.arrays import FloatArray, IntArray

Bytes = npt.NDArray[np.uint8]

RATES = np.array([0.25, 0.05, 0.01], np.float32)  # of the EWMAs of needs, per visit of the layer
OWN = 6  # features: three EWMAs, age, used now, popularity
LONG_AGO = 1 << 20  # steps
MOST_VISITS = np.float32(1 << 22)  # at more, counts are halved, to which float32 can always add 1

# Arrays are addresses, see `OwnHistory`.
HISTORY = fields("experts", "rates", "count", "visits", "last")


class OwnHistory:
    """Owns the averages."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        each, share = (layers, experts), top_k / experts
        self.rates = np.full((layers, len(RATES), experts), share, np.float32)
        self.count = np.full(each, 4 * share, np.float32)
        self.visits = np.full(layers, 4.0, np.float32)
        self.last: IntArray = np.full(each, -1000, np.int64)  # step of the latest need
        arrays = (self.rates, self.count, self.visits, self.last)
        self._record = np.array([(experts, *(array.ctypes.data for array in arrays))], HISTORY)
        self.address = self._record.ctypes.data

    def learned(self, step: int) -> dict[str, Any]:
        """What is to be kept, by names; `step` is the running one."""
        age = np.clip(step - self.last, 0, LONG_AGO)
        return {"rates": self.rates, "count": self.count, "visits": self.visits, "age": age}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Goes on from what was kept, which must fit."""
        self.rates[:], self.count[:], self.visits[:] = saved["rates"], saved["count"], saved["visits"]
        self.last[:] = step - saved["age"]


@jit
def add(history: int, layer: int, needed: Bytes, step: int) -> None:
    """A layer ran in a step that needed these experts, of [E]."""
    h = record(history, HISTORY)
    experts, visits = h.experts, f32_at(h.visits)
    if visits[layer] >= MOST_VISITS:
        counted = f32_at(h.count + 4 * layer * experts)
        visits[layer] *= np.float32(0.5)
        for expert in range(experts):
            counted[expert] *= np.float32(0.5)
    visits[layer] += np.float32(1)
    for i in range(RATES.shape[0]):
        rates = f32_at(h.rates + 4 * (layer * RATES.shape[0] + i) * experts)
        for expert in range(experts):
            rates[expert] *= np.float32(1) - RATES[i]
            if needed[expert]:
                rates[expert] += RATES[i]
    count, last = f32_at(h.count + 4 * layer * experts), i64_at(h.last + 8 * layer * experts)
    for expert in range(experts):
        if needed[expert]:
            count[expert] += np.float32(1)
            last[expert] = max(last[expert], step)


@jit
def describe(history: int, layer: int, known: FloatArray, now: int) -> None:
    """Fills the features of one layer [OWN features, E] that change only when it runs, in step `now`."""
    h = record(history, HISTORY)
    experts, floor = h.experts, np.float32(3e-3)
    rates = carray(f32_at(h.rates + 4 * layer * RATES.shape[0] * experts), (RATES.shape[0], experts))
    for i in range(3):
        for expert in range(experts):
            known[i, expert] = logit(rates[i, expert], floor)
    last, count = i64_at(h.last + 8 * layer * experts), f32_at(h.count + 4 * layer * experts)
    for expert in range(experts):
        age = now - last[expert]
        known[3, expert] = np.float32(0.33) * log32(np.float32(1 + age)) - np.float32(0.6)
        known[4, expert] = np.float32(1) if age == 0 else np.float32(0)
    visits = f32_at(h.visits)[layer]
    for expert in range(experts):
        known[5, expert] = logit(count[expert] / visits, floor)


@jit
def logit(p: np.float32, floor: np.float32) -> np.float32:
    """Half the log odds of `p`, finite from 0 to 1."""
    return np.float32(0.5) * log32((p + floor) / (np.float32(1) + floor - p))  # type: ignore[no-any-return]
