"""Has placements solved and expert clusters fitted, each in a process of its own, so that neither waits for the other.

Urgent placements use the uniform policy, in a thread. The process that solves the others is kept, as it compiles its
code at its start; `prepare` starts it early. The process that fits clusters starts within a second and ends afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from edgemoe.cluster.control.planning.planning_questions import ClusterAnswer, ClusterQuestion, PlacementAnswer
from edgemoe.cluster.control.planning.targets import (
    PlacementTarget,
    PlacementTask,
    make_question,
    make_target,
    read_target,
)
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import HelperFailed, PlacementInfeasible, PlanningFailed
from edgemoe.helper.child_process import Answered, Asked, HelperProcess

NICE = 10  # at 19 it would never finish while engines use every core
COMMAND = (sys.executable, "-m", "edgemoe.cluster.control.planning.placement_child", str(NICE))
FIT_COMMAND = (sys.executable, "-m", "edgemoe.cluster.control.planning.fitting_child", str(NICE))
DEADLINE_S = 600.0  # of one answer, by a process of low priority


class PlanSolver:
    """Owns both processes. Lives on one event loop; call `close` after use."""

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
        """The process that solves placements; None while there is none."""
        return self._solving.pid

    async def prepare(self) -> None:
        """Starts the process that solves placements, unless it runs: it compiles for some seconds first."""
        if self._settings.placement != "uniform":
            await self._solving.prepare()

    async def solve(self, task: PlacementTask) -> PlacementTarget:
        """Returns the placement for the task: uniform if urgent, otherwise by the policy of the settings.

        Raises PlacementInfeasible, PlanningFailed.
        """
        settings = self._settings
        if task.urgent or settings.placement == "uniform":
            return await asyncio.to_thread(make_target, task)
        asked = await asyncio.to_thread(make_question, task, settings.placement, settings.migrate_s)
        boxes = len(asked.boxes)
        solved = await _answer(
            self._solving, asked, PlacementAnswer, lambda it: it.infeasible or len(it.homes) == len(it.disk) == boxes
        )
        if solved.infeasible:
            raise PlacementInfeasible(solved.infeasible, solved.missing_bytes)
        return await asyncio.to_thread(read_target, task, asked, solved)

    async def fit(self, asked: ClusterQuestion) -> ClusterAnswer:
        """Returns expert clusters; overwrites the question's number. Raises PlanningFailed."""
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
        """Ends both processes."""
        await self._solving.close()
        await self._fitting.close()


async def _answer(
    helper: HelperProcess, asked: Asked, kind: type[Answered], fits: Callable[[Answered], object]
) -> Answered:
    """Returns the helper's answer, which must satisfy `fits`. Raises PlanningFailed."""
    try:
        return await helper.ask(asked, kind, fits)
    except HelperFailed as error:
        raise PlanningFailed(f"the solver's process failed: {error}") from error
