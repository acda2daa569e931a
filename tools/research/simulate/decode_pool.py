"""Decode workers with a batch each, and routed requests. Only decoding takes time.

A step takes the time of its layers' distinct experts, by real routes token by token. A request begins with its worker's
next step. It avoids workers with a request from the same source, whose choices are too similar.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgemoe.replay.trace import Ids

Numbers = npt.NDArray[np.float64]
Choose = Callable[[int, npt.NDArray[np.bool_], npt.NDArray[np.int64], float], int]
"""Request, which workers [W] may take it, how many run there [W], and the time, to a worker."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRequests:
    """Requests, in order of arrival."""

    at_s: Numbers  # [N]
    source: npt.NDArray[np.int64]  # [N] sequence that it was cut from
    routes: Sequence[Ids]  # [N] each [T, L, k], of the tokens to decode


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCosts:
    """Costs of a step. Seconds."""

    step_s: float
    token_s: float  # of each running request
    expert_s: float  # of each distinct expert of each layer
    experts: int
    far_s: npt.NDArray[np.float32] | None = None  # [W, L, E] more, of each expert not in place at a worker


@dataclass(frozen=True, slots=True, eq=False)
class DecodeOutcome:
    """Results of the requests."""

    tpot_s: Numbers  # [N]
    wait_s: Numbers  # [N] until a worker took it
    worker: npt.NDArray[np.int64]  # [N]
    active: Numbers  # [N] mean distinct experts per layer in its steps
    batch: Numbers  # [N] mean requests in its steps
    spread: float  # requests at the busiest worker, relative to the mean


def places_of(ids: Ids, experts: int) -> npt.NDArray[np.int32]:
    """Returns each token's choices as numbers of (layer, expert), [T, L * k], from routes [T, L, k]."""
    layers = ids.shape[1]
    return (ids + (np.arange(layers, dtype=np.int32) * experts)[:, None]).reshape(len(ids), -1)


def distinct_experts(ids: Ids, experts: int) -> int:
    """Returns the distinct experts of a step, in all layers, from its tokens' choices [S, L, k]."""
    return len(np.unique(places_of(ids, experts)))


@lru_cache(maxsize=1)
def _rows(requests: DecodeRequests, experts: int) -> npt.NDArray[np.int32]:
    """Returns the choices of all tokens of all requests, one after the other, [rows, L * k]."""
    return np.concatenate([places_of(each, experts) for each in requests.routes])


class DecodePool:
    """Owns the workers' batches and the clock."""

    def __init__(self, requests: DecodeRequests, workers: int, slots: int, costs: DecodeCosts) -> None:
        self._requests, self._slots, self._costs = requests, slots, costs
        self._running: list[list[int]] = [[] for _ in range(workers)]
        self._sources = [Counter[int]() for _ in range(workers)]
        self._stepping: list[list[int]] = [[] for _ in range(workers)]  # requests of the current step
        self._waiting: deque[int] = deque()
        self._events: list[tuple[float, int]] = []  # when a worker's step ends
        count = len(requests.at_s)
        lengths = np.array([len(each) for each in requests.routes])
        self._lengths, self._at = lengths, np.cumsum(lengths) - lengths  # [N] the row of the next token to decode
        self._last = np.cumsum(lengths) - 1
        self._places = _rows(requests, costs.experts)
        self._layers = requests.routes[0].shape[1]
        self._begin, self._end = np.zeros(count), np.zeros(count)
        self._worker = np.full(count, -1)
        self._active, self._batch = np.zeros(count), np.zeros(count)
        self._served = np.zeros(workers)

    def run(self, choose: Choose, ended: Callable[[int, int], None] = lambda request, worker: None) -> DecodeOutcome:
        """Returns the results if `choose` routes the requests; `ended` is called with each finished one and its
        worker.
        """
        at_s = self._requests.at_s
        following = 0
        while following < len(at_s) or self._events:
            if following < len(at_s) and (not self._events or at_s[following] <= self._events[0][0]):
                self._waiting.append(following)
                now, following = float(at_s[following]), following + 1
            else:
                now, worker = heapq.heappop(self._events)
                self._finish(worker, now, ended)
            self._place(choose, now)
        lengths, wait = self._lengths, self._begin - at_s
        return DecodeOutcome(
            (self._end - self._begin) / lengths,
            wait,
            self._worker,
            self._active / lengths,
            self._batch / lengths,
            float(self._served.max() / self._served.mean()),
        )

    def _place(self, choose: Choose, now: float) -> None:
        """Sends waiting requests, in order, and starts idle workers."""
        for _ in range(len(self._waiting)):
            request = self._waiting[0]
            source = int(self._requests.source[request])
            running = np.array([len(each) for each in self._running])
            room = (running < self._slots) & np.array([not each[source] for each in self._sources])
            if not room.any():
                break
            worker = choose(request, room, running, now)
            assert room[worker], "the router chose a worker that is full"
            self._waiting.popleft()
            self._running[worker].append(request)
            self._sources[worker][source] += 1
            self._worker[request] = worker
            if not self._stepping[worker]:
                self._start(worker, now)

    def _start(self, worker: int, now: float) -> None:
        if not self._running[worker]:
            return
        self._stepping[worker] = list(self._running[worker])
        who = np.array(self._stepping[worker])
        costs, rows = self._costs, self._at[who]
        loaded = np.bincount(self._places[rows].ravel(), minlength=self._layers * costs.experts) > 0
        distinct = np.count_nonzero(loaded)
        took = costs.step_s + costs.token_s * len(who) + costs.expert_s * distinct
        if costs.far_s is not None:
            took += float(costs.far_s[worker].ravel()[loaded].sum())
        heapq.heappush(self._events, (now + took, worker))
        self._begin[who[rows + self._lengths[who] == self._last[who] + 1]] = now
        self._active[who] += distinct / self._layers
        self._batch[who] += len(who)
        self._served[worker] += took * len(who)

    def _finish(self, worker: int, now: float, ended: Callable[[int, int], None]) -> None:
        who = np.array(self._stepping[worker])
        self._at[who] += 1
        for request in who[self._at[who] > self._last[who]].tolist():
            self._running[worker].remove(request)
            self._sources[worker][int(self._requests.source[request])] -= 1
            self._end[request] = now
            ended(request, worker)
        self._stepping[worker] = []
        self._start(worker, now)
