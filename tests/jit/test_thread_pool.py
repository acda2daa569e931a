"""The fork-join pool of kernels, and its helper threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from edgemoe.jit.intrinsics import atomic_add, atomic_load, i64_at, pause
from edgemoe.jit.object_cache import chunk
from edgemoe.jit.thread_pool import ThreadPool


@chunk
def _count(job: int, number: int) -> None:
    atomic_add(job + 8 * number, i64_at(job)[0] * 0 + 1)


@chunk
def _count_slowly(job: int, number: int) -> None:
    for _ in range(20_000):
        pause()
    atomic_add(job + 8 * number, 1)


def test_it_returns_when_the_last_chunk_is_done_and_not_before() -> None:
    pool, early = ThreadPool(2), 0
    for _ in range(100):
        counts = np.zeros(2, np.int64)
        pool.run(_count_slowly.address, counts.ctypes.data, 2)
        early += counts.tolist() != [1, 1]
        while not counts.all():
            pass  # the memory is the other thread's still
    assert early == 0
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_chunk_is_done_once(threads: int) -> None:
    pool, counts = ThreadPool(threads), np.zeros(1000, np.int64)
    for chunks in (1, 2, 7, 1000) * 50:
        pool.run(_count.address, counts.ctypes.data, chunks)
    assert counts.tolist() == [200] + [150] + [100] * 5 + [50] * 993
    pool.close()


@chunk
def _wait_in_the_first(job: int, number: int) -> None:
    if number == 0:
        spins = 0
        while atomic_load(job) < 31 and spins < 1_000_000_000:
            pause()
            spins += 1
        i64_at(job)[1] = i64_at(job)[0]
    else:
        atomic_add(job, 1)


def test_a_slow_thread_leaves_all_other_chunks_to_the_others() -> None:
    pool, counts = ThreadPool(2), np.zeros(2, np.int64)
    pool.run(_wait_in_the_first.address, counts.ctypes.data, 32)
    assert counts[1] == 31
    pool.close()


def test_several_callers_at_once_each_get_all_their_chunks_done() -> None:
    pool = ThreadPool(2)

    def call(counts: np.ndarray[Any, Any]) -> None:
        for _ in range(300):
            pool.run(_count.address, counts.ctypes.data, len(counts))

    arrays = [np.zeros(20 + i, np.int64) for i in range(4)]
    callers = [threading.Thread(target=call, args=(array,)) for array in arrays]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((array == 300).all() for array in arrays)
    pool.close()


def test_closing_ends_the_helpers_and_may_be_repeated() -> None:
    before = threading.active_count()
    pool = ThreadPool(3)
    assert threading.active_count() == before + 2
    pool.close()
    pool.close()
    assert threading.active_count() == before


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        ThreadPool(0)
