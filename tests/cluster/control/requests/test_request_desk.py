"""An unexpected error fails the request that caused it, and never the leader's daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from support.planes import EXPERTS, LAYERS, Front, card, fronts
from support.waiting import until

from edgemoe.cluster.control.messages import Heartbeat, LoadReport, RequestOffer
from edgemoe.cluster.control.planning.fitting_child import fit
from edgemoe.cluster.control.planning.planning_questions import ClusterAnswer, ClusterQuestion
from edgemoe.cluster.control.planning.solver import PlanSolver
from edgemoe.cluster.control.requests import expert_fitting
from edgemoe.errors import PeerBusy, PeerRefused
from edgemoe.types.expert_signatures import EndedRequest, ExpertSignature

USE = LoadReport(engine="x", slots=2, capacity=4, blocks=100, free_blocks=100)
pytestmark = [pytest.mark.asyncio]


@pytest_asyncio.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Front]:
    async with fronts(tmp_path, ("a",), ("a",), coordination="single", leader="a") as found:
        front = found["a"]
        front.has(card("x"))
        await until(lambda: front.plane.leading)
        yield front


def offer(number: int) -> RequestOffer:
    return RequestOffer(number, "m" * 32, prompt_tokens=10, max_tokens=10, remaining_ms=1e4)


class Broken:
    def takes(self, views: Sequence[Any]) -> bool:
        return True

    def assign(self, offers: Sequence[Any], views: Sequence[Any], now_s: float) -> list[Any]:
        raise ValueError("nobody has foreseen that")


async def test_an_error_in_the_queue_drops_its_offers_only(leader: Front) -> None:
    plane, desk = leader.plane, leader.plane.desk
    assert not desk.on_offer("a", offer(1)).place  # the queue does not yet know whether the engine has room
    desk.queue._policy = Broken()
    desk.on_engine_status("a", USE)
    assert (plane.channel.mishaps.failed, len(desk.queue)) == (1, 0)
    desk.on_engine_status("a", USE)
    assert desk.on_offer("a", offer(2)).place == "a:x"
    desk.queue._policy = Broken()
    with pytest.raises(PeerBusy):
        desk.on_offer("a", offer(3))
    desk.on_engine_status("a", msgspec.structs.replace(USE, running=2))
    desk.on_offer("a", offer(4))
    desk.queue._policy = Broken()
    desk.on_time()  # as at each beat
    assert (plane.channel.mishaps.failed, len(desk.queue)) == (3, 0)


async def test_a_moment_without_a_sure_lease_costs_no_offer_and_another_leader_all(leader: Front) -> None:
    plane, desk = leader.plane, leader.plane.desk
    epoch = plane.leading
    desk.on_offer("a", offer(1))
    for now in (0, epoch):
        desk._epoch = lambda now=now: now
        desk.on_time()
        assert len(desk.queue) == 1
    desk._epoch = lambda: 0
    with pytest.raises(PeerRefused):
        desk.on_offer("a", offer(2))
    plane.state.leader_tracker.follow_leader("b", epoch + 1)
    desk.on_time()
    assert not len(desk.queue)
    desk._epoch = lambda: epoch + 2
    desk.on_time()
    assert not len(desk.queue)
    assert not desk.on_offer("a", offer(3)).place
    desk._epoch = lambda: epoch + 4  # the same box again, without another leader in between
    desk.on_time()
    assert not len(desk.queue), "fronts have given up those of the epoch before"


async def test_an_error_in_one_task_ends_that_task_alone(leader: Front) -> None:
    async def wrong() -> None:
        raise ValueError("nobody has foreseen that")

    await leader.plane.spawn(wrong())
    cut_off = leader.plane.spawn(wrong())
    cut_off.cancel()
    await until(cut_off.done)
    assert leader.plane.channel.mishaps.failed == 1
    assert leader.task is not None
    assert not leader.task.done()


async def test_how_many_experts_there_are_a_leader_knows_by_its_own_engine(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(card("y", disk=bytes(1), ram=bytes(1)), layers=1, experts=2)
    async with fronts(tmp_path, ("a", "b"), ("a",), coordination="single", leader="a") as found:
        plane = found["a"].plane
        found["a"].has(card("x"))
        found["b"].has(wrong)
        found["b"].busy = Heartbeat(engine="y", slots=1, capacity=1)
        await until(lambda: plane.leading and plane.state.members.serving("m" * 32))
        plane.desk.on_time()
        assert plane.desk.queue.sizes == (LAYERS, EXPERTS)


TABLES = [ExpertSignature(30, np.tile(np.array(shares, "<u2"), (LAYERS, 1)).tobytes()) for shares in np.eye(6) * 65535]


async def test_an_engine_that_starts_again_keeps_its_cluster_while_others_are_being_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, held = list[ClusterQuestion](), asyncio.Event()

    async def fitted(_solver: PlanSolver, asked: ClusterQuestion) -> ClusterAnswer:
        fits.append(asked)
        if len(fits) > 1:
            await held.wait()
        return fit(asked)

    monkeypatch.setattr(PlanSolver, "fit", fitted)
    monkeypatch.setattr(expert_fitting, "REFIT_S", 0.0)
    async with fronts(tmp_path, ("a", "b"), ("a",), coordination="single", leader="a", route="eldr") as found:
        plane, desk = found["a"].plane, found["a"].plane.desk

        async def serves(boot: str) -> None:
            found["b"].has(card(boot))
            found["b"].busy = Heartbeat(engine=boot, slots=2, capacity=4)
            await until(lambda: f"b:{boot}" in plane.state.members.serving("m" * 32))
            desk.on_time()
            desk.on_engine_status("b", msgspec.structs.replace(USE, engine=boot))

        found["a"].has(card("x"))
        await until(lambda: plane.leading)
        desk.on_time()
        desk.on_engine_status("a", USE)
        await serves("y")
        ended = tuple(EndedRequest(table, table) for table in (TABLES[0], TABLES[5])) * 32
        assert desk.fitting is not None
        desk.fitting.add_ended(ended)
        await until(lambda: desk.fitting is not None and desk.fitting.fits == 1)
        desk.fitting.add_ended(ended)
        await until(lambda: len(fits) == 2)
        await serves("z")
        asked = [msgspec.structs.replace(offer(n), signature=TABLES[5 * n]) for n in range(2)]
        granted = [desk.on_offer("a", one) for one in asked]
        assert ({one.place for one in granted}, {one.why for one in granted}) == ({"a:x", "b:z"}, {"nearest"})
        held.set()


async def test_boxes_are_looked_at_when_they_change_and_not_at_each_message(
    leader: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, desk, looks = leader.plane.state.members, leader.plane.desk, list[str]()
    desk.on_time()
    serving = members.serving
    monkeypatch.setattr(members, "serving", lambda model: looks.append(model) or serving(model))
    for number in range(2):
        desk.on_engine_status("a", USE)
        assert desk.on_offer("a", offer(number)).place == "a:x"
    assert not looks
    leader.has(card("y"))
    desk.on_engine_status("a", msgspec.structs.replace(USE, engine="y"))
    assert desk.on_offer("a", offer(6)).place == "a:y"
    assert len(looks) == 1
