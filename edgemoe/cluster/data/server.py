"""Computing experts for peers: calls that wait are computed together, and what would come too late is shed.

One thread of its own computes, so that a step of this box never delays a peer's. It takes the call that has waited
longest, and with it all others of the same layer, from whichever peers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgemoe.cluster.data.messages import CallMessage, Model, Result
from edgemoe.cluster.wire.net import Answer, Question
from edgemoe.errors import EdgemoeError, PeerBusy, PeerRefused
from edgemoe.types import ExpertWork, work_units

log = logging.getLogger(__name__)
QUEUE_CALLS = 256  # that wait; beyond it callers are sent away
QUEUE_BYTES = 256 << 20
TOGETHER_ROWS = 512  # of calls computed at once
FIRST_UNIT_S = 1e-4
RECENT = 0.2


class Host(Protocol):
    """Whoever has experts: computes for peers, on the server's thread."""

    def refuses(self, work: ExpertWork) -> str:
        """Why the work cannot be done here; "" where it can. From the event loop."""

    def compute(self, works: Sequence[ExpertWork]) -> Sequence[Any]:
        """The result of each work, all of one layer, as buffers [r, H]. Raises EdgemoeError."""


@dataclass(slots=True)
class Job:
    work: ExpertWork
    units: float
    deadline: float  # by the loop's clock
    done: asyncio.Future[Any]


class ExpertServer:
    """`serve` on the loop; `start` the thread, `close` to end it."""

    def __init__(self, model: Model, host: Host) -> None:
        self.served = self.shed = self.batches = 0
        self.busy_s = 0.0
        self._model, self._host = model, host
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()  # of all that follows
        self._waiting: deque[Job] = deque()
        self._units = self._bytes = 0.0  # of what waits or is computed
        self._unit_s = FIRST_UNIT_S
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="expert-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Lets the batch under way end; what waits fails."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for job in left:
            _fail(job, PeerRefused("the engine is stopping"))
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    async def serve(self, question: Question[CallMessage]) -> Answer[CallMessage]:
        """The answer to a Call. Raises PeerBusy, PeerRefused."""
        began_s = time.monotonic()
        call: Any = question.message
        work = self._model.read_call(call, question.tensors)
        if why := self._host.refuses(work):
            raise PeerRefused(why)
        job = Job(work, float(work_units(work.offsets).sum()), question.deadline, self._loop.create_future())
        self._queue(job)
        sums = await job.done
        self.served += 1
        return Answer(Result(time.monotonic() - began_s), [sums])

    def _queue(self, job: Job) -> None:
        left_s = job.deadline - self._loop.time()
        with self._changed:
            late = (self._units + job.units) * self._unit_s > left_s
            full = len(self._waiting) >= QUEUE_CALLS or self._bytes > QUEUE_BYTES
            if late or full or self._closed:
                self.shed += 1
                raise PeerBusy(f"{len(self._waiting)} calls wait here; this one would not be computed in time")
            self._waiting.append(job)
            self._units += job.units
            self._bytes += job.work.hidden.nbytes
            self._changed.notify()

    # --- the server's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next():
            began_s = time.monotonic()
            try:
                results = self._host.compute([job.work for job in batch])
            except Exception as error:  # the peers must hear of it, whatever it is
                self._end(batch, error=error)
            else:
                self._end(batch, results=results)
            self._account(batch, time.monotonic() - began_s)

    def _next(self) -> list[Job]:
        """Waiting calls of one layer; empty when closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return []
                if batch := self._take_layer():
                    return batch

    def _take_layer(self) -> list[Job]:
        layer, rows = self._waiting[0].work.layer, 0
        taken: list[Job] = []
        kept: deque[Job] = deque()
        now = self._loop.time()
        for job in self._waiting:
            if job.deadline < now or job.done.done():
                self._drop(job)
            elif job.work.layer == layer and (not taken or rows + len(job.work.hidden) <= TOGETHER_ROWS):
                taken.append(job)
                rows += len(job.work.hidden)
            else:
                kept.append(job)
        self._waiting = kept
        return taken

    def _drop(self, job: Job) -> None:
        self.shed += 1
        self._units -= job.units
        self._bytes -= job.work.hidden.nbytes
        self._post(_fail, job, PeerBusy("the call waited here until it was too late"))

    def _account(self, batch: list[Job], took_s: float) -> None:
        units = sum(job.units for job in batch)
        with self._changed:
            self._unit_s += RECENT * (took_s / units - self._unit_s)
            self._units -= units
            self._bytes -= sum(job.work.hidden.nbytes for job in batch)
            self.batches += 1
            self.busy_s += took_s

    def _end(self, batch: list[Job], results: Sequence[Any] = (), error: Exception | None = None) -> None:
        if error is not None and not isinstance(error, EdgemoeError):
            log.error("computing for a peer failed", exc_info=error)
        self._post(_settle, batch, results, error)

    def _post(self, what: Any, *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *arguments)


def _settle(batch: list[Job], results: Sequence[Any], error: Exception | None) -> None:
    for i, job in enumerate(batch):
        if error is not None:
            _fail(job, error if isinstance(error, EdgemoeError) else PeerRefused(f"it failed here: {error!r}"))
        elif not job.done.done():
            job.done.set_result(results[i])


def _fail(job: Job, error: EdgemoeError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
