"""Placements solved in a process of its own, which may die, hang or talk nonsense."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from support.planes import card
from support.reports import report
from support.waiting import until

from edgemoe.cluster.control.planning.fitting_child import fit
from edgemoe.cluster.control.planning.planning_questions import ClusterQuestion
from edgemoe.cluster.control.planning.solver import COMMAND, FIT_COMMAND, NICE, PlanSolver
from edgemoe.cluster.control.planning.targets import ExpertHome, PlacementTask, make_plan, make_target
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PlacementInfeasible, PlanningFailed
from edgemoe.helper import child_process
from edgemoe.types.arrays import BoolArray
from edgemoe.types.expert_signatures import EndedRequest, ExpertSignature
from edgemoe.types.placement import PLAN_FORMAT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]
LAYERS, EXPERTS = 2, 6  # as in support.planes
ALL: BoolArray = np.ones((LAYERS, EXPERTS), np.bool_)
SETTINGS = ClusterSettings(node="a", replicas=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def solver() -> AsyncIterator[PlanSolver]:
    """Compiles once, for ten seconds of a core."""
    made = PlanSolver(SETTINGS, [*COMMAND[:-1], "0"], [*FIT_COMMAND[:-1], "0"])
    yield made
    await made.close()


def task(room: int = 6, disk: BoolArray = ALL, *, urgent: bool = False, reports: bool = True) -> PlacementTask:
    """Returns two boxes: a's requests choose the last experts only, b's the first."""
    choices = {"a": [(3, 4), (4, 5), (5, 3)], "b": [(0, 1), (1, 2), (2, 0)]}
    told = {
        node: report(np.array([[each] * LAYERS for each in choices[node] * 20], np.int16), EXPERTS)
        for node in choices
        if reports
    }
    boxes = tuple(ExpertHome(node, (room,) if room else (), disk, np.zeros_like(disk)) for node in choices)
    plain = PlacementTask(card("engine"), boxes, 1)
    now = make_plan(plain.engine, make_target(plain), 1, 1) if room else None
    return PlacementTask(plain.engine, boxes, 1, told, now, urgent)


async def test_experts_move_to_boxes_whose_requests_choose_them(solver: PlanSolver) -> None:
    found = await solver.solve(task())
    assert found.nodes == ("a", "b")
    assert found.homes[:, 0].tolist() == [[False] * 3 + [True] * 3, [True] * 3 + [False] * 3]
    assert found.then_s < 0.01 * found.now_s
    assert (found.heat > 0).all()
    plan = make_plan(card("engine"), found, 2, 7)
    assert (plan.policy, plan.format, plan.disk) == ("rendezvous", PLAN_FORMAT, ())


async def test_waiting_is_reported_in_seconds(solver: PlanSolver) -> None:
    """With uniform homes about half of a token's experts are away, so that it calls the other box at each layer."""
    tokens_a_second = 2 * 60 / (600 / np.log(2))
    found = await solver.solve(task())
    assert 0.5 * LAYERS * tokens_a_second * 1e-3 < found.now_s <= 1.1 * LAYERS * tokens_a_second * 1e-3


async def test_without_reports_no_saving_is_stated(solver: PlanSolver) -> None:
    found = await solver.solve(task(reports=False))
    assert np.isnan([found.now_s, found.then_s]).all()
    assert found.homes.any(axis=0).all()


def cluster_question() -> ClusterQuestion:
    """Asks to fit forty requests for the first two experts, and forty for the last."""
    tables = [ExpertSignature(30, np.tile(np.array(shares, "<u2"), (LAYERS, 1)).tobytes()) for shares in KINDS]
    requests = tuple(EndedRequest(table, table) for table in tables) * 40
    return ClusterQuestion(0, LAYERS, EXPERTS, requests, (4, 4), (1, 0) * 40)


KINDS = ([40_000, 25_535, 0, 0, 0, 0], [0, 0, 0, 0, 25_535, 40_000])


async def test_expert_clusters_are_fitted_by_a_process_of_their_own(solver: PlanSolver) -> None:
    asked = cluster_question()
    found = await solver.fit(asked)
    here = fit(msgspec.structs.replace(asked, number=found.number))
    assert found == here
    centroids = np.frombuffer(found.centroids, np.float32).reshape(2, LAYERS, EXPERTS)
    assert centroids[0, :, 4:].all()
    assert centroids[1, :, :2].all(), "the first engine had the second kind before"
    assert found.nearest == (40, 40)


HANGS = [sys.executable, "-c", "import time; time.sleep(100)"]


async def test_fits_and_placements_do_not_wait_for_each_other_and_the_fitting_process_ends(
    solver: PlanSolver, tmp_path: Path
) -> None:
    noted = tmp_path / "pid"
    noting = f"import os, runpy, sys; open({str(noted)!r}, 'w').write(str(os.getpid())); sys.argv[1:] = ['0']; "
    fits = [
        sys.executable,
        "-c",
        noting + "runpy.run_module('edgemoe.cluster.control.planning.fitting_child', None, '__main__')",
    ]
    busy = PlanSolver(SETTINGS, HANGS, fits)
    solving = asyncio.create_task(busy.solve(task()))
    assert (await busy.fit(cluster_question())).nearest == (40, 40)
    assert not Path(f"/proc/{noted.read_text()}").exists()
    assert not solving.done()
    fitting = asyncio.create_task(PlanSolver(SETTINGS, HANGS, HANGS).fit(cluster_question()))
    assert (await solver.solve(task())).homes.any()
    assert not fitting.done()
    for each in (solving, fitting):
        each.cancel()
    await asyncio.gather(solving, fitting, return_exceptions=True)


