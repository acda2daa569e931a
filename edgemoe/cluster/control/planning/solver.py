"""Has placements solved and expert clusters fitted: in a process of its own.

Placements for which there is no time for that are made by the plain policy, in a thread.

The process is started when it is first needed and kept, for what it solves by is compiled anew in each. One that dies,
is late or answers with something else is killed; the next question starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import structs

from edgemoe.cluster.control.placement import PlanTask, Target
from edgemoe.cluster.control.planning.messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    ClusterAnswer,
    ClusterQuestion,
    PlacementAnswer,
    Question,
    frame,
)
from edgemoe.cluster.control.planning.targets import make_target, question, target_of
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PlacementInfeasible, PlanningFailed

A = TypeVar("A", PlacementAnswer, ClusterAnswer)
NICE = 10  # at 19 it would not come to an end where engines use every core all the time
COMMAND = (sys.executable, "-m", "edgemoe.cluster.control.planning.child", str(NICE))
ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
DEADLINE_S = 600.0  # of one solution, by a process that gets what others leave
END_S = 2.0  # that the process has to end by itself


class PlanSolver:
    """Owns the solver's process. `close` after use. One event loop."""

    def __init__(
        self, settings: ClusterSettings, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S
    ) -> None:
        self._settings, self._command, self._deadline_s = settings, command, deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._number = 0
        self._one = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Returns the process that waits for the next question; None where there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def solve(self, task: PlanTask) -> Target:
        """Returns the placement for the task: the plain one where that is urgent, else the settings' policy's.

        Raises PlacementInfeasible, PlanningFailed.
        """
        settings = self._settings
        if task.urgent or settings.placement == "uniform":
            return await asyncio.to_thread(make_target, task)
        async with self._one:
            self._number += 1
            asked = await asyncio.to_thread(question, task, settings.placement, settings.isolation, self._number)
            boxes = len(asked.boxes)
            solved = await self._ask(
                asked, PlacementAnswer, lambda it: it.infeasible or len(it.homes) == len(it.disk) == boxes
            )
        if solved.infeasible:
            raise PlacementInfeasible(solved.infeasible, solved.missing_bytes)
        return await asyncio.to_thread(target_of, task, asked, solved)

    async def fit(self, asked: ClusterQuestion) -> ClusterAnswer:
        """Returns expert clusters; the question's number is given here. Raises PlanningFailed."""
        table, engines = 4 * asked.layers * asked.experts, len(asked.slots)
        wanted = table, engines * table, engines * table, engines
        async with self._one:
            self._number += 1
            return await self._ask(
                structs.replace(asked, number=self._number),
                ClusterAnswer,
                lambda it: (len(it.weights), len(it.centroids), len(it.decode), len(it.nearest)) == wanted,
            )

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

    async def _ask(self, asked: Question, kind: type[A], fits: Callable[[A], object]) -> A:
        process = self._process
        if process is None or process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, env={**os.environ, **ONE_CORE}, process_group=0
            )
        self._process = None  # until it has answered
        try:
            async with asyncio.timeout(self._deadline_s):
                body = await _exchange(process, await asyncio.to_thread(frame, asked))
                solved = await asyncio.to_thread(msgspec.msgpack.decode, body, type=kind)
            if solved.number != asked.number or not fits(solved):
                raise ValueError("an answer to something else")
        except (TimeoutError, OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            why = f"no answer within {self._deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise PlanningFailed(f"the solver's process failed: {why or type(error).__name__}") from error
        else:
            self._process = process
        finally:
            if self._process is None:
                await _kill(process)
        return solved


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
