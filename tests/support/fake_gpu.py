"""A GPU whose streams run in any order that their events allow, for tests of synchronization."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgemoe.experts.compute import cuda_link
from edgemoe.experts.tiers.slab import HostSlab

Work = Callable[[], bool]  # one step of a stream; false if it has to wait
PIECE_MS = 1.0  # that a piece of copying or computing takes; half a copy is a piece


class FakeGpu:
    """Work goes into streams; `run` does some of it, the next piece of a random stream each time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: list[FakeStream] = []
        self.now_ms = 0.0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", lambda device=None: FakeStream(self))
        patch.setattr(torch.cuda, "Event", lambda blocking=False, enable_timing=False: FakeEvent(self, enable_timing))
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(cuda_link, "copy_async", self._copy)

    def add(self, stream: FakeStream) -> None:
        self._streams.append(stream)

    def spend(self) -> bool:
        """Advances the clock by one piece of work."""
        self.now_ms += PIECE_MS
        return True

    def run(self, pieces: int) -> None:
        with self._lock:
            for _ in range(pieces):
                ready = [stream for stream in self._streams if stream.work]
                if ready:
                    stream = self._random.choice(ready)
                    if stream.work[0]():
                        stream.work.popleft()

    def let_others_go_on(self) -> None:
        """Does a piece, and lets the threads that wait for it run."""
        self.run(1)
        time.sleep(0)

    def go(self, stream: FakeStream) -> None:
        """Runs a stream's work until it must wait."""
        with self._lock:
            while stream.work and stream.work[0]():
                stream.work.popleft()

    def drain(self) -> None:
        while any(stream.work for stream in self._streams):
            self.run(1)

    def _copy(
        self, slab: FakeSlab, into: int, host: HostSlab, source: int, size_bytes: int, stream: FakeStream
    ) -> None:
        """Copies half by half when the GPU comes to it; the source is read then, not before."""
        half = size_bytes // 2
        for first, end in ((0, half), (half, size_bytes)):
            there, here = slab.memory.ravel()[into + first : into + end], host.bytes[source + first : source + end]
            with self._lock:
                stream.work.append(functools.partial(self._write, there, here))

    def _write(self, there: np.ndarray, here: np.ndarray) -> bool:  # type: ignore[type-arg]
        there[:] = here
        return self.spend()

    @contextlib.contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        yield


class FakeStream:
    def __init__(self, gpu: FakeGpu) -> None:
        self.work: deque[Work] = deque()
        self._gpu = gpu
        gpu.add(self)

    def compute(self, pieces: int) -> None:
        """Queues work that reads no memory."""
        self.work.extend([self._gpu.spend] * pieces)

    def wait_event(self, event: FakeEvent) -> None:
        wanted = event.recorded
        self.work.append(lambda: event.happened >= wanted)


class FakeEvent:
    """Counts its recordings; a wait is for the last one before it."""

    def __init__(self, gpu: FakeGpu, timed: bool) -> None:
        self._gpu, self._timed = gpu, timed
        self.recorded = self.happened = 0
        self.at_ms = 0.0

    def record(self, stream: FakeStream) -> None:
        self.recorded += 1
        number = self.recorded
        stream.work.append(lambda: self._happen(number))

    def _happen(self, number: int) -> bool:
        self.happened, self.at_ms = number, self._gpu.now_ms
        return True

    def query(self) -> bool:
        return self.happened == self.recorded

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._timed
        assert end._timed
        assert self.query()
        assert end.query(), "the GPU would refuse: it has not happened yet"
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        wanted = self.recorded
        while self.happened < wanted:  # the test's thread advances the streams
            time.sleep(1e-5)


class FakeSlab:
    """The memory of slots on the fake GPU."""

    def __init__(self, gpu: FakeGpu, slots: int, stride_bytes: int) -> None:
        self.memory = np.zeros((slots, stride_bytes), np.uint8)
        self.device = torch.device("meta")


def no_order() -> Any:
    """Returns an order of copies and launches where neither overlap."""
    return SimpleNamespace(lock=contextlib.nullcontext(), under_way=list, launched=lambda *_: None)
