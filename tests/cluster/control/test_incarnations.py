"""Two boxes that run with one name and key: noticed, named, and one of them followed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.planes import ABC, card
from support.virtual import Box, Cluster, virtual_cluster

from edgemoe.cluster.control.control_state import (
    AnnouncementAnswered,
    ConnectionLost,
    ConnectionOpened,
    ControlState,
    MessageReceived,
    RefuseMessage,
    TimerFired,
)
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.etcd_run import KeptRuns, is_older, latest, next_run
from edgemoe.cluster.control.incarnations import GONE_S, SURE_S
from edgemoe.cluster.control.messages import Announce, DoubleBox, EtcdRun, Heartbeat, Welcome
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PeerBusy
from edgemoe.types.bounds import MAX_NODES

PEERS = {node: Peer(node, f"192.0.2.{n}:7540", node * 40) for n, node in enumerate("abc", 7)}
BEAT_S = 0.5


@dataclass
class Watch:
    """Box a, which hears starts of box b; `now_s` is its clock."""

    state: ControlState
    now_s: float = 100.0

    def hears(self, *boots: str, for_s: float) -> None:
        """Takes beats of these starts in turn."""
        ends_s = self.now_s + for_s
        while self.now_s < ends_s:
            for boot in boots:
                self.receives(boot, Heartbeat(leading=int(boot == "copy")))
            self.now_s += BEAT_S
            self.state.handle(TimerFired())

    def receives(self, boot: str, message: Heartbeat | Announce) -> bool:
        """Returns whether the message was refused."""
        done = self.state.handle(MessageReceived("b", boot, message, f"192.0.2.{9 if boot == 'copy' else 8}"))
        return any(isinstance(each, RefuseMessage) for each in done)

    def welcome(self, boot: str) -> Welcome:
        return self.state.welcome("b", boot, "192.0.2.9", "192.0.2.8:7540", "boot-a")

    def meets(self, boot: str) -> None:
        """Connects to the start that answers at b's address."""
        self.state.handle(ConnectionOpened("b"))
        self.receives(boot, Announce("1", "box", "192.0.2.8:7540", agreement="raft: a b c"))
        self.state.handle(AnnouncementAnswered("b", self.state.serial, welcome=Welcome(boot)))


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr("os.fsync", lambda _fd: None)
    clock: list[Callable[[], float]] = []
    own = Announce("1", "box", "192.0.2.7:7540", engine=card("engine-a"))
    settings = ClusterSettings(node="a", coordination="raft", listen="192.0.2.7:7540")
    plans, fence = PlanStore(tmp_path / "plan"), EpochFence(tmp_path / "epoch")
    made = Watch(ControlState(settings, PEERS, own, plans, fence, lambda: clock[0]()))
    clock.append(lambda: made.now_s)
    made.state.start()
    made.meets("first")
    return made


def test_a_copy_is_named_with_both_addresses_within_seconds_and_is_not_followed(watch: Watch) -> None:
    watch.hears("first", "copy", for_s=SURE_S + 2 * BEAT_S)
    assert (
        watch.state.incarnations.doubles()
        == (DoubleBox("b", "192.0.2.8:7540", "192.0.2.9"),)
        == watch.state.announcement.doubles
    )
    assert watch.welcome("copy") == Welcome("boot-a", "192.0.2.8:7540")
    watch.hears("first", "copy", for_s=BEAT_S)
    why = watch.state.incarnations.finding("b")
    assert "192.0.2.8:7540" in why
    assert "192.0.2.9 (it calls itself 192.0.2.8:7540)" in why
    assert watch.receives("copy", Heartbeat())
    assert not watch.receives("first", Heartbeat())
    assert watch.state.members["b"].boot == "first"
    assert watch.state.leader_tracker.leader == ""
    assert watch.state.fence.highest == 0


def test_an_earlier_start_that_is_connected_for_a_moment_is_no_second_box(watch: Watch) -> None:
    watch.hears("first", for_s=1)
    with pytest.raises(PeerBusy, match="earlier start"):
        watch.welcome("second")
    assert watch.receives("second", Heartbeat())
    watch.state.handle(ConnectionLost("b"))
    watch.hears("second", for_s=3 * SURE_S)
    assert watch.state.members["b"].boot == "second"
    assert watch.state.incarnations.doubles() == ()
    assert watch.state.incarnations.finding("b") == ""
    assert watch.welcome("second").prefers == ""