async def test_the_solver_process_is_kept_and_runs_at_low_priority(solver: PlanSolver) -> None:
    await solver.solve(task())
    first = solver.pid
    await solver.solve(task())
    assert solver.pid == first is not None
    child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE)
    try:
        await until(lambda: os.getpriority(os.PRIO_PROCESS, child.pid) == min(19, os.nice(0) + NICE))
    finally:
        child.kill()
        child.communicate()


async def test_it_can_be_started_before_it_is_asked_and_is_not_where_nothing_is_ever_solved() -> None:
    made = PlanSolver(SETTINGS, HANGS)
    await made.prepare()
    first = made.pid
    await made.prepare()
    assert made.pid == first is not None
    await made.close()
    assert made.pid is None
    never = PlanSolver(msgspec.structs.replace(SETTINGS, placement="uniform"), HANGS)
    await never.prepare()
    assert never.pid is None


async def test_getting_ready_does_not_wait_for_an_answer_under_way() -> None:
    busy = PlanSolver(SETTINGS, HANGS)
    solving = asyncio.create_task(busy.solve(task()))
    await until(busy._solving._one.locked)
    async with asyncio.timeout(30.0):
        await busy.prepare()
    assert not solving.done()
    solving.cancel()
    await asyncio.gather(solving, return_exceptions=True)
    assert busy.pid is None


async def test_a_solver_that_cannot_start_fails_its_callers_with_the_reason() -> None:
    nowhere = PlanSolver(SETTINGS, ["/nonexistent"])
    await nowhere.prepare()
    with pytest.raises(PlanningFailed, match="cannot be started"):
        await nowhere.solve(task())


UNCOMPILED = (
    "import sys; from edgemoe.cluster.control.planning.placement_child import PlacementQuestion, serve, solve; "
    "serve(sys.stdin.buffer, sys.stdout.buffer, PlacementQuestion, solve)"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mortal() -> AsyncIterator[PlanSolver]:
    """By a policy that needs nothing compiled."""
    settings = ClusterSettings(node="a", replicas=1, placement="gimbal")
    made = PlanSolver(settings, [sys.executable, "-c", UNCOMPILED])
    yield made
    await made.close()
    assert made.pid is None


async def test_one_that_was_killed_is_started_again(mortal: PlanSolver) -> None:
    silent = task(reports=False)
    before = await mortal.solve(silent)
    killed = mortal.pid
    assert killed is not None
    os.kill(killed, 9)
    await until(lambda: mortal.pid is None)
    after = await mortal.solve(silent)
    assert mortal.pid not in (None, killed)
    np.testing.assert_array_equal(before.homes, after.homes)
    assert after.policy == "uniform", "nobody has reported anything"


async def test_successive_experts_move_together_and_then_stay(mortal: PlanSolver) -> None:
    """Both boxes' tokens go on to the same numbers, from even ones to odd; the plan that is found is not bettered."""
    choices = np.array([[(e, (e + 2) % 6), ((e + 1) % 6, (e + 3) % 6)] for e in range(6)] * 20, np.int16)
    asked = replace(task(), reports={node: report(choices, EXPERTS, successions=True) for node in "ab"})
    found = await mortal.solve(asked)
    assert found.policy == "gimbal"
    assert (found.homes.sum(axis=0) == 1).all()
    assert (found.homes[:, 1] == np.roll(found.homes[:, 0], 1, axis=1)).all()
    assert found.then_s < found.now_s
    again = await mortal.solve(replace(asked, now=make_plan(asked.engine, found, 1, 2)))
    np.testing.assert_array_equal(again.homes, found.homes)
    assert again.then_s == again.now_s


@pytest.mark.parametrize("engines", [0, 3])
async def test_clusters_of_another_number_of_engines_are_no_answer(engines: int) -> None:
    code = (
        "import sys; from edgemoe.cluster.control.planning.planning_questions import ClusterAnswer; "
        "from edgemoe.helper.child_process import frame; "
        f"sys.stdout.buffer.write(frame(ClusterAnswer(1, b'', b'', b'', 0.0, 0.0, (1,) * {engines}, 'counts', 0.0)))"
    )
    hopeless = PlanSolver(SETTINGS, fit_command=[sys.executable, "-c", code], deadline_s=20.0)
    with pytest.raises(PlanningFailed, match="solver's process"):
        await hopeless.fit(cluster_question())


async def test_urgent_plans_do_without_the_process() -> None:
    found = await PlanSolver(SETTINGS, ["/nonexistent"]).solve(task(urgent=True))
    assert found.policy == "uniform"
    assert found.homes.any(axis=0).all()


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(100)", "print('x' * 99)", "raise SystemExit(3)", "import sys; sys.stdin.read()"]
)
async def test_one_that_hangs_dies_or_talks_nonsense_is_ended_and_said_so(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "START_S", 0.5)  # which the first answer may take beside the deadline
    hopeless = PlanSolver(SETTINGS, [sys.executable, "-c", code], deadline_s=0.5)
    with pytest.raises(PlanningFailed, match="solver's process"):
        await hopeless.solve(task())
    assert hopeless.pid is None


async def test_too_little_memory_is_made_up_for_by_disks_or_named(solver: PlanSolver) -> None:
    for urgent in (True, False):
        found = await solver.solve(task(room=4, urgent=urgent))
        assert (found.homes.sum(axis=(1, 2)) == 4).all()
        assert (found.homes.any(axis=0) ^ found.disk.any(axis=0)).all()
        nowhere = ALL.copy()
        nowhere[1, 3] = False
        with pytest.raises(PlacementInfeasible, match="expert 3 of layer 1"):
            await solver.solve(task(disk=nowhere, urgent=urgent))
        with pytest.raises(PlacementInfeasible, match="no box has room"):
            await solver.solve(task(room=0, urgent=urgent))
