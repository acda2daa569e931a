"""Boxes that may lead, the epochs in which they do, and leases by the box's clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from support.boxes import secret
from support.etcd_process import etcd_cluster
from support.planes import ABC, Front, card, fronts, led, planned
from support.waiting import until

from edgemoe.cluster.control import leadership, plan_controller
from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.control_state import MessageReceived
from edgemoe.cluster.control.coordination import etcd
from edgemoe.cluster.control.coordination.coord_store import AgreementView, SingleBoxStore, since_boot
from edgemoe.cluster.control.coordination.election_rules import ElectionRules, voters_of
from edgemoe.cluster.control.coordination.epoch_fence import MAX_LEAP, EpochFence
from edgemoe.cluster.control.leadership import Election
from edgemoe.cluster.control.messages import Announce, Heartbeat
from edgemoe.cluster.control.plan_store import read_plan
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import CoordUnavailable, EpochLeap, PeerRefused, ServiceError
from edgemoe.front import cluster_status as about
from edgemoe.types.placement import PlacementPlan, pack_bits


def peers(*nodes: str) -> dict[str, Peer]:
    return {node: Peer(node, "127.0.0.1:1", "k" * 40) for node in nodes}


def test_five_vote_at_most_the_first_of_the_list() -> None:
    assert voters_of(peers(*"gfedcba")) == ["c", "d", "e", "f", "g"]
    assert voters_of({**peers("z"), "y": Peer("y", "", "", voter=False), **peers(*"abcd")}) == ["a", "b", "c", "d", "z"]


def test_boxes_agree_only_where_mode_voters_and_leader_are_the_same() -> None:
    three = ElectionRules(ClusterSettings(node="a", coordination="raft"), voters_of(peers(*ABC)))
    same = ElectionRules(ClusterSettings(node="d", coordination="raft"), voters_of(peers("c", "b", "a")))
    assert three.words == same.words == "raft: a b c"
    assert three.may_lead("b", same.words)
    assert not three.may_lead("d", same.words)
    others = [
        ElectionRules(ClusterSettings(node="d", coordination="raft"), voters_of(peers(*"abcde"))),
        ElectionRules(ClusterSettings(node="d", coordination="single"), voters_of(peers(*ABC))),
        ElectionRules(ClusterSettings(node="d", coordination="single", leader="a"), voters_of(peers(*ABC))),
        ElectionRules(ClusterSettings(node="d", coordination="etcd", etcd="http://e"), voters_of(peers(*ABC))),
    ]
    for other in others:
        assert not three.may_lead("a", other.words)
        assert "elects its leader by" in three.reject_reason("d", other.words)
        assert "elects its leader by" in other.reject_reason("a", three.words)
    long = peers(*(f"{n}{'x' * 62}" for n in range(9)))
    assert (
        len(ElectionRules(ClusterSettings(node="a", coordination="raft"), voters_of(long)).words) <= 400
    )  # as Announce has it


def test_a_joining_box_adopts_the_agreement_of_the_box_that_it_joins() -> None:
    joining = ElectionRules(ClusterSettings(node="d", join="a,127.0.0.1:1,k"), voters_of(peers("a")))
    assert joining.words == "" == joining.reject_reason("a", "raft: a b c")
    assert not joining.may_lead("b", "raft: a b c")
    joining.adopt("raft: a b c")
    assert joining.words == ""
    assert joining.may_lead("b", "raft: a b c")
    assert not joining.may_lead("b", "single: b")
    assert not joining.may_lead("e", "")


async def test_a_box_with_another_coordination_leads_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """d, without a vote, was given a copy of a single box's settings."""
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.2)
    async with fronts(tmp_path, "abcd") as found:
        four = list(found.values())
        first = await led(four)
        epoch = found["a"].plane.state.fence.highest
        d = found["d"]
        await d.die()
        d.settings = msgspec.structs.replace(d.settings, coordination="single", leader="d")
        await d.start()
        obeyed: set[str] = set()
        for node in ABC:
            found[node].hears = lambda _n, _b, plane=found[node].plane: obeyed.add(plane.leader)
        await until(lambda: all(found[n].plane.state.members["d"].beat.leading > 0 for n in ABC))
        await until(lambda: "'raft: a b c'" in d.plane.state.members["a"].refusal)
        await until(lambda: all("'single: d'" in found[n].plane.state.members["d"].refusal for n in ABC))
        heard = found["a"].plane.state.members["d"].heard_s
        await until(lambda: found["a"].plane.state.members["d"].heard_s > heard + 1)
        assert obeyed <= {first, ""}
        assert {found[node].plane.state.fence.highest for node in ABC} == {epoch}
        described = about.describe(found["a"].plane, {}, None)["members"]
        assert next(box for box in described if box["node"] == "d")["state"] == "refused"
        await d.die()
        members = found["a"].plane.state.members
        await until(lambda: about.state_of(members, members["d"]) == "gone")


