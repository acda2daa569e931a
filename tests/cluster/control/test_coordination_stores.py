"""One contract for the agreement: a real etcd of one and of three members, and the one in memory of other tests."""

from __future__ import annotations

import asyncio
import base64
import random
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from support.etcd_process import etcd_cluster
from support.fake_agreement import FakeAgreement, FakeStore, agreed_by
from support.waiting import WITHIN_S, until

from edgemoe.cluster.control import control_plane
from edgemoe.cluster.control.coordination.coord_store import (
    AgreementView,
    CoordState,
    CoordStore,
    PlanRef,
    SingleBoxStore,
)
from edgemoe.cluster.control.coordination.etcd import EtcdStore
from edgemoe.cluster.control.leadership import Election
from edgemoe.errors import CoordUnavailable, PlanConflict, StaleEpoch

NAMES = ["a", "b", "c"]


@pytest.fixture(params=["fake", "etcd-1", "etcd-3"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[CoordStore]]:
    """Three boxes' views of one agreement."""
    if request.param == "fake":
        agreement = FakeAgreement()
        with agreed_by(agreement):
            state = SimpleNamespace(voters=NAMES, incarnations=SimpleNamespace(is_copy=False))
            members = [control_plane.EtcdMember(SimpleNamespace(node=name), state) for name in NAMES]  # type: ignore
            tasks = [asyncio.create_task(member.run()) for member in members]
            await asyncio.sleep(0)
            async for started in running([FakeStore(member, 1.0) for member in members]):
                yield started
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return
    with etcd_cluster(tmp_path, int(request.param[-1])) as (clients, _):
        async for started in running([EtcdStore(clients[n:] + clients[:n], lease_s=2) for n in range(3)]):
            yield started


async def running(stores: list[CoordStore]) -> AsyncIterator[list[CoordStore]]:
    for store in stores:
        await store.start()
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def claim(store: CoordStore, node: str, within_s: float = WITHIN_S, above: int = 0) -> int:
    """Claims as soon as the engine lets it."""

    async def claimed() -> int:
        try:
            return await store.claim(node, above)
        except (CoordUnavailable, StaleEpoch):
            await store.changed(0.1)
            return 0

    return await until(claimed, within_s)


class TestContract:
    async def test_one_claim_wins_and_every_box_sees_the_same_leader_and_epoch(self, stores: list[CoordStore]) -> None:
        epoch = await claim(stores[0], "a")
        await until(lambda: stores[1].view().leader == "a")
        await until(lambda: stores[2].view().leader == "a")
        assert {s.view().epoch for s in stores} == {epoch}
        with pytest.raises(StaleEpoch, match="a leads already"):
            await stores[1].claim("b", 0)

    async def test_epochs_rise_and_a_deposed_leader_changes_nothing(self, stores: list[CoordStore]) -> None:
        first = await claim(stores[0], "a")
        await stores[0].commit_plan(first, PlanRef(1, "one"))
        await stores[0].resign(first)
        second = await claim(stores[1], "b")
        assert second > first
        with pytest.raises(StaleEpoch):
            await stores[0].commit_plan(first, PlanRef(2, "two"))
        with pytest.raises(StaleEpoch):
            await stores[0].renew(first)
        await stores[1].commit_plan(second, PlanRef(2, "other"))
        await until(lambda: stores[2].view().plan == PlanRef(2, "other"))

    async def test_a_plan_must_follow_the_present_one_and_repeating_it_is_harmless(
        self, stores: list[CoordStore]
    ) -> None:
        epoch = await claim(stores[0], "a")
        await stores[0].commit_plan(epoch, PlanRef(1, "one"))
        await stores[0].commit_plan(epoch, PlanRef(1, "one"))
        for wrong in (PlanRef(1, "else"), PlanRef(3, "three")):
            with pytest.raises(PlanConflict):
                await stores[0].commit_plan(epoch, wrong)
        assert stores[0].view().plan == PlanRef(1, "one")

    async def test_a_new_agreement_continues_above_all_seen_epochs(self, stores: list[CoordStore]) -> None:
        first = await claim(stores[0], "a", above=1000)
        assert first == 1001
        await stores[0].commit_plan(first, PlanRef(1, "one"))
        await stores[0].resign(first)
        assert await claim(stores[1], "b") == 1002

    async def test_a_lease_that_is_not_renewed_lapses_and_another_takes_over(self, stores: list[CoordStore]) -> None:
        first = await claim(stores[0], "a")
        await stores[0].renew(first)
        second = await claim(stores[2], "c", within_s=stores[0].lease_s * 3 + 5)
        assert second > first
        with pytest.raises(StaleEpoch):
            await stores[0].renew(first)

    async def test_an_election_settles_on_one_leader_and_hands_over_when_it_ends(
        self, stores: list[CoordStore]
    ) -> None:
        elections = [
            Election(store, name, time.monotonic, random.Random(name))
            for store, name in zip(stores, NAMES, strict=True)
        ]
        tasks = [asyncio.create_task(e.run()) for e in elections]
        try:
            first = await leader(elections, set(range(3)))
            old = elections[first].epoch()
            tasks[first].cancel()
            await asyncio.gather(tasks[first], return_exceptions=True)
            second = await leader(elections, set(range(3)) - {first})
            assert elections[second].epoch() > old
            assert elections[first].epoch() == 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def leader(elections: list[Election], among: set[int], within_s: float = WITHIN_S) -> int:
    """Waits for exactly one leader and returns its node; two at once fail the test."""

    def leading() -> list[int]:
        found = [n for n in among if elections[n].epoch()]
        assert len(found) <= 1
        return found

    return (await until(leading, within_s))[0]


async def test_a_single_box_always_leads_and_goes_on_from_the_epoch_that_it_kept() -> None:
    kept: list[int] = []
    store = SingleBoxStore(epoch=7, on_epoch=kept.append)
    epoch = await store.claim("me", 0)
    assert epoch == 8
    assert kept == [8]
    await store.commit_plan(epoch, PlanRef(1, "one"))
    assert store.view().plan == PlanRef(1, "one")
    with pytest.raises(StaleEpoch):
        await store.commit_plan(7, PlanRef(2, "two"))


def test_a_claim_that_does_not_know_of_the_last_renewal_fails() -> None:
    state = CoordState()
    assert state.claim("a", 1, 0, 0) == 1
    assert state.renew(1)
    assert state.claim("b", 2, 1, 0) == 0  # its view ends before the renewal
    assert (state.epoch, state.leader) == (1, "a")
    assert state.claim("b", 2, 1, 1) == 2
    assert state.claim("b", 2, 1, 1) == 2  # sent again
    assert not state.renew(1)


async def test_any_other_server_in_etcds_place_only_makes_it_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = EtcdStore(["http://127.0.0.1:1"], lease_s=2)

    def kept(name: str, value: str) -> httpx.Response:
        pair = {"key": store._key(name), "value": base64.b64encode(value.encode()).decode(), "mod_revision": "1"}
        return httpx.Response(200, json={"kvs": [pair], "header": {"revision": "1"}})

    answers: list[object] = [
        ssl.SSLError(1, "sslv3 alert bad certificate"),
        httpx.ReadTimeout("late"),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=["no object"]),
        httpx.Response(200, json={}),
        httpx.Response(200, json={"kvs": [{"key": "%", "mod_revision": "1"}], "header": {"revision": "1"}}),
        httpx.Response(200, json={"kvs": [{"key": "", "mod_revision": "x"}], "header": {"revision": "1"}}),
        httpx.Response(200, json={"kvs": [5], "header": {"revision": "1"}}),
        kept("epoch", "9" * 5000),
        kept("epoch", str((1 << 62) + 1)),
        kept("leader", "n" * 65),
        httpx.Response(400, text="CommonName of client sending a request against gateway will be ignored"),
    ]
    for answer in answers:

        async def post(*_: object, answer: object = answer, **__: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(store._client, "post", post)
        with pytest.raises(CoordUnavailable):
            await store.claim("a", 0)
        assert store.view() == AgreementView()
    await store.close()
