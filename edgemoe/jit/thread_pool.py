"""Runs the chunks of a kernel on several threads: a fork-join pool for kernels that take microseconds.

Two OpenMP pools, Numba's and torch's, spin against each other (measured: 6.8 ms a region on two busy cores). Here the
caller computes chunks too, and never waits for a late helper. Helpers spin between regions for SPIN_S, then sleep.
Any thread may call. If the helpers are busy with another caller's region, the caller computes all chunks itself.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np

from edgemoe.jit.intrinsics import (
    INT,
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    atomic_swap,
    call_chunk,
    give_way,
    i64_at,
    jit,
    pause,
    sem_init,
    sem_post,
    wait_for,
    wake,
)
from edgemoe.jit.object_cache import code

# Byte offsets in the control block. Fields that different threads write lie in different cache lines.
TURN = 0  # region number << 32 | number of chunks not yet handed out
DONE = 64  # chunks finished
FUNCTION, JOB, CHUNKS = 128, 136, 144  # written only while no chunk is outstanding
BUSY = 192  # 1 while a caller owns the helpers
SLEEPERS = 256  # number of helpers that wait for the semaphore
SPINS = 320  # pauses before a helper sleeps
STOP = 328
SEMAPHORE = 384
CONTROL_BYTES = 448

SPIN_S = 200e-6  # how long a helper spins before it sleeps
_LEFT = 0xFFFFFFFF  # the bits of TURN that count chunks


@jit
def _take_chunk(control: int) -> int:
    """Takes a chunk. Returns its number, or -1 if none is left.

    A region's fields are rewritten only when none of its chunks is outstanding; TURN counts none then. So the fields
    are valid after a successful exchange, and only then.
    """
    while True:
        turn = atomic_load(control + TURN)
        left = turn & _LEFT
        if left == 0:
            return -1
        if atomic_replace(control + TURN, turn, turn - 1):
            return i64_at(control + CHUNKS)[0] - left  # type: ignore[no-any-return]


@jit
def _work(control: int) -> None:
    """Computes chunks until none is left."""
    while True:
        chunk = _take_chunk(control)
        if chunk < 0:
            return
        call_chunk(i64_at(control + FUNCTION)[0], i64_at(control + JOB)[0], chunk)
        atomic_add(control + DONE, 1)


@code(INT)
def RUN_HELPER(control: int) -> None:
    """Runs a helper thread: computes chunks, spins, sleeps, and returns once STOP is set."""
    idle = 0
    while i64_at(control + STOP)[0] == 0:
        if atomic_load(control + TURN) & _LEFT:
            _work(control)
            idle = 0
        elif idle < i64_at(control + SPINS)[0]:
            idle += 1
            pause()
        else:
            atomic_add(control + SLEEPERS, 1)
            wait_for(control + SEMAPHORE)
            idle = 0


@jit
def parallel(control: int, function: int, job: int, chunks: int) -> None:
    """Calls the function at an address for every chunk: function(job, chunk). Returns when all are done."""
    if chunks == 1 or control == 0 or not atomic_replace(control + BUSY, 0, 1):
        for chunk in range(chunks):
            call_chunk(function, job, chunk)
        return
    fields = i64_at(control)
    fields[FUNCTION >> 3], fields[JOB >> 3], fields[CHUNKS >> 3] = function, job, chunks
    atomic_store(control + DONE, 0)
    region = (atomic_load(control + TURN) >> 32) + 1
    atomic_store(control + TURN, ((region & 0x7FFFFFFF) << 32) | chunks)
    for _ in range(atomic_swap(control + SLEEPERS, 0)):
        wake(control + SEMAPHORE)
    _work(control)
    spins = 0
    while atomic_load(control + DONE) != chunks:
        pause()
        spins += 1
        if spins > 1000:  # the helper lost its core: give it ours
            give_way()
    atomic_store(control + BUSY, 0)


@code(INT, INT, INT, INT)
def RUN_CHUNKS(control: int, function: int, job: int, chunks: int) -> None:
    """Calls the function at an address for every chunk, as `parallel` does; Python calls this one."""
    parallel(control, function, job, chunks)


@code(INT)
def PAUSE_OFTEN(count: int) -> None:
    """Pauses `count` times."""
    for _ in range(count):
        pause()


class ThreadPool:
    """Owns `threads` - 1 helper threads; the caller is the last thread. `close` or garbage collection ends them."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {threads}")
        self.threads = threads
        self._memory = np.zeros(CONTROL_BYTES + 64, np.uint8)
        self.control = (self._memory.ctypes.data + 63) & ~63
        view = self._memory[self.control - self._memory.ctypes.data :][:CONTROL_BYTES].view(np.int64)
        view[SPINS >> 3] = self._spins()
        sem_init(self.control + SEMAPHORE, 0, 0)
        helpers = [
            threading.Thread(target=RUN_HELPER.call, args=(self.control,), name=f"kernel-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for helper in helpers:
            helper.start()
        self.close = weakref.finalize(self, _stop, view, self.control, helpers)

    def run(self, function: int, job: int, chunks: int) -> None:
        """Calls the function at an address for every chunk: function(job, chunk). Returns when all are done."""
        RUN_CHUNKS.call(self.control, function, job, chunks)

    @staticmethod
    def _spins() -> int:
        """Measures how many pauses take SPIN_S on this machine."""
        PAUSE_OFTEN.call(1)
        start = time.perf_counter()
        PAUSE_OFTEN.call(10_000)
        return max(1, int(SPIN_S * 10_000 / (time.perf_counter() - start)))


def _stop(view: Any, control: int, helpers: list[threading.Thread]) -> None:
    """Stops the helpers, and waits until they have ended."""
    view[STOP >> 3] = 1
    for _ in helpers:
        sem_post(control + SEMAPHORE)
    for helper in helpers:
        helper.join()
