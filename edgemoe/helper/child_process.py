"""Child processes that answer one question at a time, so that work without bounds can be ended: both sides.

A frame is a length of four bytes and a msgpack body of that length. A process that dies, is late, takes too much
memory or answers something else is killed; the next question starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import select
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from edgemoe.errors import HelperFailed, HelperMissing
from edgemoe.helper.tied_program import tied
from edgemoe.helper.turns import TaskTurns
from edgemoe.types.bounds import Count

MAX_FRAME_BYTES = 64 << 20
LENGTH_BYTES = 4
STDERR = 2


class NumberedMessage(msgspec.Struct, frozen=True):
    """Carries the number of a question, which its answer repeats."""

    number: Count


Asked = TypeVar("Asked", bound=NumberedMessage)
Answered = TypeVar("Answered", bound=NumberedMessage)


def frame(message: NumberedMessage) -> bytes:
    """Returns the message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


LIBRARIES = ("OMP", "OPENBLAS", "NUMBA", "RAYON")
ONE_CORE = {**{f"{name}_NUM_THREADS": "1" for name in LIBRARIES}, "TOKENIZERS_PARALLELISM": "false"}
T = TypeVar("T")
END_S = 2.0  # that the process has to end by itself
START_S = 30.0  # that a process may take to load its files before its first answer


class HelperProcess:
    """Owns one process, which dies with this one. `close` after use. One event loop, of the main thread."""

    def __init__(self, command: Sequence[str], deadline_s: float, *, quick: bool = False) -> None:
        """Takes the deadline of one answer; the first answer of a process may take START_S more.

        Messages are encoded and decoded on threads, unless these are `quick`.
        """
        self._in_thread = _at_once if quick else asyncio.to_thread
        self._command, self._deadline_s = command, deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._number = 0
        self._answered: asyncio.subprocess.Process | None = None  # the process, once it has answered
        self._one = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Returns the process that waits for the next question; None where there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def busy(self) -> bool:
        """Returns whether somebody waits for an answer."""
        return self._one.locked()

    async def prepare(self) -> None:
        """Starts the process where there is none. Never waits for an answer that is under way."""
        if self.busy:
            return  # the question under way has started it
        async with self._one:
            with contextlib.suppress(OSError):  # the next question reports it
                self._process = await self._started()

    async def ask(self, asked: Asked, kind: type[Answered], fits: Callable[[Answered], object]) -> Answered:
        """Returns the answer to a question, whose number is given here.

        Raises HelperFailed unless it `fits`, HelperMissing where there is no process to ask.
        """
        async with self._one:
            self._number += 1
            return await self._ask(structs.replace(asked, number=self._number), kind, fits)

    async def close(self) -> None:
        """Ends the child process, by closing its input, else by a signal."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await _end_of(process)
        except TimeoutError:
            await _kill(process)

    async def _ask(self, asked: Asked, kind: type[Answered], fits: Callable[[Answered], object]) -> Answered:
        try:
            process = await self._started()
        except OSError as error:
            raise HelperMissing(f"cannot be started: {error}") from error
        self._process = None  # until it has answered
        within_s = self._deadline_s + (0.0 if process is self._answered else START_S)
        try:
            async with asyncio.timeout(within_s):
                body = await _exchange(process, await self._in_thread(frame, asked))
                solved = await self._in_thread(lambda: msgspec.msgpack.decode(body, type=kind))
            if solved.number != asked.number or not fits(solved):
                raise ValueError("an answer to something else")
        except (TimeoutError, OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            why = f"no answer within {within_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise HelperFailed(why or type(error).__name__) from error
        else:
            self._process = self._answered = process
        finally:
            if self._process is None:
                await _kill(process)
        return solved

    async def _started(self) -> asyncio.subprocess.Process:
        """Returns the process that is there, or a new one. Raises OSError."""
        process = self._process
        if process is not None and process.returncode is None:
            return process
        if shutil.which(self._command[0]) is None:  # which the program that becomes it could not tell
            raise FileNotFoundError(errno.ENOENT, "no such program", self._command[0])
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *tied([*self._command]), stdin=pipe, stdout=pipe, env={**os.environ, **ONE_CORE}, process_group=0
        )


async def _at_once(work: Callable[..., T], *args: object) -> T:
    return work(*args)


async def _exchange(process: asyncio.subprocess.Process, question: bytes) -> bytes:
    """Sends a framed question and returns its answer. Raises OSError, EOFError, ValueError."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return await process.stdout.readexactly(size)


