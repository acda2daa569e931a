"""One simulated engine: its queue, in the daemon's order (`queue_order`), its steps, and its view for routers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgemoe.policy.routing.offers import RoutingTarget, WaitingRequest
from edgemoe.policy.routing.signatures import absence
from edgemoe.types.arrays import FloatArray
from tools.research.routing import queue_orders
from tools.research.routing.queue_orders import QueueOrder
from tools.research.simulate.serving.engine_steps import (
    BLOCK,
    DONE,
    FIRST,
    FREE_SLOT,
    OUT,
    StepCosts,
    batch_of,
    nothing_more,
    run,
)
from tools.research.simulate.serving.prefixes import PrefixCache


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The shape of an engine."""

    costs: StepCosts
    slots: int = 64
    blocks: int = 1 << 20
    capacity: int = 1 << 20
    step_tokens: int = 2048
    order: QueueOrder = "fcfs"
    aging_tokens_per_s: float = 1500.0
    threshold_s: float = 5.0
    output_reserve: float = 0.0  # of the expected remaining output, kept free in KV
    ahead_tokens: int = 1024
    plans_ahead: bool = False  # a step is planned as the one before it begins
    more_s: Callable[..., float] = nothing_more  # compiled: from a batch and `data`, a step's time beside `costs`
    data: Any = 0.0
    resident: FloatArray | None = None  # [L, E] additional time of each expert that is not in place

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.step_tokens / (self.costs.fixed_s + self.costs.prefill_s * self.step_tokens)


@dataclass(slots=True)
class Job:
    """A request and its progress. `offered` is named by its place in the load."""

    offered: WaitingRequest
    output: int
    emitted: int = 0
    known: int = 0  # keys that it uses from the prefix cache
    seen_s: float = math.nan  # end of its engine's first step after its arrival
    first_s: float = math.nan
    end_s: float = math.nan
    place: str = ""
    absent: FloatArray | None = None  # [L, E] log of the chance that it does not choose the expert

    def __post_init__(self) -> None:
        if self.offered.chance is not None:
            self.absent = absence(self.offered.chance)

    @property
    def tokens(self) -> int:
        return self.offered.prompt_tokens + self.emitted


