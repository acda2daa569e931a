"""Trials of files that a process reads: each must end in time, in a typed error or as a file that is right."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from edgemoe.errors import EdgemoeError

KEPT = 5  # faults that are reported
WITHIN_S = 60  # of one trial, on a busy machine


def run_trials(
    parts: Iterable[str], count: int, seed: int, trial: Callable[[str, random.Random], str], growth_mb: float
) -> dict[str, Any]:
    """Runs `count` trials of each part, each with a generator of its own; returns outcomes and faults.

    A trial returns its outcome or raises an EdgemoeError. Anything else is a fault, as is a process that grows by more
    than `growth_mb`.
    """
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    before_mb = _largest_mb()
    for part in parts:
        for number in range(count):
            try:
                with in_time(WITHIN_S):
                    outcomes[trial(part, random.Random(f"{seed} {part} {number}"))] += 1
            except EdgemoeError as error:
                outcomes[type(error).__name__] += 1
            except Exception as error:  # the faults that this looks for
                faults.append(f"{part} {number}: {type(error).__name__}: {str(error)[:300]}")
    grown_mb = _largest_mb() - before_mb
    told = {"outcomes": dict(outcomes), "faults": len(faults), "first": faults[:KEPT], "grown_mb": round(grown_mb, 1)}
    return told | {"ok": not faults and grown_mb < growth_mb}


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """Raises AssertionError, which no code that is tried handles, in the main thread if its body takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def memory_folder() -> str | None:
    """Returns a folder in memory, for speed; None if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _largest_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
