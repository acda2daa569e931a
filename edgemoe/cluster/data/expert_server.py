"""Computes experts for peers: batches waiting calls of a layer, and refuses calls that would be too late.

A thread of its own computes, so that this box's steps do not delay peers. It takes the call that has waited longest,
together with all other calls of the same layer. Small work that needs no waiting is computed on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from edgemoe.cluster.data.messages import ExpertCallMessage, ExpertResult
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.errors import EdgemoeError, PeerBusy, PeerRefused
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.telemetry.unit_time import UnitTime, work_units
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.peers import ExpertWork

log = logging.getLogger(__name__)
QUEUED_EXPERT_CALLS = 256  # that wait; beyond it calls are refused as busy
QUEUE_BYTES = 256 << 20
TOGETHER_ROWS = 512  # of calls computed together
FIRST_UNIT_S = 5e-5
AT_ONCE_S = 4e-4  # work that is expected to take no longer is computed on the loop


class ExpertOwner(Protocol):
    """Computes experts for peers, on the server's thread."""

    def refuses(self, work: ExpertWork) -> str:
        """Returns why the work cannot be done here, or "". Called on the event loop."""

    def compute(self, works: Sequence[ExpertWork]) -> Sequence[Any]:
        """Returns the result of each work as a buffer [r, H]; all are of one layer. Raises EdgemoeError."""

    def compute_at_once(self, work: ExpertWork) -> Any | None:
        """Returns the work's result if no expert has to be waited for, else None. Never runs beside `compute`."""


@dataclass(slots=True)
class QueuedExpertCall:
    work: ExpertWork
    units: float
    deadline: float  # by the loop's clock
    done: asyncio.Future[Any]


