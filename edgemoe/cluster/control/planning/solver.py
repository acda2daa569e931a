"""Has placements solved and expert clusters fitted, each in a process of its own, so that neither waits for the other.

Placements for which there is no time for that are made by the plain policy, in a thread. The process that solves the
others is kept, for what it solves by is compiled anew in each, and can be started beforehand; one that fits clusters
starts within a second, is rarely needed, and ends with its answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from edgemoe.cluster.control.planning.messages import ClusterAnswer, ClusterQuestion, PlacementAnswer
from edgemoe.cluster.control.planning.targets import PlacementTarget, PlacementTask, make_target, question, read_target
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import HelperFailed, PlacementInfeasible, PlanningFailed
from edgemoe.helper.process import Answered, Asked, HelperProcess

NICE = 10  # at 19 it would not come to an end where engines use every core all the time
COMMAND = (sys.executable, "-m", "edgemoe.cluster.control.planning.placement_child", str(NICE))
FIT_COMMAND = (sys.executable, "-m", "edgemoe.cluster.control.planning.fitting_child", str(NICE))
DEADLINE_S = 600.0  # of one answer, by a process that gets what others leave


class PlanSolver:
    """Owns both processes. `close` after use. One event loop."""

    def __init__(
        self,
        settings: ClusterSettings,
        command: Sequence[str] = COMMAND,
        fit_command: Sequence[str] = FIT_COMMAND,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._settings = settings
        self._solving = HelperProcess(command, deadline_s)
        self._fitting = HelperProcess(fit_command, deadline_s)

    @property
    def pid(self) -> int | None:
        """Returns the process that waits for the next placement to solve; None where there is none."""
        return self._solving.pid

    async def prepare(self) -> None:
        """Starts the process that solves placements, unless it is there: it compiles for some seconds first."""
        if self._settings.placement != "uniform":
            await self._solving.prepare()

    async def solve(self, task: PlacementTask) -> PlacementTarget:
        """Returns the placement for the task: the plain one where that is urgent, else the settings' policy's.

        Raises PlacementInfeasible, PlanningFailed.
        """
        settings = self._settings
        if task.urgent or settings.placement == "uniform":
            return await asyncio.to_thread(make_target, task)
        asked = await asyncio.to_thread(question, task, settings.placement, settings.isolation, settings.migrate_s)
        boxes = len(asked.boxes)
        solved = await _answer(
            self._solving, asked, PlacementAnswer, lambda it: it.infeasible or len(it.homes) == len(it.disk) == boxes
        )
        if solved.infeasible:
            raise PlacementInfeasible(solved.infeasible, solved.missing_bytes)
        return await asyncio.to_thread(read_target, task, asked, solved)

    async def fit(self, asked: ClusterQuestion) -> ClusterAnswer:
        """Returns expert clusters; the question's number is given here. Raises PlanningFailed."""
        table, engines = 4 * asked.layers * asked.experts, len(asked.slots)
        wanted = table, engines * table, engines * table, engines
        try:
            return await _answer(
                self._fitting,
                asked,
                ClusterAnswer,
                lambda it: (len(it.weights), len(it.centroids), len(it.decode), len(it.nearest)) == wanted,
            )
        finally:
            await self._fitting.close()

    async def close(self) -> None:
        """Ends the processes."""
        await self._solving.close()
        await self._fitting.close()


async def _answer(
    helper: HelperProcess, asked: Asked, kind: type[Answered], fits: Callable[[Answered], object]
) -> Answered:
    """Returns the helper's answer that `fits`. Raises PlanningFailed."""
    try:
        return await helper.ask(asked, kind, fits)
    except HelperFailed as error:
        raise PlanningFailed(f"the solver's process failed: {error}") from error