async def _end_of(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a process, after that of its output: asyncio closes its side where both have been seen."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 16):
        pass
    await process.wait()


async def _kill(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    if process.stdout.at_eof():  # it ends by itself; a signal would ask for its status before asyncio does
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
                return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


PROCESSES = 2  # so that one principal's work, however long, leaves one to the others
EACH = 1


class HelperPool:
    """Owns up to PROCESSES processes, started as they are needed. `close` after use. One event loop."""

    def __init__(self, command: Sequence[str], deadline_s: float) -> None:
        """Takes the deadline of one answer by the clock; the process has bounds of its own."""
        self._turns, self._large_turns = TaskTurns(PROCESSES, EACH), TaskTurns(1, EACH)
        self._helpers = [HelperProcess(command, deadline_s, quick=True) for _ in range(PROCESSES)]
        self._free = list(reversed(self._helpers))

    @property
    def busy(self) -> bool:
        """Returns whether somebody waits for an answer."""
        return len(self._free) < PROCESSES

    @property
    def pids(self) -> list[int]:
        """Returns the processes that wait for a question."""
        return [helper.pid for helper in self._helpers if helper.pid is not None]

    async def ask(
        self,
        asked: Asked,
        kind: type[Answered],
        fits: Callable[[Answered], object] = lambda _: True,
        principal: str = "",
        *,
        is_large: bool = False,
    ) -> Answered:
        """Returns the answer, once it is the principal's turn. Large questions are answered one at a time.

        Raises HelperFailed unless it `fits`, HelperMissing where there is no process to ask.
        """
        alone = self._large_turns.turn(principal) if is_large else contextlib.nullcontext()
        async with alone, self._turns.turn(principal):
            helper = self._free.pop()  # the one used last: a second is started only where two are needed
            try:
                return await helper.ask(asked, kind, fits)
            finally:
                self._free.append(helper)

    async def prepare(self) -> None:
        """Starts one process, so that the first question does not wait for it."""
        await self._helpers[0].prepare()

    async def close(self) -> None:
        """Ends all child processes."""
        await asyncio.gather(*(helper.close() for helper in self._helpers))


IDLE_S = 3600.0
PAGE_BYTES = resource.getpagesize()


class MemoryBound(NamedTuple):
    """The memory that the answer to one question may take: `fixed_bytes`, and more for each byte of the question.

    All that a process takes beyond its memory at the start stays within `most_bytes`.
    """

    fixed_bytes: int
    per_byte: int
    most_bytes: int


def serve(
    asked: BinaryIO,
    answers: BinaryIO,
    kind: type[Asked],
    answer: Callable[[Asked], Answered],
    cpu_s: float = 0.0,
    cpu_s_per_byte: float = 0.0,
    memory: MemoryBound | None = None,
) -> None:
    """Answers until there is no more to read, or nobody has asked for long.

    Between a question and its answer nothing else comes. An answer may take `cpu_s` of processors, and
    `cpu_s_per_byte` for each byte of its question; the kernel ends a process that takes more. 0 is no bound. An answer
    that needs more than `memory` raises MemoryError, or ends the process. Its standard error is dropped, because
    questions could fill a log by it.
    """
    most_bytes = address_bytes() + memory.most_bytes if memory else 0
    if memory:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
    while select.select([asked], [], [], IDLE_S)[0]:
        length = asked.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return
        size = int.from_bytes(length, "big")
        assert size <= MAX_FRAME_BYTES, "its parent sends no more"
        if memory:
            bound_addresses(min(most_bytes, address_bytes() + memory.fixed_bytes + memory.per_byte * size))
        body = asked.read(size)
        signal.setitimer(signal.ITIMER_PROF, cpu_s + cpu_s_per_byte * size)
        answered = frame(answer(msgspec.msgpack.decode(body, type=kind)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(answered)
        answers.flush()


def address_bytes() -> int:
    """Returns the size of this process's address space."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * PAGE_BYTES


def bound_addresses(most_bytes: int) -> None:
    """Limits this process to `most_bytes` of addresses, or fewer if its hard limit is lower."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
