"""A heap of events, ordered by time. Compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_compiled: Any = numba.njit(nogil=True, error_model="numpy")


class Heap(NamedTuple):
    """Events by time: of equals the first one added."""

    time: Numbers
    order: Ints
    kind: Ints
    what: Ints  # prompt, or call
    size: Ints  # [2] number of events now, and ever


def heap_of(size: int) -> Heap:
    """Returns an empty heap with room for `size` events."""
    ints = [np.zeros(size, np.int64) for _ in range(3)]
    return Heap(np.zeros(size), ints[0], ints[1], ints[2], np.zeros(2, np.int64))


@_compiled
def _before(heap: Heap, a: int, b: int) -> bool:
    if heap.time[a] != heap.time[b]:
        return bool(heap.time[a] < heap.time[b])
    return bool(heap.order[a] < heap.order[b])


@_compiled
def _swap(heap: Heap, a: int, b: int) -> None:
    heap.time[a], heap.time[b] = heap.time[b], heap.time[a]
    heap.order[a], heap.order[b] = heap.order[b], heap.order[a]
    heap.kind[a], heap.kind[b] = heap.kind[b], heap.kind[a]
    heap.what[a], heap.what[b] = heap.what[b], heap.what[a]


@_compiled
def push(heap: Heap, time: float, kind: int, what: int) -> None:
    at = heap.size[0]
    heap.size[0] += 1
    heap.size[1] += 1
    heap.time[at], heap.order[at], heap.kind[at], heap.what[at] = time, heap.size[1], kind, what
    while at > 0 and _before(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2


@_compiled
def pop(heap: Heap) -> tuple[float, int, int]:
    time, kind, what = heap.time[0], heap.kind[0], heap.what[0]
    heap.size[0] -= 1
    last = heap.size[0]
    _swap(heap, 0, last)
    at = 0
    while True:
        least = at
        for child in (2 * at + 1, 2 * at + 2):
            if child < last and _before(heap, child, least):
                least = child
        if least == at:
            return time, kind, what
        _swap(heap, at, least)
        at = least
