"""A few helper processes for untrusted work, shared by principals in turn.

What takes too long, or too much memory, ends its process: the next question starts another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from edgemoe.helper.frames import Answered, Asked
from edgemoe.helper.process import HelperProcess
from edgemoe.helper.turns import TaskTurns

PROCESSES = 2  # so that one principal's work, however long, leaves one to the others
EACH = 1


class HelperPool:
    """Owns up to PROCESSES processes, started as they are needed. `close` after use. One event loop."""

    def __init__(self, command: Sequence[str], deadline_s: float) -> None:
        """`deadline_s` is how long one answer may take, by the clock; the process has bounds of its own."""
        self._turns = TaskTurns(PROCESSES, EACH)
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
    ) -> Answered:
        """Returns the answer, once it is the principal's turn.

        Raises HelperFailed unless it `fits`, HelperMissing where there is no process to ask.
        """
        async with self._turns.turn(principal):
            helper = self._free.pop()  # the one used last: a second is started only where two are needed
            try:
                return await helper.ask(asked, kind, fits)
            finally:
                self._free.append(helper)

    async def prepare(self) -> None:
        """Starts one process, so that the first question does not wait for it."""
        await self._helpers[0].prepare()

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.gather(*(helper.close() for helper in self._helpers))
