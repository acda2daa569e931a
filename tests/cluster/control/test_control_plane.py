"""Fronts that find each other, elect one that plans, and obey it; and the many ways in which one may fail."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from support.boxes import Box, running, secret
from support.etcd_process import Certificates, etcd_cluster
from support.planes import ALL, EXPERTS, LAYERS, NONE, Front, card, fronts, led, planned
from support.ports import free_ports
from support.waiting import until

from edgemoe.cluster.control import announcer, plan_controller
from edgemoe.cluster.control.control_state import MessageReceived
from edgemoe.cluster.control.coordination import etcd
from edgemoe.cluster.control.coordination.coord_store import PlanRef, SingleBoxStore
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.store_factory import make_store
from edgemoe.cluster.control.messages import Announce, BoxReport, Heartbeat, PlanRequest
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.control.planning import solver
from edgemoe.cluster.control.planning.targets import PlacementTarget, PlacementTask
from edgemoe.cluster.rpc.envelope import FRAMING, MAGIC, seal
from edgemoe.cluster.rpc.keys import Peer, generate
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError, CoordUnavailable, PeerError, PeerRefused
from edgemoe.front import cluster_status as about
from edgemoe.types.placement import PlacementPlan, digest_of, pack_bits

ABC = ("a", "b", "c")
ABSENT_S = 1000.0  # longer than any test: `time_passes_without` moves the time back


@pytest_asyncio.fixture
async def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, Front]]:
    """Three fronts with engines, that have a leader and a plan."""
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.2)
    async with fronts(tmp_path, absent_s=ABSENT_S) as found:
        for node, front in found.items():
            front.has(card(f"engine-{node}"))
        await planned(list(found.values()), ABC)
        await until(lambda: not any(front.plane.state.unacknowledged() for front in found.values()))
        yield found


async def time_passes_without(gone: str, fronts: list[Front]) -> None:
    """Moves back the time at which that box disappeared."""
    await until(lambda: not any(front.plane.state.members[gone].is_present for front in fronts))
    for front in fronts:
        front.plane.state.members[gone].absent_since_s -= ABSENT_S


async def test_all_go_by_one_plan_that_has_every_expert(three: dict[str, Front]) -> None:
    plan = three["a"].plane.state.plans.plan
    assert plan is not None
    assert sum(int(plan.homes_of(node).sum()) for node in ABC) == LAYERS * EXPERTS
    assert {f.plane.state.fence.highest for f in three.values()} == {plan.epoch}
    assert {engine.node for engine in three["a"].plane.state.members.engines()} == {"b", "c"}


async def test_another_leads_when_the_leader_dies_and_the_plan_stays_until_it_has_been_gone_for_long(
    three: dict[str, Front],
) -> None:
    first = await led(list(three.values()))
    epoch, ref = three[first].plane.state.fence.highest, three[first].plane.state.plans.ref
    rest = [front for node, front in three.items() if node != first]
    await three[first].die()
    await until(lambda: all(front.plane.leader not in ("", first) for front in rest))
    assert all(front.plane.state.fence.highest > epoch for front in rest)
    assert all(front.plane.state.plans.ref == ref for front in rest)
    await time_passes_without(first, rest)
    await planned(rest, [node for node in ABC if node != first])


async def test_a_box_that_comes_back_obeys_the_new_leader_and_keeps_its_plan_meanwhile(
    three: dict[str, Front],
) -> None:
    first = await led(list(three.values()))
    epoch = three[first].plane.state.fence.highest
    await three[first].die()
    rest = [front for node, front in three.items() if node != first]
    await until(lambda: all(front.plane.leader not in ("", first) for front in rest))
    await three[first].start()
    assert three[first].plan_nodes == ABC  # from its disk, before it has heard anybody
    assert three[first].plane.state.fence.highest == epoch
    await until(lambda: three[first].plane.leader == rest[0].plane.leader)
    assert three[first].plane.state.fence.highest == rest[0].plane.state.fence.highest > epoch


async def test_a_deposed_leader_is_not_obeyed(three: dict[str, Front]) -> None:
    leader = await led(list(three.values()))
    plane, other = three[leader].plane, next(n for n in ABC if n != leader)
    target = three[next(n for n in ABC if n not in (leader, other))].plane
    target.state.fence.admit(plane.state.fence.highest + 5)
    stale, ref = target.state.leader_tracker.stale, target.state.plans.ref
    three[other].plane.channel.notify_peer(
        target.state.node, Heartbeat(leading=plane.state.fence.highest, plan_version=9, plan_digest="0" * 64)
    )
    await until(lambda: target.state.leader_tracker.stale > stale)
    await until(lambda: target.leader == "")
    assert target.state.plans.ref == ref


async def test_a_box_that_leaves_is_planned_without_at_once(three: dict[str, Front]) -> None:
    leader = await led(list(three.values()))
    gone = next(node for node in ABC if node != leader)
    rest = [front for node, front in three.items() if node != gone]
    await three[gone].plane.leave()
    await planned(rest, [node for node in ABC if node != gone])
    await three[gone].die()


async def test_an_ended_engine_s_experts_are_withdrawn_and_its_box_stays(three: dict[str, Front]) -> None:
    three["b"].has(None)
    await until(lambda: {e.node for e in three["a"].plane.state.members.engines()} == {"c"})
    assert three["a"].plane.state.members.is_alive("b")
    assert three["a"].plan_nodes == ABC
    three["b"].has(card("another"))
    await until(lambda: {e.boot for e in three["a"].plane.state.members.engines()} == {"another", "engine-c"})


async def test_the_engine_of_a_box_that_dies_is_called_no_more_and_its_key_stays_good(three: dict[str, Front]) -> None:
    members = three["a"].plane.state.members
    await three["c"].die()
    await until(lambda: not members.is_alive("c"))
    assert {engine.node: engine.heard for engine in members.engines()} == {"b": True, "c": False}
    assert members.keys().keys() == {"b", "c"}


async def test_an_engine_without_a_name_is_left_out_of_the_peer_list(three: dict[str, Front]) -> None:
    members = three["a"].plane.state.members
    three["c"].has(card(""))
    await until(
        lambda: (said := members["c"].announcement) is not None and said.engine is not None and not said.engine.boot
    )
    assert {engine.node for engine in members.engines()} == {"b"}


async def test_another_model_is_refused_with_a_message_on_both_sides(three: dict[str, Front]) -> None:
    three["c"].has(card("engine-c", model="x" * 32))
    a, c = three["a"].plane, three["c"].plane
    await until(lambda: "serve the same packed store" in a.state.members["c"].refusal)
    await until(lambda: "serve the same packed store" in c.state.members["a"].refusal)
    assert {engine.node for engine in a.state.members.engines()} == {"b"}


async def test_another_version_of_the_protocol_is_shown_as_refused_until_it_speaks_ours(
    three: dict[str, Front],
) -> None:
    a, b = three["a"].plane, three["b"].plane
    head = bytearray(seal(Heartbeat())[0])
    head[len(MAGIC)] = FRAMING + 1
    a.channel._links["b"].socket.send_multipart([bytes(head)])
    await until(lambda: f"framing {FRAMING + 1}" in b.state.members["a"].refusal)
    assert about.state_of(b.state.members, b.state.members["a"]) == "refused"
    three["a"].has(card("engine-a", room=5))
    await until(lambda: not b.state.members["a"].refusal)


async def test_no_request_goes_to_another_model_even_while_our_own_engine_is_down(three: dict[str, Front]) -> None:
    for node, front in three.items():
        front.busy = Heartbeat(engine=f"engine-{node}", slots=1, capacity=1)
    a = three["a"].plane
    await until(lambda: a.state.members.serving(a.state.model) == {"b:engine-b": "b", "c:engine-c": "c"})
    three["c"].has(card("engine-c", model="x" * 32))
    await until(lambda: bool(a.state.members["c"].refusal))
    three["a"].has(None)
    three["c"].has(card("engine-c", room=5, model="x" * 32))
    await until(
        lambda: (
            (c := a.state.members["c"].announcement) is not None
            and c.engine is not None
            and c.engine.budget_experts == 5
        )
    )
    assert a.state.members["c"].refusal
    assert a.state.members.serving(a.state.model) == {"b:engine-b": "b"}
    three["b"].busy = Heartbeat(engine="restarted", slots=1, capacity=1)
    await until(lambda: a.state.members["b"].beat.engine == "restarted")
    assert not a.state.members.serving(a.state.model)  # until it has announced that engine's model


async def test_an_address_that_cannot_be_one_is_not_taken_from_the_box_itself(three: dict[str, Front]) -> None:
    a = three["a"].plane
    d = Peer("d", "", secret().public.decode(), voter=False)
    a.set_peers({**three["a"].peers, "d": d})
    member = a.state.members["d"]
    with pytest.raises(ConfigError, match="HOST:PORT"):
        a.state.handle(MessageReceived("d", "boot", Announce(release="1", role="box", address="no host:1")))
    assert member.announcement is None


async def test_a_plan_that_does_not_fit_is_not_handed_out(three: dict[str, Front]) -> None:
    with pytest.raises(PeerRefused, match="is not held here"):
        await three["a"].plane.channel.ask("b", PlanRequest("0" * 64), timeout_s=2)


async def test_experts_of_the_dead_boxs_disk_alone_are_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.2)
    thirds = {node: np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) % 3 == n for n, node in enumerate(ABC)}
    async with fronts(tmp_path, absent_s=1.0, replicas=2) as found:
        for node, front in found.items():
            front.has(card(f"engine-{node}", 12, disk=pack_bits(thirds[node])))
        await planned(list(found.values()), ABC)
        for node, front in found.items():
            ram = pack_bits(front.plane.state.plans.plan.homes_of(node))  # type: ignore[union-attr]
            front.has(card(f"engine-{node}", 12, disk=pack_bits(thirds[node]), ram=ram))
        rest = [found["a"], found["b"]]
        await until(lambda: all(any(f.plane.state.members["c"].announcement.engine.ram) for f in rest))  # type: ignore[union-attr]
        await found["c"].die()
        await planned(rest, ("a", "b"))
        plan = rest[0].plane.state.plans.plan
        assert plan is not None
        assert plan.homes_of("a").all()
        assert plan.homes_of("b").all()


async def test_too_little_memory_is_said_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.1)
    async with fronts(tmp_path, ("a", "b"), coordination="single", leader="a") as found:
        found["a"].has(card("engine-a", room=3, disk=NONE, ram=ALL))
        found["b"].has(card("engine-b", room=3, disk=NONE, ram=ALL))
        await until(lambda: "600 bytes missing" in found["a"].plane.blocker)
        await until(lambda: found["b"].plane.leader == "a")
        found["b"].has(card("engine-b", room=9, disk=NONE, ram=ALL))
        await planned(list(found.values()), ("a", "b"))
        assert not found["a"].plane.blocker


async def test_a_plan_whose_commit_nobody_answered_is_gone_by_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.1)
    real, versions = SingleBoxStore.commit_plan, list[int]()

    async def unheard(store: SingleBoxStore, epoch: int, plan: PlanRef) -> None:
        await real(store, epoch, plan)
        versions.append(plan.version)
        raise CoordUnavailable("no answer in time")

    monkeypatch.setattr(SingleBoxStore, "commit_plan", unheard)
    async with fronts(tmp_path, ("a", "b"), coordination="single", leader="a") as found:
        for node in "ab":
            found[node].has(card(f"engine-{node}", room=9, disk=NONE, ram=ALL))
        await planned(list(found.values()), ("a", "b"))
    assert versions == [1]


async def test_a_plan_that_cannot_be_worked_out_is_said_and_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.1)

    def broken(task: PlacementTask) -> PlacementTarget:
        raise ZeroDivisionError("of a box's message")

    with monkeypatch.context() as patch:
        patch.setattr(solver, "make_target", broken)
        async with fronts(tmp_path, ("a", "b"), coordination="single", leader="a") as found:
            for node in "ab":
                found[node].has(card(f"engine-{node}", room=9, disk=NONE, ram=ALL))
            await until(lambda: "of a box's message" in found["a"].plane.blocker)
            await until(lambda: found["b"].plane.leader == "a")
            patch.undo()
            await planned(list(found.values()), ("a", "b"))
            assert not found["a"].plane.blocker


async def test_an_unreadable_report_does_not_end_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.1)
    asked = list[str]()

    def broken(*_: Any) -> None:
        asked.append("again")
        raise KeyError("a box's message")

    async with fronts(tmp_path, ("a", "b"), coordination="single", leader="a") as found:
        with monkeypatch.context() as patch:
            patch.setattr(plan_controller.PlanController, "handle", broken)
            for node in "ab":
                found[node].has(card(f"engine-{node}", room=9, disk=NONE, ram=ALL))
            await until(lambda: len(asked) > 3)
        await planned(list(found.values()), ("a", "b"))
    assert caplog.text.count("the plan could not be updated") == 1


async def test_a_fixed_leader_that_restarts_leads_in_a_later_epoch(tmp_path: Path) -> None:
    async with fronts(tmp_path, ("a", "b"), coordination="single", leader="a") as found:
        await until(lambda: found["b"].plane.leader == "a")
        epoch = found["b"].plane.state.fence.highest
        await found["a"].die()
        await until(lambda: found["b"].plane.leader == "")
        await found["a"].start()
        await until(lambda: found["b"].plane.leader == "a")
        assert found["b"].plane.state.fence.highest == epoch + 1


async def test_a_fixed_leader_that_lost_its_state_leads_above_the_others_epochs(tmp_path: Path) -> None:
    async with fronts(tmp_path, ("a", "b"), coordination="single", leader="a") as found:
        await led(list(found.values()))
        found["b"].plane.state.fence.admit(found["b"].plane.state.fence.highest + 40)
        seen = found["b"].plane.state.fence.highest
        await found["a"].die()
        shutil.rmtree(tmp_path / "a")
        await found["a"].start()
        await until(lambda: found["b"].plane.leader == "a" and found["b"].plane.state.fence.highest > seen)
        assert found["a"].plane.leading == found["b"].plane.state.fence.highest == seen + 1


async def test_a_plan_older_than_the_held_one_is_ignored(three: dict[str, Front]) -> None:
    a = three["a"].plane
    plan = a.state.plans.plan
    assert plan is not None
    newer = msgspec.structs.replace(plan, version=plan.version + 1)
    a.state.plans.adopt(newer)
    with pytest.raises(PeerRefused, match="older than the one held"):
        a.exchange.adopt(plan, a.state.fence.highest)
    assert a.state.plans.plan == newer


async def test_a_plan_of_a_later_release_is_kept_and_handed_on_as_it_came(three: dict[str, Front]) -> None:
    """Keeps fields that this release does not read, so that all boxes compute one digest, even after a restart."""
    first = await led(list(three.values()))
    await planned(list(three.values()), ABC)
    a, b = (front for node, front in three.items() if node != first)
    plan = a.plane.state.plans.plan
    assert plan is not None
    later = msgspec.msgpack.encode(msgspec.to_builtins(plan, builtin_types=(bytes,)) | {"mood": "calm"})
    digest = digest_of(later)
    assert digest != plan.digest()
    a.plane.state.plans.adopt(plan, later)
    assert await b.plane.exchange.fetch(a.node, digest) == (plan, later)
    again = PlanStore(Path(a.settings.state_dir) / "plan")
    assert again.ref is not None
    assert (again.plan, again.ref.digest, again.bytes_of(digest)) == (plan, digest, later)


async def test_a_new_leader_that_was_behind_does_not_have_all_go_back_to_its_plan(three: dict[str, Front]) -> None:
    first = await led(list(three.values()))
    agreed = three[first].plane.state.plans.plan
    assert agreed is not None
    behind = msgspec.structs.replace(agreed, nodes=tuple(reversed(ABC)))
    named: set[str] = set()
    rest = [front for node, front in three.items() if node != first]
    for front in rest:
        front.plane.exchange.fetch = nothing  # type: ignore[method-assign]
        front.plane.state.plans.adopt(behind)
        front.hears = lambda node, beat: named.add(beat.plan_digest) if beat.leading and node != first else None
    await three[first].die()
    await until(lambda: all(front.plane.leader not in ("", first) for front in rest))
    await time_passes_without(first, rest)
    await until(lambda: any(named - {""}))
    assert behind.digest() not in named


async def nothing(node: str, digest: str) -> tuple[PlacementPlan, bytes]:
    raise PeerRefused(f"{node} does not answer")


async def test_a_wrong_key_gets_nothing_through(three: dict[str, Front]) -> None:
    """Not even under a listed name, while its owner speaks."""
    a = three["a"]
    box = Box("b", secret(), {"a": a.key})
    refused = a.plane._transport.authenticator.refused
    async with running(box):
        box.channel.connect(a.peers["a"])
        await until(lambda: a.plane._transport.authenticator.refused > refused)
        assert not box.channel.is_up("a")
    assert a.plane.state.members["b"].boot == "boot-b-1"


async def test_a_box_that_joins_is_let_in_by_all_for_as_long_as_one_lists_it(
    three: dict[str, Front], tmp_path: Path
) -> None:
    a, key = three["a"], generate(tmp_path / "d.key")
    seed, (port,) = a.peers["a"], free_ports(1)
    joining = Peer("d", f"127.0.0.1:{port}", key.public.decode())
    d = Front(tmp_path, joining, key, {"a": seed}, join=f"a,{seed.address},{seed.key}")
    await d.start()
    try:
        d.has(card("engine-d"))
        a.plane.set_peers({**a.peers, "d": Peer("d", "", joining.key, voter=False)})
        await planned([*three.values(), d], [*ABC, "d"])
        await until(lambda: {engine.node for engine in d.plane.state.members.engines()} == set(ABC))
        a.plane.set_peers(a.peers)
        await until(lambda: all("d" not in front.plane.state.members for front in three.values()))
        assert not any(front.plane._transport.allowed.name_of(joining.key.encode()) for front in three.values())
        await planned(list(three.values()), ABC)
    finally:
        await d.die()


async def test_the_word_of_a_box_that_is_gone_lets_others_in_until_that_box_is_struck(
    three: dict[str, Front], tmp_path: Path
) -> None:
    a, b, key = three["a"], three["b"], generate(tmp_path / "d.key")
    d = Peer("d", "127.0.0.1:9", key.public.decode(), voter=False)
    a.plane.set_peers({**a.peers, "d": d})
    await until(lambda: "d" in b.plane.state.members)
    await a.die()
    await b.die()
    await b.start()
    assert "d" in b.plane.state.members
    assert not b.plane.state.members.is_alive("a")
    b.plane.set_peers({node: peer for node, peer in b.peers.items() if node != "a"})
    assert "d" not in b.plane.state.members
    assert b.plane._transport.allowed.name_of(d.key.encode()) is None


async def test_a_box_changes_its_key_while_both_are_listed_and_nobody_else_is_cut_off(
    three: dict[str, Front], tmp_path: Path
) -> None:
    """Listed beside the old one, taken up by its box, then listed alone: no other connection breaks, all go on."""
    a, b, c = three.values()
    old, new = c.key, generate(tmp_path / "new.key")
    both = {**a.peers, "c": msgspec.structs.replace(a.peers["c"], new_key=new.public.decode())}
    alone = {**a.peers, "c": msgspec.structs.replace(a.peers["c"], key=new.public.decode())}
    await until(lambda: all(member.up for front in three.values() for member in front.plane.state.members))
    for front in three.values():
        front.plane.set_peers(both)
    assert all(member.up for front in three.values() for member in front.plane.state.members)
    assert a.plane.state.members.keys()["c"] == (old.public.decode(), new.public.decode())
    await c.die()
    c.key, c.peers = new, both
    await until(lambda: not a.plane.state.members["c"].up and not b.plane.state.members["c"].up)
    await c.start()
    await planned(list(three.values()), ABC)
    await until(lambda: all(member.up for front in three.values() for member in front.plane.state.members))
    for front in three.values():
        front.plane.set_peers(alone)
    assert all(member.up for front in three.values() for member in front.plane.state.members)
    assert a.plane._transport.allowed.name_of(old.public) is None
    assert a.plane._transport.allowed.name_of(new.public) == "c"


async def test_a_box_removed_from_the_list_is_cut_off_even_if_others_list_it(three: dict[str, Front]) -> None:
    a = three["a"]
    a.plane.set_peers({node: peer for node, peer in a.peers.items() if node != "b"})
    assert "b" not in a.plane.state.members
    with pytest.raises(PeerError):
        await three["b"].plane.channel.ask("a", PlanRequest(""), timeout_s=1)
    assert three["c"].plane.state.members.is_alive("b")


async def test_two_boxes_need_a_leader(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need a leader"):
        async with fronts(tmp_path, ("a", "b"), coordination="single"):
            pass


async def test_boxes_without_enough_voters_run_and_say_why_nobody_leads(tmp_path: Path) -> None:
    async with fronts(tmp_path, ("a", "b")) as found:
        a, b = (front.plane for front in found.values())
        await until(lambda: "b" in {member.peer.node for member in a.state.members.alive()})
        assert (a.leader, b.leader) == ("", "")
        assert "3 voters or more" in about.describe(a, {}, None)["trouble"]


async def test_a_list_that_changes_changes_no_voter_at_the_next_start(three: dict[str, Front]) -> None:
    """A dead voter is struck from it, or a newcomer is not marked: the voters that agreed go on."""
    boxes = list(three.values())
    await led(boxes)
    await three["c"].die()
    two = {node: peer for node, peer in boxes[0].peers.items() if node != "c"}
    newcomer = Peer("d", "127.0.0.1:9", generate(Path(three["a"].settings.state_dir) / "d.key").public.decode())
    for changed in (two, two | {"d": newcomer}):
        for node in "ab":
            await until(lambda node=node: Path(three[node].settings.state_dir, "voters").exists())
            await three[node].die()
            three[node].peers = changed
            await three[node].start()
        await led(boxes[:2], 30.0)
        assert "the agreement's voters are a, b, c" in three["a"].plane.blocker
    three["a"].plane.set_peers(three["c"].peers)
    assert "voters" not in three["a"].plane.blocker


async def test_two_boxes_agree_by_an_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whose addresses the first does not answer."""
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.1)
    with etcd_cluster(tmp_path / "etcd", 1) as (urls, _):
        addresses = ",".join(["http://127.0.0.1:1", *urls])
        async with fronts(tmp_path, ("a", "b"), coordination="etcd", etcd=addresses, lease_s=2) as found:
            for node, front in found.items():
                front.has(card(f"engine-{node}"))
            await planned(list(found.values()), ("a", "b"))
            first = await led(list(found.values()))
            epoch, other = found[first].plane.state.fence.highest, found["b" if first == "a" else "a"]
            await found[first].die()
            await until(lambda: other.plane.leader == other.node)
            assert other.plane.state.fence.highest > epoch
            assert other.plan_nodes == ("a", "b")


