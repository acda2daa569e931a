"""One thread's REQUEST record: what it hands to a compiled call, and what comes back."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from edgemoe.experts.tiers.records import REQUEST, SharedRecord
from edgemoe.jit.intrinsics import place_of
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
        self.ids, self.slots = record.views("ids", experts), record.views("slots", experts)
        self.prefill, self.ready = record.views("prefill", experts, np.bool_), record.views("ready", experts, np.bool_)
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


class CallRecords(threading.local):
    """Gives each thread a record of its own."""

    def __init__(self, state: int, experts: int) -> None:
        self.mine = CallRecord(state, experts)