async def test_a_box_without_a_vote_that_says_it_leads_is_not_obeyed(tmp_path: Path) -> None:
    async with fronts(tmp_path, "abcd") as found:
        first = await led(list(found.values()))
        a, epoch = found["a"].plane, found["a"].plane.state.fence.highest
        await until(lambda: a.state.members["d"].announcement is not None)
        found["d"].plane.send_beat = lambda: None  # type: ignore[method-assign]
        found["d"].plane.channel.notify_peer("a", Heartbeat(leading=epoch + 3))
        await until(lambda: a.state.leader_tracker.unentitled_beats == 1)
        assert (a.leader, a.state.fence.highest) == (first, epoch)


async def test_no_box_is_obeyed_before_it_has_stated_its_agreement(tmp_path: Path) -> None:
    async with fronts(tmp_path) as found:
        await led(list(found.values()))
        a, member = found["a"].plane, found["a"].plane.state.members["b"]
        card, member.announcement = member.announcement, None
        a.state.handle(MessageReceived("b", member.boot, Heartbeat(leading=a.state.fence.highest + 1)))
        assert a.leader != "b"
        member.announcement, member.boot = card, "another"  # as which it may go by something else
        a.state.handle(MessageReceived("b", member.boot, Heartbeat(leading=a.state.fence.highest + 1)))
        assert a.leader != "b"


# --- epochs ---------------------------------------------------------------------------------------------------


def test_an_epoch_far_above_all_known_ones_is_not_taken_over(tmp_path: Path) -> None:
    fence = EpochFence(tmp_path / "epoch")
    fence.admit(MAX_LEAP)
    for epoch in (2 * MAX_LEAP + 1, 1 << 62):
        with pytest.raises(EpochLeap, match="damaged epoch file"):
            fence.admit(epoch)
    fence.admit(2 * MAX_LEAP)
    assert EpochFence(tmp_path / "epoch").highest == 2 * MAX_LEAP
    (tmp_path / "epoch").write_text("9" * 5000)
    with pytest.raises(ServiceError, match="far above"):
        EpochFence(tmp_path / "epoch")


async def test_a_box_whose_epoch_leaps_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    async with fronts(tmp_path) as found:
        first = await led(list(found.values()))
        other, bad = (node for node in ABC if node != first)
        plane, epoch = found[other].plane, found[other].plane.state.fence.highest
        found[bad].plane.state.fence._highest = 1 << 61
        await until(lambda: "is more than" in plane.state.members[bad].refusal)
        await until(lambda: "is more than" in found[first].plane.state.members[bad].refusal)
        assert (plane.state.fence.highest, plane.leader) == (epoch, first)


async def test_an_epoch_in_etcd_that_leaps_or_is_none_is_claimed_by_nobody(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "etcd", 1) as (urls, _):
        put = {"key": etcd._encode("/edgemoe/epoch"), "value": etcd._encode(str(1 << 61))}
        httpx.post(f"{urls[0]}/v3/kv/put", json=put).raise_for_status()
        async with fronts(tmp_path, ("a", "b"), coordination="etcd", etcd=urls[0], lease_s=2) as found:
            a, b = found["a"].plane, found["b"].plane
            await until(lambda: "is more than" in a.blocker and "is more than" in b.blocker)
            assert (a.leading, b.leading, a.state.fence.highest) == (0, 0, 0)
            httpx.post(f"{urls[0]}/v3/kv/put", json=put | {"value": etcd._encode("seven")}).raise_for_status()
            httpx.post(f"{urls[0]}/v3/kv/put", json=put | {"value": etcd._encode("7")}).raise_for_status()
            await until(
                lambda: {a.leader, b.leader} in ({"a"}, {"b"}) and a.state.fence.highest == b.state.fence.highest == 8,
                20,
            )


async def test_a_leader_below_an_epoch_that_it_has_seen_gives_back_and_does_not_lead_meanwhile(tmp_path: Path) -> None:
    async with fronts(tmp_path) as found:
        first = found[await led(list(found.values()))].plane
        epoch = first.state.fence.highest + 5
        first.state.fence.admit(epoch)
        assert first.leading == 0
        await until(lambda: any(f.plane.leading > epoch for f in found.values()))