async def test_boxes_agree_by_an_etcd_with_certificates_and_a_password_and_nobody_does_without(tmp_path: Path) -> None:
    tls, password = Certificates(tmp_path / "certificates"), tmp_path / "password"
    password.write_text("a good one\n")
    with etcd_cluster(tmp_path / "etcd", 1, tls) as (urls, _):

        def call(path: str, **body: object) -> None:
            httpx.post(f"{urls[0]}/v3/auth/{path}", json=body, verify=tls.context()).raise_for_status()

        call("user/add", name="root", password="of root")
        call("user/add", name="boxes", password="a good one")
        call("role/add", name="root")
        call("user/grant", user="root", role="root")
        call("role/add", name="boxes")
        whole = {"key": etcd._encode("/mine/"), "range_end": etcd._encode("/mine0"), "permType": "READWRITE"}
        call("role/grant", name="boxes", perm=whole)
        call("user/grant", user="boxes", role="boxes")
        call("enable")
        settings = {
            "coordination": "etcd",
            "etcd": urls[0],
            "etcd_prefix": "/mine/",
            "etcd_user": "boxes",
            "etcd_password_file": str(password),
            "etcd_ca": tls.file("ca.pem"),
            "etcd_cert": tls.file("client.pem"),
            "etcd_key": tls.file("client.key"),
            "lease_s": 2,
        }
        async with fronts(tmp_path, ("a", "b"), **settings) as found:
            first = await led(list(found.values()))
            epoch, other = found[first].plane.state.fence.highest, found["b" if first == "a" else "a"]
            await found[first].die()
            await until(lambda: other.plane.leader == other.node)
            assert other.plane.state.fence.highest > epoch
        for wrong in ({"etcd_password_file": tls.file("ca.pem")}, {"etcd_ca": ""}):
            given = ClusterSettings(node="a", **{**settings, **wrong})
            store = make_store(given, {}, EpochFence(tmp_path / "epoch"), None)
            assert store is not None
            with pytest.raises(CoordUnavailable):
                await store.start()
            await store.close()