@dataclass(slots=True)
class Engine:
    """Owns the waiting and the running requests."""

    place: str
    shape: EngineShape
    cache: PrefixCache | None = None
    waiting: list[Job] = field(default_factory=list)  # in order of admission
    paused: int = 0
    taken: set[str] = field(default_factory=set)  # since the last report
    batch: Any = None
    _jobs: dict[int, Job] = field(default_factory=dict)  # slot -> running request
    _admitted: int = 0
    _stale: bool = False  # whether the waiting requests must be sorted

    def __post_init__(self) -> None:
        self.batch = batch_of(self.shape.slots, self.shape.blocks)

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self.waiting)

    @property
    def now_s(self) -> float:
        return float(self.batch.now_s[0])

    def add(self, job: Job, now_s: float) -> None:
        """Queues a request on this engine."""
        if not self.busy:
            self.batch.now_s[0] = max(self.now_s, now_s)
        job.place = self.place
        self.taken.add(job.offered.request)
        self.waiting.append(job)
        self._stale = True

    def admit(self, expected_tokens: float) -> None:
        """Starts waiting requests, in order, while there is room. `expected_tokens` is the expected length of a new
        answer.
        """
        shape, batch = self.shape, self.batch
        for job in self.waiting:
            if math.isnan(job.seen_s):
                job.seen_s = self.now_s
        if self.waiting and (self._stale or shape.order == "gimbal"):
            self._sort()
        while self.waiting and len(self._jobs) < shape.slots and self._backlog() < shape.step_tokens:
            job = self.waiting[0]
            if self._is_too_late(job):
                return
            known = self._known(job)
            needed = math.ceil((job.tokens + 1) / BLOCK) - known * (self.cache.key_blocks if self.cache else 0)
            reserve = shape.output_reserve * (self._remaining(expected_tokens) + expected_tokens) / BLOCK
            revived = self.cache.open(job.offered.prefix, known) if self.cache else 0
            if self._jobs and needed + revived + reserve * (shape.output_reserve > 0) > batch.free[0]:
                if self.cache:
                    self.cache.close(job.offered.prefix, known)
                    self.cache.hits -= known * self.cache.key_blocks
                    self.cache.probes -= len(job.offered.prefix) * self.cache.key_blocks
                return
            self._start(self.waiting.pop(0), known, needed, revived)

    def run(self, until_s: float) -> list[Job]:
        """Runs steps that begin before `until_s`, until one allows a decision. Returns the ended requests."""
        shape, batch = self.shape, self.batch
        if any(self._is_too_late(job) for job in self.waiting):
            until_s = min(until_s, math.nextafter(self.now_s, math.inf))
        args = (batch, shape.costs, shape.step_tokens, shape.ahead_tokens, until_s, shape.more_s, shape.data)
        why, slot = run(*args)
        while why == OUT:
            self._put_out(slot)
            why, slot = run(*args)
        if why & FIRST:
            for s in self._jobs:
                if batch.emitted[s] and math.isnan(self._jobs[s].first_s):
                    self._first(s)
        return [self._end(s) for s in list(self._jobs) if batch.emitted[s] >= batch.output[s]] if why & DONE else []

    def view(self, expected_tokens: float, reported_s: float) -> RoutingTarget:
        """Returns the engine's view for routers."""
        waiting_blocks = sum(math.ceil((job.tokens + 1) / BLOCK) for job in self.waiting)
        return RoutingTarget(
            self.place,
            self.shape.slots,
            self.shape.capacity,
            self.shape.blocks,
            int(self.batch.free[0]) - waiting_blocks,
            len(self._jobs),
            len(self.waiting),
            self._backlog() + sum(job.tokens - self._known_tokens(job) for job in self.waiting),
            self._remaining(expected_tokens) + sum(max(0.0, expected_tokens - job.emitted) for job in self.waiting),
            self.shape.prefill_tokens_per_s,
            self.cache.keys() if self.cache else frozenset(),
            taken=frozenset(self.taken),
            reported_s=reported_s,
            resident=self.shape.resident,
            union=self._union(),
            decode_s=self._step_s(),
        )

    def reported(self) -> None:
        """Clears the record of accepted requests."""
        self.taken.clear()

    def requests(self) -> set[str]:
        """Returns the names of waiting and running requests."""
        return {job.offered.request for job in (*self.waiting, *self._jobs.values())}

    def _is_too_late(self, job: Job) -> bool:
        """Whether the step that begins now was planned before the engine saw the request."""
        return self.shape.plans_ahead and bool(self._jobs) and not job.seen_s < self.now_s

    def _union(self) -> FloatArray | None:
        """Returns the log of the chance that no request here chooses an expert; None if no request has chances."""
        absent = [job.absent for job in (*self.waiting, *self._jobs.values()) if job.absent is not None]
        return np.sum(absent, axis=0) if absent else None

    def _step_s(self) -> float:
        """Returns the mean time of a step; 0 before any."""
        steps, seconds = self.batch.active.tolist()
        return float(seconds / steps) if steps else 0.0

    def _sort(self) -> None:
        shape, self._stale = self.shape, False
        tokens = np.array([job.tokens - self._known_tokens(job) for job in self.waiting])
        waited_s = self.now_s - np.array([job.offered.arrived_s for job in self.waiting])
        ranks = queue_orders.order(tokens, waited_s, shape.order, shape.aging_tokens_per_s, shape.threshold_s)
        ordered = [self.waiting[rank] for rank in ranks]
        self.waiting = sorted(ordered, key=lambda job: not job.emitted)

    def _known(self, job: Job) -> int:
        if self.cache is None or not job.offered.prefix:
            return 0
        most = (job.offered.prompt_tokens - 1) // job.offered.key_tokens
        return min(self.cache.known(job.offered.prefix), most)

    def _known_tokens(self, job: Job) -> int:
        return self._known(job) * job.offered.key_tokens if self.cache else 0

    def _backlog(self) -> int:
        todo = self.batch.todo[self.batch.request != FREE_SLOT]
        return int(todo.sum())

    def _remaining(self, expected_tokens: float) -> float:
        emitted = self.batch.emitted[self.batch.request != FREE_SLOT]
        return float(np.maximum(0.0, expected_tokens - emitted).sum())

    def _start(self, job: Job, known: int, needed: int, revived: int) -> None:
        batch = self.batch
        s = int(np.argmax(batch.request == FREE_SLOT))
        job.known = known
        cached = known * job.offered.key_tokens
        batch.request[s], batch.todo[s], batch.context[s] = int(job.offered.request), job.tokens - cached, cached
        batch.emitted[s], batch.output[s], batch.blocks[s] = job.emitted, job.output, needed
        batch.order[s], batch.free[0] = self._admitted, batch.free[0] - needed - revived
        self._admitted += 1
        self._jobs[s] = job
        if self.cache:
            self.cache.trim(int(batch.free[0]))

    def _first(self, s: int) -> None:
        job = self._jobs[s]
        job.first_s = float(self.batch.stamp_s[s])
        if self.cache:
            keys = job.offered.prefix[: job.offered.prompt_tokens // job.offered.key_tokens]
            used = self.cache.keep(keys, job.known)
            self.batch.blocks[s] -= (used - job.known) * self.cache.key_blocks
            job.known = used

    def _end(self, s: int) -> Job:
        job = self._free(s)
        job.end_s = float(self.batch.stamp_s[s])
        return job

    def _put_out(self, s: int) -> None:
        job = self._free(s)
        job.emitted = int(self.batch.emitted[s])
        self.paused += 1
        self.waiting.insert(0, job)

    def _free(self, s: int) -> Job:
        job, batch = self._jobs.pop(s), self.batch
        batch.request[s] = FREE_SLOT
        batch.free[0] += batch.blocks[s]
        if self.cache:
            batch.free[0] += self.cache.close(job.offered.prefix, job.known)
            self.cache.trim(int(batch.free[0]))
        return job