def test_a_copy_counts_as_the_box_once_the_first_is_gone_and_is_forgotten_once_it_is_silent(watch: Watch) -> None:
    watch.hears("first", "copy", for_s=SURE_S + 2 * BEAT_S)
    assert watch.state.incarnations.is_sure("b")
    watch.hears("first", for_s=GONE_S + BEAT_S)
    assert watch.state.incarnations.doubles() == () == watch.state.announcement.doubles
    watch.hears("first", "copy", for_s=SURE_S + 2 * BEAT_S)
    watch.state.handle(ConnectionLost("b"))
    assert watch.welcome("copy") == Welcome("boot-a")
    watch.hears("copy", for_s=GONE_S + BEAT_S)
    assert watch.state.members["b"].boot == "copy"
    assert watch.state.incarnations.doubles() == ()


def test_the_box_itself_hears_of_its_copy_and_the_copy_of_the_box(watch: Watch) -> None:
    incarnations = watch.state.incarnations
    assert incarnations.why_self() == ""
    assert not incarnations.is_copy
    doubled = Announce("1", "box", "192.0.2.8:7540", agreement="raft: a b c", doubles=(DoubleBox("a", "x", "y:1"),))
    watch.receives("first", doubled)
    watch.hears("first", for_s=BEAT_S)
    assert "at y:1, as b see" in incarnations.why_self()
    assert not incarnations.is_copy
    for node in ("b", "c"):
        watch.state.handle(ConnectionOpened(node))
        watch.state.handle(AnnouncementAnswered(node, watch.state.serial, welcome=Welcome("it", "192.0.2.5:7540")))
    assert incarnations.is_copy
    assert "b, c follow that one" in incarnations.why_self()
    assert [member.peer.node for member in watch.state.unacknowledged()] == ["b", "c"]
    for node in ("b", "c"):
        watch.state.handle(ConnectionLost(node))
    assert not incarnations.is_copy


# --- starts of etcd ----------------------------------------------------------------------------------------------


def test_starts_of_etcd_are_kept_and_older_ones_are_told(tmp_path: Path) -> None:
    runs = KeptRuns(tmp_path / "runs")
    assert runs.of("c") is None
    assert not is_older(EtcdRun(), None)
    first = next_run(EtcdRun(), None)
    second = next_run(first, None)
    for run in (first, second, first):
        runs.keep("c", run)
    assert KeptRuns(tmp_path / "runs").of("c") == second
    assert is_older(first, second)
    assert not is_older(second, second)
    assert not is_older(second, first)
    assert is_older(EtcdRun(second.number, "other"), second)
    assert next_run(first, second).number == 3
    assert latest([None, first, second]) == second
    assert latest([]) is None
    for n in range(2 * MAX_NODES):
        runs.keep(f"n{n}", first)
    assert KeptRuns(tmp_path / "runs").of(f"n{2 * MAX_NODES - 1}") == first
    (tmp_path / "runs").write_text("[]")
    assert KeptRuns(tmp_path / "runs").of("c") is None


# --- whole planes in virtual time --------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with virtual_cluster(tmp_path, 3) as made:
        for node in ABC:
            made.loop.run_until_complete(made.boxes[node].start())
        made.loop.run_until_complete(made.until(made.settled))
        yield made


def copied(cluster: Cluster, node: str) -> Box:
    """Starts a box from a copy of that box's disk, beside it."""
    copy = Box(cluster, node, "copy")
    shutil.copytree(cluster.boxes[node].directory, copy.directory, dirs_exist_ok=True)
    cluster.loop.run_until_complete(copy.start())
    return copy


def double(box: Any) -> str:
    return str(box.plane.state.incarnations.why_self())


@pytest.mark.parametrize("node", ABC)
def test_all_boxes_see_a_copy_of_any_box_and_nothing_else_changes(cluster: Cluster, node: str) -> None:
    run, boxes = cluster.loop.run_until_complete, cluster.boxes
    before = [(box.plane.leader, box.plane.state.fence.highest, box.plane.state.plans.ref) for box in boxes.values()]  # type: ignore[union-attr]
    copy = copied(cluster, node)
    others = [box for name, box in boxes.items() if name != node]

    def is_seen() -> bool:
        named = all("host-copy" in box.plane.state.incarnations.finding(node) for box in others if box.plane)
        return named and all(map(double, (copy, boxes[node])))

    run(cluster.until(is_seen, 6.0))
    assert "serves alone" in double(copy)
    assert "host-copy" in double(boxes[node])
    run(cluster.pass_time(30.0))
    assert before == [
        (box.plane.leader, box.plane.state.fence.highest, box.plane.state.plans.ref)  # type: ignore[union-attr]
        for box in boxes.values()
    ]
    assert copy.plane is not None
    assert not copy.plane.leading
    assert not copy.plane.etcd.is_healthy
    run(copy.die())
    run(cluster.until(lambda: not any(box.plane.state.incarnations.finding(node) for box in others if box.plane), 20.0))
    run(cluster.until(lambda: not double(boxes[node]), 5.0))
    assert cluster.settled()