async def test_a_witness_votes_and_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_controller, "SETTLE_S", 0.1)
    async with fronts(tmp_path) as found:
        await led(list(found.values()))
        await found["c"].die()
        found["c"].role = "witness"
        await found["c"].start()
        found["a"].has(card("engine-a"))
        found["b"].has(card("engine-b"))
        await planned(list(found.values()), ("a", "b"))
        first = await led(list(found.values()))
        assert first in ("a", "b")
        await found[first].die()
        other = "b" if first == "a" else "a"
        await until(lambda: found["c"].plane.leader == other)


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_box_that_was_not_listed_for_a_while_is_known_again(three: dict[str, Front], noticed: bool) -> None:
    a, b = three["a"], three["b"]
    a.plane.set_peers({node: peer for node, peer in a.peers.items() if node != "b"})
    if noticed:
        await until(lambda: not b.plane.state.members.is_alive("a"))  # whose connection to a stands all the while
    a.plane.set_peers(a.peers)
    assert a.plane.state.members["b"].announcement is None
    await until(lambda: {e.node for e in a.plane.state.members.engines() if e.heard} == {"b", "c"})


async def test_a_box_that_is_listed_elsewhere_for_a_while_stays_known(three: dict[str, Front]) -> None:
    a, b = three["a"], three["b"]
    known = a.plane.state.members["b"].announcement
    a.plane.set_peers({**a.peers, "b": msgspec.structs.replace(a.peers["b"], address="127.0.0.1:1")})
    assert not a.plane.state.members["b"].up
    assert (a.plane.state.members["b"].boot, a.plane.state.members["b"].announcement) == ("boot-b-1", known)
    assert b.plane.state.members.is_alive("a")
    a.plane.set_peers(a.peers)
    await until(lambda: a.plane.state.members["b"].up and b.plane.state.members["a"].up)
    assert a.plane.state.members["b"].boot == "boot-b-1"