async def test_nobody_leads_whose_disk_does_not_remember_the_epoch(tmp_path: Path) -> None:
    tried: list[int] = []

    def full(epoch: int) -> None:
        tried.append(epoch)
        raise CoordUnavailable("No space left on device")

    async with fronts(tmp_path, ("a",), coordination="single", leader="a") as found:
        a = found["a"].plane
        await until(lambda: a.leading > 0)
        await found["a"].die()
        await found["a"].start()
        a = found["a"].plane
        a.state.fence.admit = full  # type: ignore[method-assign]
        await until(lambda: len(tried) > 2)
        assert a.leading == 0
        del a.state.fence.admit  # type: ignore[attr-defined]
        await until(lambda: a.leading > 0)


async def test_a_plan_is_taken_from_no_leader_that_is_deposed(tmp_path: Path) -> None:
    async with fronts(tmp_path, ("a",), coordination="single") as found:
        a = found["a"].plane
        await until(lambda: a.leading > 0)
        bits = (pack_bits(np.ones((1, 8), np.bool_)),)
        epoch = a.state.fence.highest
        plan = PlacementPlan(epoch, 1, "m", 1, 8, ("a",), bits)
        a.state.fence.admit(epoch + 1)
        with pytest.raises(PeerRefused, match="the highest seen is"):
            a.exchange.adopt(plan, epoch)
        with pytest.raises(PeerRefused, match="the highest seen is"):
            a.exchange.adopt(msgspec.structs.replace(plan, epoch=epoch + 2), epoch + 1)
        assert a.state.plans.plan is None
        a.exchange.adopt(plan, epoch + 1)


def test_a_plan_of_another_digest_than_agreed_is_refused() -> None:
    plan = PlacementPlan(1, 1, "m", 1, 8, ("a",), (pack_bits(np.ones((1, 8), np.bool_)),))
    data = msgspec.msgpack.encode(plan)
    assert read_plan(data, plan.digest()) == plan
    with pytest.raises(PeerRefused, match="instead of 0000"):
        read_plan(data, "0" * 64)


# --- clocks ---------------------------------------------------------------------------------------------------


class Slow(SingleBoxStore):
    """Answers `delay_s` after it was asked, by a clock that only it moves."""

    def __init__(self) -> None:
        super().__init__(epoch=0)
        self.now, self.delay_s, self.shown = 100.0, 2.0, AgreementView()

    def view(self) -> AgreementView:
        return self.shown

    async def claim(self, node: str, above: int) -> int:
        self.now += self.delay_s
        return await super().claim(node, above)

    async def renew(self, epoch: int) -> None:
        self.now += self.delay_s
        await super().renew(epoch)


async def step(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs one turn of an election, without its pauses."""

    async def no_time(_: float) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(leadership.asyncio, "sleep", no_time)
        await work()  # type: ignore[misc]


async def test_a_lease_counts_from_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slow()
    one = Election(store, "me", lambda: store.now, random.Random(1))
    asked = store.now
    await step(one._await_vacancy, monkeypatch)
    for _ in range(3):
        assert one.epoch() == 1
        store.now = asked + 0.9 * store.lease_s
        assert one.epoch() == 0
        store.now = asked + 0.89 * store.lease_s
        assert one.epoch() == 1
        asked = store.now
        await step(one._lead, monkeypatch)


async def test_nobody_claims_while_hindered(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slow()
    store._event.set()
    one = Election(store, "me", lambda: store.now, random.Random(1), is_hindered=lambda: True)
    await step(one._await_vacancy, monkeypatch)
    assert one.epoch() == 0


async def test_the_clock_of_leases_goes_on_while_the_box_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(time, "clock_gettime", lambda which: asked.append(which) or 5.0)
    settings = ClusterSettings(node="a", state_dir=str(tmp_path))
    plane = ControlPlane(settings, "boot", secret(), peers("a"), Announce(release="1", role="box", address=""))
    plane.channel.close()
    plane._transport.close()
    assert plane.state.clock() == since_boot() == 5.0
    assert set(asked) == {time.CLOCK_BOOTTIME}


async def test_a_leader_that_wakes_after_a_minute_does_not_lead_and_takes_nobody_for_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.2)
    async with fronts(tmp_path) as found:
        for node, front in found.items():
            front.has(card(f"engine-{node}"))
        await planned(list(found.values()), ABC)
        first: Front = found[await led(list(found.values()))]
        assert first.plane.leading
        epoch = first.plane.state.fence.highest
        first.ahead_s += 60
        assert first.plane.leading == 0
        assert not any(first.plane.state.members.is_alive(node) for node in ABC if node != first.node)
        await led(list(found.values()))
        await until(lambda: all(f.plane.state.fence.highest > epoch for f in found.values()))
        assert {front.plan_nodes for front in found.values()} == {ABC}