class ExpertServer:
    """Answers calls: `serve` runs on the loop, `start` and `close` start and end the thread."""

    def __init__(self, geometry: ExpertGeometry, host: ExpertOwner) -> None:
        self.served = self.shed = self.batches = 0
        self.busy_s = 0.0
        self._geometry, self._host = geometry, host
        self._say = RateLimitedLog(log)
        self._loop = asyncio.get_running_loop()
        self._pending = self._bytes = 0  # calls that wait or are computed; touched on the loop only
        self._units = 0.0
        self._unit_time = UnitTime(FIRST_UNIT_S)
        self._closed = False
        self._inbox: SimpleQueue[QueuedExpertCall | None] = SimpleQueue()
        self._waiting: deque[QueuedExpertCall] = deque()  # touched on the thread only
        self._thread = threading.Thread(target=self._run, name="expert-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the current batch; waiting calls are not answered."""
        self._closed = True
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def serve(
        self, question: Question[ExpertCallMessage]
    ) -> Answer[ExpertCallMessage] | Coroutine[Any, Any, Answer[ExpertCallMessage]]:
        """Returns the answer to a Call, at once where it is small. Raises PeerBusy, PeerRefused."""
        began_s = time.monotonic()
        call: Any = question.message
        work = call.work(question.tensors, self._geometry)
        if why := self._host.refuses(work):
            raise PeerRefused(why)
        units = float(work_units(work.offsets).sum())
        small = not self._pending and units * self._unit_time.mean_s < AT_ONCE_S
        if small and (sums := self._compute_at_once(work, units)) is not None:
            return Answer(ExpertResult(time.monotonic() - began_s), [sums])
        job = QueuedExpertCall(work, units, question.deadline, self._loop.create_future())
        self._admit(job)
        self._pending += 1
        self._units += job.units
        self._bytes += work.hidden.nbytes
        job.done.add_done_callback(lambda _: self._leave(job))
        self._inbox.put(job)
        return self._answer(job, began_s)

    async def compute_own(self, works: Sequence[ExpertWork]) -> list[Any]:
        """Computes works of one layer for this box. Raises PeerBusy while a peer's call waits, EdgemoeError."""
        if self._pending:
            raise PeerBusy("calls of peers go first")
        jobs = [
            QueuedExpertCall(work, float(work_units(work.offsets).sum()), math.inf, self._loop.create_future())
            for work in works
        ]
        for job in jobs:
            self._enqueue(job)
        return await asyncio.gather(*(job.done for job in jobs))

    def _enqueue(self, job: QueuedExpertCall) -> None:
        self._pending += 1
        self._units += job.units
        self._bytes += job.work.hidden.nbytes
        job.done.add_done_callback(lambda _: self._leave(job))
        self._inbox.put(job)

    async def _answer(self, job: QueuedExpertCall, began_s: float) -> Answer[ExpertCallMessage]:
        try:
            sums = await job.done
        except PeerBusy:
            self.shed += 1
            raise
        self.served += 1
        return Answer(ExpertResult(time.monotonic() - began_s), [sums])

    def _leave(self, job: QueuedExpertCall) -> None:
        self._pending -= 1
        self._units -= job.units
        self._bytes -= job.work.hidden.nbytes

    def _compute_at_once(self, work: ExpertWork, units: float) -> Any | None:
        """Computes on the loop: for small work, switching threads twice would take longer than the work."""
        began_s = time.monotonic()
        sums = self._host.compute_at_once(work)
        if sums is not None:
            self.served += 1
            self._account(units, time.monotonic() - began_s)
        return sums

    def _account(self, units: float, took_s: float) -> None:
        self._unit_time.measure(took_s / units, time.monotonic())
        self.batches += 1
        self.busy_s += took_s

    def _admit(self, job: QueuedExpertCall) -> None:
        """Raises PeerBusy for a call that would not be computed before its deadline, or where the queue is full.

        While nothing is computed nothing is measured: the estimate then fades, so that big calls are accepted again.
        """
        unit_s = self._unit_time.mean_s if self._pending else self._unit_time.at(time.monotonic())
        late = (self._units + job.units) * unit_s > job.deadline - self._loop.time()
        if late or self._pending >= QUEUED_EXPERT_CALLS or self._bytes > QUEUE_BYTES:
            self.shed += 1
            raise PeerBusy(f"{self._pending} calls wait here; this one would not be computed in time")

    # --- the server's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._collect_expert_calls():
            if batch := self._next_layer():
                self._compute(batch)

    def _collect_expert_calls(self) -> bool:
        """Takes arrived calls, and waits for one where there is none. Returns False when closed."""
        if not self._waiting and (job := self._inbox.get()) is not None:
            self._waiting.append(job)
        while not self._inbox.empty():
            if (job := self._inbox.get_nowait()) is not None:
                self._waiting.append(job)
        return not self._closed

    def _next_layer(self) -> list[QueuedExpertCall]:
        """Returns waiting calls of the layer that has waited longest; fails those past their deadline."""
        taken: list[QueuedExpertCall] = []
        kept: deque[QueuedExpertCall] = deque()
        rows, now = 0, self._loop.time()
        for job in self._waiting:
            if job.deadline < now:
                self._post(_fail, job, PeerBusy("the call waited here until it was too late"))
            elif not taken or (job.work.layer == taken[0].work.layer and rows < TOGETHER_ROWS):
                taken.append(job)
                rows += len(job.work.hidden)
            else:
                kept.append(job)
        self._waiting = kept
        return taken

    def _compute(self, batch: list[QueuedExpertCall]) -> None:
        began_s = time.monotonic()
        try:
            results = self._host.compute([job.work for job in batch])
        except Exception as error:  # the peers must get an answer in any case
            if len(batch) > 1:  # find the call at fault
                for job in batch:
                    self._compute([job])
                return
            if not isinstance(error, EdgemoeError):
                self._say(logging.ERROR, "computing for a peer failed", exc_info=True)
                error = PeerRefused(f"it failed here: {error!r}")
            self._post(_resolve, batch, (), error)
        else:
            self._post(_resolve, batch, results, None)
        self._account(sum(job.units for job in batch), time.monotonic() - began_s)

    def _post(self, what: Any, *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *arguments)


def _resolve(batch: list[QueuedExpertCall], results: Sequence[Any], error: EdgemoeError | None) -> None:
    for i, job in enumerate(batch):
        if error is not None:
            _fail(job, error)
        elif not job.done.done():
            job.done.set_result(results[i])


def _fail(job: QueuedExpertCall, error: EdgemoeError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
