"""A process that answers one question at a time: started when it is told to or asked, killed where it does not answer.

One that dies, is late or answers with something else is killed; the next question starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import structs

from edgemoe.errors import HelperFailed, HelperMissing
from edgemoe.helper.frames import LENGTH_BYTES, MAX_FRAME_BYTES, Answered, Asked, frame

LIBRARIES = ("OMP", "OPENBLAS", "NUMBA", "RAYON")
ONE_CORE = {**{f"{name}_NUM_THREADS": "1" for name in LIBRARIES}, "TOKENIZERS_PARALLELISM": "false"}
T = TypeVar("T")
END_S = 2.0  # that the process has to end by itself
START_S = 30.0  # that a process may take to read what it needs, before its first answer


class HelperProcess:
    """Owns one process. `close` after use. One event loop."""

    def __init__(self, command: Sequence[str], deadline_s: float, *, quick: bool = False) -> None:
        """`deadline_s` is how long one answer may take; the first one of a process may take START_S more.

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
            return  # whoever asks has started it
        async with self._one:
            with contextlib.suppress(OSError):  # whoever asks is told
                self._process = await self._started()

    async def ask(self, asked: Asked, kind: type[Answered], fits: Callable[[Answered], object]) -> Answered:
        """Returns the answer to a question, whose number is given here.

        Raises HelperFailed unless it `fits`, HelperMissing where there is no process to ask.
        """
        async with self._one:
            self._number += 1
            return await self._ask(structs.replace(asked, number=self._number), kind, fits)

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
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
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env={**os.environ, **ONE_CORE}, process_group=0
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


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
