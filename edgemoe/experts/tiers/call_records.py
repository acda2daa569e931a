"""One thread's REQUEST record: what it hands to a compiled call, and what comes back."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.experts.tiers.records import REQUEST, SharedRecord
from edgemoe.kernels.cpu.intrinsics import place_of
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

POOL_AT, LAYER, COUNT, MARKED, OURS = (place_of(REQUEST, name) for name in ("pool", "layer", "count", "marked", "ours"))
LIMIT, RANKS_AT, RAM_RANKS_AT = (place_of(REQUEST, name) for name in ("limit", "ranks", "ram_ranks"))
START_COUNT, SEEN, FLAGS = (place_of(REQUEST, name) for name in ("start_count", "seen", "flags"))


class CallRecord:
    """Holds the record as `fields`, by places, and views of its arrays for every number of experts up to E."""

    def __init__(self, state: int, experts: int) -> None:
        self._record = record = SharedRecord(REQUEST)
        self.address, self.fields = ctypes.c_int64(record.address), record.numbers  # converted once
        record["state"] = state
        self.ids, self.slots = self._views("ids", experts), self._views("slots", experts)
        self.prefill, self.ready = self._views("prefill", experts, np.bool_), self._views("ready", experts, np.bool_)
        self.starts: IntArray = record.array("starts", (experts, 4))
        self.worths: FloatArray = record.array("worths", 2, dtype=np.float32)
        for name in ("wanted", "taken", "reads"):
            record.array(name, experts)

    def set(self, pool: int, layer: int, experts: IntArray, prefill_only: BoolArray | None) -> int:
        """Sets the experts [n] of a layer, and which of them only prefill needs. Returns n."""
        fields, n = self.fields, len(experts)
        fields[POOL_AT], fields[LAYER], fields[COUNT] = pool, layer, n
        self.ids[n][...] = experts
        fields[MARKED] = prefill_only is not None
        if prefill_only is not None:
            self.prefill[n][...] = prefill_only
        return n

    def _views(self, name: str, count: int, dtype: npt.DTypeLike = np.int64) -> tuple[npt.NDArray[Any], ...]:
        whole = self._record.array(name, count, dtype=dtype)
        return tuple(whole[:n] for n in range(count + 1))


class CallRecords(threading.local):
    """Gives each thread a record of its own."""

    def __init__(self, state: int, experts: int) -> None:
        self.mine = CallRecord(state, experts)
