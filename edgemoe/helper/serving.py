"""The helper's side: questions from standard input, answers on standard output, within bounds."""

from __future__ import annotations

import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from edgemoe.helper.frames import LENGTH_BYTES, MAX_FRAME_BYTES, Answered, Asked, frame

IDLE_S = 3600.0
PAGE_BYTES = resource.getpagesize()


def serve(
    asked: BinaryIO,
    answers: BinaryIO,
    kind: type[Asked],
    answer: Callable[[Asked], Answered],
    cpu_s: float = 0.0,
    cpu_s_per_byte: float = 0.0,
) -> None:
    """Answers until there is no more to read, or nobody has asked for long.

    Between a question and its answer nothing else comes. An answer that takes more than `cpu_s` of processors, and
    `cpu_s_per_byte` of its question, ends the process, in whatever code it is; 0 is no bound.
    """
    while select.select([asked], [], [], IDLE_S)[0]:
        length = asked.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return
        size = int.from_bytes(length, "big")
        assert size <= MAX_FRAME_BYTES, "its parent sends no more"
        body = asked.read(size)
        signal.setitimer(signal.ITIMER_PROF, cpu_s + cpu_s_per_byte * size)
        answered = frame(answer(msgspec.msgpack.decode(body, type=kind)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(answered)
        answers.flush()


def bound_memory(more_bytes: int) -> None:
    """Lets this process have so many bytes of addresses beyond those that it has now."""
    bound_addresses(int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES + more_bytes)


def bound_addresses(most_bytes: int) -> None:
    """Lets this process have so many bytes of addresses, or fewer where it may not have as many."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
