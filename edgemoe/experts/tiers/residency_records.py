"""Defines the records that compiled code and Python share: residency's state, and one operation's request.

Every field is an int64; arrays are addresses. A key numbers an expert among all: layer * E + expert. Pool 0 is RAM;
device i is pool i + 1.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray, fields, place_of
from edgemoe.types.experts import Tier

VRAM, RAM, NVME = map(int, Tier)  # plain numbers: an enumeration member takes half a microsecond to look up
NONE = -1  # no slot, no owner
GONE = -2  # in place of an owner: not a slot, since its extent belongs to another class
UNUSED = 1  # slot flag: prefetched, and not demanded since
TRANSIENT = 2  # slot flag: loaded for prefill only, evicted first
FORMER, HOME = 1, 2  # an expert's home is RAM by the previous placement plan; by the current one
ALWAYS = np.inf  # utility of a demand, which replaces any expert that is not needed now
SHORTLIST = 32  # eviction candidates shared by the prefetch requests of one layer-step

# The state of all tiers. `layers` L; `experts` E; `classes` C. `pools` [1 + devices] addresses of POOL records.
# `device_of` [L * E] the device that computes each expert. `running` [2] the layers that several devices compute now,
# for peers and for us, or NONE. `clock` counts layer-steps; `layer` is the running one's. `visited` [L] clock of each
# layer's last visit. `needed` [L * E] clock of the layer-step that needs the expert. `kept` [L * E] FORMER, HOME or 0.
# `class_of` [L] size class of each layer's experts. `served` [3] demanded experts by the tier that had them. `version`
# counts ended loads and unpinned slots, `changes` all changes.
STATE = fields(
    *("layers", "experts", "pools", "devices", "containment", "device_of", "clock", "layer", "visited", "needed"),
    *("kept", "class_of", "classes", "served", "version", "changes", "running"),
)
# The slots S of one tier on one device. `where` [L * E] slot of each resident expert; `coming` [L * E] slot of each
# load. By slot [S]: `owner` the key, NONE or GONE; `pins`; `flags`; `class_of` size class. Of a load: `born` the
# clock at its begin; `source` the RAM slot to copy from. `cold` 1 if it comes from NVMe; `demanded` 1 if a layer-step
# waits for it. `utility` float32 of its prefetch request while UNUSED. `classes` [C] addresses of CLASS records.
# `orphans` counts the slots of failed loads that are still pinned. `victims` [E] and `victim_keys` are scratch memory.
POOL = fields(
    *("tier", "index", "slots", "where", "coming", "owner", "pins", "flags", "utility", "born", "source", "cold"),
    *("demanded", "class_of", "classes", "orphans", "victims", "victim_keys"),
)
# One size class of a pool. `first` its first slot, `end` one past its last. `free` a stack of `free_count` slots.
# `moved` counts experts that came in, `prefetched` experts that came before a demand, `wasted` experts evicted before a
# demand. `promoted` counts prefetches demanded while under way, `withdrawn` those given up. `least` holds the SHORTLIST
# slots of lowest utility, ascending, from `least_next` to `least_count`, with `least_keys` and `least_owners` at clock
# `least_at`.
CLASS = fields(
    *("first", "end", "free", "free_count", "moved", "prefetched", "wasted", "promoted", "withdrawn"),
    *("least", "least_keys", "least_owners", "least_next", "least_count", "least_at"),
)
# One operation's request: `count` distinct experts `ids` of `layer`. If `marked`, `prefill` uint8 marks experts that
# only prefill needs. `ours` is 0 if a peer demands them. At most `limit` loads are begun. `ranks` and `ram_ranks` [L *
# E] float32 are 0 until an operation asks for them. `worths`: utility and score of a prefetch request, float32.
# Results: `slots` [count], `ready` [count] uint8, `starts` [start_count, 4] of pool, expert, slot and source, `seen`
# the version. `wanted`, `taken` and `reads` [E] are scratch memory.
REQUEST = fields(
    *("state", "pool", "layer", "count", "marked", "ours", "limit", "ranks", "ram_ranks", "start_count", "seen"),
    *("flags", "ids", "slots", "prefill", "ready", "starts", "worths", "wanted", "taken", "reads"),
)


class SharedRecord:
    """Owns one record, and the arrays that it holds addresses of."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._record = np.zeros(1, dtype)
        self._arrays: list[npt.NDArray[Any]] = []
        self.address: int = self._record.ctypes.data
        self.numbers = self._record.view(np.int64).data  # fields by index, which is faster than by name

    def __setitem__(self, name: str, value: int) -> None:
        self._record[name] = value

    def __getitem__(self, name: str) -> int:
        return int(self._record[name][0])

    def array(
        self, name: str, shape: int | tuple[int, ...], value: int = 0, dtype: npt.DTypeLike = np.int64
    ) -> npt.NDArray[Any]:
        """Returns a new array, and stores its address in the field."""
        return self.set_array(name, np.full(shape, value, dtype))

    def views(self, name: str, count: int, dtype: npt.DTypeLike = np.int64) -> tuple[npt.NDArray[Any], ...]:
        """Returns views of the first 0, 1, ... `count` elements of a new array, and stores its address in the field."""
        whole = self.array(name, count, dtype=dtype)
        return tuple(whole[:n] for n in range(count + 1))

    def set_array(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Stores the array's address in the field, and keeps the array."""
        self._arrays.append(array)
        self._record[name] = array.ctypes.data
        return array


POOL_AT, LAYER, COUNT, MARKED, OURS = (place_of(REQUEST, name) for name in ("pool", "layer", "count", "marked", "ours"))
LIMIT, RANKS_AT, RAM_RANKS_AT = (place_of(REQUEST, name) for name in ("limit", "ranks", "ram_ranks"))
START_COUNT, SEEN, FLAGS = (place_of(REQUEST, name) for name in ("start_count", "seen", "flags"))


class ResidencyRequest:
    """One thread's REQUEST record: `fields` by index, and views of its arrays for each number of experts up to E."""

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
        """Sets the experts [n] of a layer, and the marks of experts that only prefill needs. Returns n."""
        fields, n = self.fields, len(experts)
        fields[POOL_AT], fields[LAYER], fields[COUNT] = pool, layer, n
        self.ids[n][...] = experts
        fields[MARKED] = prefill_only is not None
        if prefill_only is not None:
            self.prefill[n][...] = prefill_only
        return n


class ResidencyRequests(threading.local):
    """Gives each thread a ResidencyRequest of its own."""

    def __init__(self, state: int, experts: int) -> None:
        self.mine = ResidencyRequest(state, experts)