async def test_an_error_between_two_beats_costs_these_beats_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fronts(tmp_path, ("a", "b"), ("a",), coordination="single", leader="a") as found:
        a, b, wrong = found["a"].plane, found["b"], list[str]()
        await led([*found.values()])

        def load() -> Heartbeat:
            wrong.append("again")
            raise KeyError("nobody has foreseen that")

        b.load = load  # type: ignore[method-assign]
        await until(lambda: len(wrong) > 1)
        del b.load
        before_s = a.state.members["b"].heard_s
        await until(lambda: a.state.members["b"].heard_s > before_s)
        assert b.plane.channel.mishaps.failed == len(wrong)
    assert "a message failed here" in caplog.text


async def test_reports_go_to_the_leader_only_and_to_a_new_one_within_an_interval(
    three: dict[str, Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "REPORT_S", 0.1)
    first = three["a"].plane.leader
    for node, front in three.items():
        front.reported = BoxReport(model=node, tokens=3.0, chosen=bytes(2))
        front.plane.spawn(front.plane._reporter.run())  # the first one waits ten seconds
    others = [node for node in ABC if node != first]
    leader = three[first].plane
    await until(lambda: [m.report.model for m in leader.state.members if m.report] == others)
    assert not any(member.report for node in others for member in three[node].plane.state.members)
    await three[first].die()
    await until(lambda: three[others[0]].plane.leader not in ("", first))
    second = three[others[0]].plane.leader
    third = next(node for node in others if node != second)
    await until(lambda: three[second].plane.state.members[third].report is not None)
