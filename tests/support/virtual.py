"""Whole control planes in virtual time: real planes, leaders, elections and files; links, clock and etcd are not.

Nothing waits: where all are idle, time jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from edgemoe.cluster.control import control_plane, leader
from edgemoe.cluster.control.control_plane import ControlPlane, NoServices
from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.messages import CONTROL, Announce, BoxReport, ChannelDescription
from edgemoe.cluster.control.planning.solver import PlanSolver
from edgemoe.cluster.control.planning.targets import PlacementTarget, PlacementTask, make_target
from edgemoe.cluster.rpc.envelope import Answer, Envelope, Question
from edgemoe.cluster.rpc.keys import AllowList, Peer, Secret
from edgemoe.cluster.rpc.transport import ErrorCounter
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import CoordUnavailable, EdgemoeError, PeerBusy, PeerRefused, PeerUnavailable
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import PlacementPlan, pack_bits
from edgemoe.wire.protocol import PROTOCOL_VERSIONS
from support.fake_agreement import FakeAgreement, FakeStore, agreed_by
from support.planes import ABC, EXPERTS, LAYERS, card

LATENCY_S = 0.003
DOWN_S = 1.5  # before a cut is noticed
UP_S = 0.1


class _Jumping(selectors.SelectSelector):
    """Never waits."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for ever"
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


class HiddenNowhere(ErrorCounter):
    """An error that would cost one message ends the test."""

    def fail(self, peer: str) -> None:
        raise


class Channel:
    """The part of a channel that a control plane uses."""

    def __init__(self, transport: Transport, name: str, _language: Any, serve: Any, _settings: Any) -> None:
        self.on_up = self.on_down = lambda _node: None
        self.on_foreign = lambda _node, _why: None
        self.transport, self.serve, self.mishaps = transport, serve, HiddenNowhere(name)
        self.wanted: set[str] = set()
        self.up: set[str] = set()
        self.cluster, self.place = transport.cluster, transport.boot.partition("-")[0]

    def bind(self, _host: str, _port: int = 0) -> int:
        self.cluster.channels[self.place] = self
        self.cluster.join_up()
        return 1

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.close()

    def close(self) -> None:
        if self.cluster.channels.get(self.place) is self:
            del self.cluster.channels[self.place]
            self.cluster.join_up()

    def connect(self, peer: Peer) -> None:
        self.wanted.add(peer.node)
        self.cluster.join_up()

    def disconnect(self, node: str) -> None:
        self.wanted.discard(node)
        self.cluster.join_up()

    def is_up(self, node: str) -> bool:
        return node in self.up

    def version(self, _node: str) -> int:
        return PROTOCOL_VERSIONS.highest

    def notify_peer(self, node: str, body: Any) -> bool:
        if node in self.up:
            asyncio.get_running_loop().create_task(self._notify(node, body))
        return node in self.up

    async def _notify(self, node: str, body: Any) -> None:
        with suppress(EdgemoeError):  # nobody waits for an answer
            await self._carry(node, body)

    async def ask(
        self, node: str, body: Any, _tensors: Sequence[Any] = (), *, timeout_s: float, aside: bool = False
    ) -> Answer[Any]:
        if node not in self.up:
            raise PeerUnavailable(f"{node} is not connected")
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._carry(node, body)
                if answer is None or (node, self.transport.node) in self.cluster.cuts:
                    await asyncio.Event().wait()
                assert answer is not None
                return answer
        except TimeoutError as error:
            raise PeerUnavailable(f"{node} did not answer") from error
        except EdgemoeError as error:
            raise error if isinstance(error, PeerUnavailable | PeerBusy) else PeerRefused(f"{node}: {error}") from error

    async def _carry(self, node: str, body: Any) -> Answer[Any] | None:
        self.cluster.said[type(body).__name__] += 1
        if (other := self.cluster.channels.get(node)) is not None and self.cluster.speak_apart(
            self.transport.node, node
        ):
            other.on_foreign(self.transport.node, "it speaks versions 1 to 2 of the protocol")
            raise PeerRefused(f"{node} speaks another version")
        data = msgspec.msgpack.encode(body)
        await asyncio.sleep(LATENCY_S * (1 + self.cluster.rng.random()))
        other = self.cluster.channels.get(node)
        if other is None or (self.transport.node, node) in self.cluster.cuts or self.transport.node not in other.wanted:
            return None
        envelope = Envelope(0, False, PROTOCOL_VERSIONS, 0.0, (), (), msgspec.Raw())
        message = CONTROL.read(data)
        answer: Answer[Any] | None = await other.serve(
            Question(self.transport.node, self.transport.boot, envelope, message, (), 0.0, f"host-{self.place}")
        )
        self.cluster.observe(node)
        return answer


class Transport:
    cluster: Cluster

    def __init__(self, node: str, boot: str, _secret: Secret, allowed: AllowList) -> None:
        self.node, self.boot, self.allowed = node, boot, allowed

    async def run(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        return None


class Told(FakeStore):
    """Tells the cluster when a plan is committed."""

    cluster: Cluster

    async def commit_plan(self, epoch: int, plan: PlanRef) -> None:
        box = self.cluster.boxes[self.node]
        self.cluster.at("committing", box)
        await super().commit_plan(epoch, plan)
        self.cluster.at("committed", box)


class Box(NoServices):
    """One box, running or not."""

    def __init__(self, cluster: Cluster, node: str, place: str = "") -> None:
        """Takes another `place` for a copy of a box, which nobody connects to."""
        self.cluster, self.node, self.place = cluster, node, place or node
        self.starts, self.ahead_s = 0, 0.0
        self.plane: ControlPlane | None = None
        self.sound = True  # its settings are like the others'
        self.settings: dict[str, Any] = {}
        self.struck: set[str] = set()  # boxes that its own list lacks
        self.began_with: set[str] = set()  # the same, when it started
        self.engine: ChannelDescription | None = card(f"engine-{node}", 12)
        self.obeys: PlacementPlan | None = None  # its engine
        self.pins = np.zeros((LAYERS, EXPERTS), np.bool_)  # the experts pinned there

    def clock(self) -> float:
        return self.cluster.loop.time() + self.ahead_s

    @property
    def directory(self) -> Path:
        return self.cluster.folder / self.place

    @property
    def listed(self) -> dict[str, Peer]:
        """Returns the boxes in its own list."""
        return {node: peer for node, peer in self.cluster.peers.items() if node not in self.struck}

    def read_list(self) -> None:
        """Reads its list again, if it runs."""
        if self.plane is not None:
            self.plane.set_peers(self.listed)

    async def start(self) -> None:
        self.starts += 1
        self.began_with = set(self.struck)
        given = {"coordination": "raft", "replicas": 1, "lease_s": 1.5, "absent_s": 5.0, **self.settings}
        settings = ClusterSettings(
            node=self.node, key_file="unused", listen="127.0.0.1:1", state_dir=str(self.directory), **given
        )
        announce = Announce(release="1", role="box", address="127.0.0.1:1", engine=self.engine if self.sound else None)
        boot = f"{self.place}-{self.starts}"
        plane = ControlPlane(settings, boot, Secret(b"", b""), self.listed, announce, self.clock, self)
        plane.listen()
        self.plane, self.task = plane, asyncio.ensure_future(plane.run())

    def follow_plan(self, plan: PlacementPlan) -> None:
        self.cluster.adopted(self, plan)
        self.cluster.at("adopted", self)
        if self.cluster.pinning:
            self.obeys = plan
            if self.node in plan.nodes:
                kept = self.pins & plan.homes_of(self.node)
                self.cluster.judge(self, self.pins & ~kept)
                self.pins = kept
            self.cluster.at("obeyed", self)

    def pin(self) -> None:
        """Pins one more expert of its homes."""
        if self.obeys is not None and self.node in self.obeys.nodes:
            missing = np.flatnonzero(self.obeys.homes_of(self.node) & ~self.pins)
            if len(missing):
                self.pins.ravel()[missing[0]] = True
                self.cluster.at("pinned", self)

    def report(self) -> BoxReport | None:
        return None

    def announce_pins(self) -> None:
        """Announces the experts that its engine has pinned."""
        assert self.plane is not None
        plan = self.obeys.digest() if self.obeys is not None else ""
        engine = msgspec.structs.replace(card(f"engine-{self.node}", 12), ram=pack_bits(self.pins), plan=plan)
        if engine != self.plane.announcement.engine:
            self.plane.set_announcement(msgspec.structs.replace(self.plane.announcement, engine=engine))
            self.cluster.at("told", self)

    async def die(self) -> None:
        """Ends the plane without any message."""
        assert self.plane is not None
        if (leader := self.plane._leader) is not None and leader._election is not None:
            leader._election._step_down()  # so that it does not resign
        self.plane, self.obeys = None, None
        self.pins = np.zeros_like(self.pins)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def store(self) -> FakeStore | None:
        found = self.plane._leader._store if self.plane is not None and self.plane._leader is not None else None
        return found if isinstance(found, FakeStore) else None


class Cluster:
    """Boxes, the links between them, and the leaders that they followed."""

    def __init__(self, folder: Path, loop: VirtualLoop, seed: int, nodes: Sequence[str], voters: int) -> None:
        self.folder, self.loop, self.rng = folder, loop, random.Random(seed)
        votes = nodes[:voters]
        keys = {node: f"{n:02}" + "k" * 38 for n, node in enumerate(nodes)}
        self.peers = {node: Peer(node, "127.0.0.1:1", keys[node], voter=node in votes) for node in nodes}
        self.said: Counter[str] = Counter()  # messages, by kind
        self.channels: dict[str, Channel] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.obeyed: dict[int, str] = {}  # epoch -> leader
        self.latest: dict[str, int] = {}  # node -> epoch last obeyed
        self.plans: dict[int, str] = {}  # version -> digest
        self.held: dict[str, tuple[int, int]] = {}  # node -> epoch and version of its plan
        self.agreement = FakeAgreement(loop.time, LATENCY_S)
        self.foreign: set[str] = set()  # boxes of a release without a common version
        self.agreement.is_cut = lambda one, other: (
            bool({(one, other), (other, one)} & self.cuts) or self.speak_apart(one, other)
        )
        self.boxes = {node: Box(self, node) for node in nodes}
        self.pinning = False  # engines pin, one expert after the other, and say so
        self.better: PlacementTarget | None = None  # the solver's answer to a review
        self.step, self.role = "", ""  # at which step of a move somebody dies: leader or follower
        self.killed = ""  # the box that died
        self.lost: list[tuple[str, list[int]]] = []  # last pinned copies that a command had a box drop

    # --- engines ----------------------------------------------------------------------------------------------

    async def solve(self, task: PlacementTask) -> PlacementTarget:
        """Solves at once: threads do not follow the virtual time."""
        for box in self.boxes.values():
            if box.plane is not None and box.plane.leading:
                with translated():
                    self.at("solved", box)
        return make_target(task) if task.urgent or self.better is None else self.better

    def at(self, step: str, box: Box) -> None:
        """Records the step of a move that a box has come to. Raises PeerRefused if it must die there."""
        if box.plane is None or step != self.step:
            return
        if self.role == ("leader" if box.plane.leading else "follower"):
            self.step, self.killed = "", box.node
            self.loop.create_task(box.die())
            raise PeerRefused(f"{box.node} dies: {step}")

    def judge(self, box: Box, dropped: BoolArray) -> None:
        """Takes note of copies that nobody else alive has pinned."""
        others = [other.pins for other in self.boxes.values() if other is not box and other.plane is not None]
        lost = dropped & ~np.logical_or.reduce(others)
        if lost.any():
            self.lost.append((box.node, np.flatnonzero(lost).tolist()))

    def work(self) -> None:
        """Engines pin and say so."""
        for box in self.boxes.values():
            if self.pinning and box.plane is not None:
                with suppress(PeerRefused):
                    box.pin()
                    if self.rng.random() < 0.3:
                        box.announce_pins()

    # --- links ------------------------------------------------------------------------------------------------

    def speak_apart(self, one: str, other: str) -> bool:
        """Returns whether the releases of two boxes have no version in common."""
        return (one in self.foreign) != (other in self.foreign)

    def joined(self, source: str, target: str) -> bool:
        there = source in self.channels and target in self.channels
        node = self.channels[source].transport.node if there else ""
        return there and target in self.channels[source].wanted and node in self.channels[target].wanted

    def join_up(self) -> None:
        """Opens possible connections after a moment, and ends impossible ones."""
        for source, channel in list(self.channels.items()):
            for target in self.boxes:
                cut = bool({(source, target), (target, source)} & self.cuts)
                if target in channel.up and not self.joined(source, target):
                    self._turn(channel, target, False)
                elif cut and target in channel.up:
                    self.loop.call_later(DOWN_S, self._open_or_close, channel, target)
                elif not cut and target not in channel.up and self.joined(source, target):
                    self.loop.call_later(UP_S, self._open_or_close, channel, target)

    def _open_or_close(self, channel: Channel, target: str) -> None:
        source = channel.place
        if self.channels.get(source) is not channel:
            return
        stands = self.joined(source, target) and not {(source, target), (target, source)} & self.cuts
        if stands != (target in channel.up):
            self._turn(channel, target, stands)

    def _turn(self, channel: Channel, target: str, up: bool) -> None:
        (channel.up.add if up else channel.up.discard)(target)
        (channel.on_up if up else channel.on_down)(target)

    # --- invariants -------------------------------------------------------------------------------------------

    def observe(self, node: str) -> None:
        """Asserts one leader per epoch, and that each box follows epochs that do not fall."""
        box = self.boxes[node]
        plane = box.plane
        if plane is None or not box.sound or not plane.leader:
            return
        epoch = plane.leading if plane.leader == node else plane.state.members[plane.leader].beat.leading
        if not epoch:
            return
        assert self.obeyed.setdefault(epoch, plane.leader) == plane.leader, (epoch, node)
        assert epoch >= self.latest.get(node, 0), (node, epoch, self.latest)
        self.latest[node] = epoch

    def adopted(self, box: Box, plan: Any) -> None:
        """Asserts one plan per version, of no epoch above all seen, and not older than the last."""
        assert box.plane is None or plan.epoch <= box.plane.state.fence.highest
        assert self.plans.setdefault(plan.version, plan.digest()) == plan.digest()
        assert (plan.epoch, plan.version) >= self.held.get(box.node, (0, 0))
        self.held[box.node] = (plan.epoch, plan.version)

    def check(self) -> None:
        for node in self.boxes:
            self.observe(node)

    # --- time -------------------------------------------------------------------------------------------------

    async def pass_time(self, seconds: float) -> None:
        ends = self.loop.time() + seconds
        while self.loop.time() < ends:
            await asyncio.sleep(0.1)
            self.work()
            self.check()
            for box in self.boxes.values():
                if box.plane is not None and box.task.done():
                    box.task.result()
                    raise AssertionError(f"the plane of {box.node} ended")

    async def until(self, condition: Any, within_s: float = 120.0) -> None:
        ends = self.loop.time() + within_s
        while not condition():
            assert self.loop.time() < ends, {
                node: box.plane
                and (box.plane.leader, box.plane.state.fence.highest, box.plane.blocker, box.plane.state.plans.ref)
                for node, box in self.boxes.items()
            }
            await self.pass_time(0.1)

    def one_leader(self) -> bool:
        """Whether all run, and follow one leader."""
        planes = [box.plane for box in self.boxes.values() if box.plane is not None]
        leaders = {plane.leader for plane in planes}
        return len(planes) == len(self.boxes) and len(leaders) == 1 and "" not in leaders

    def settled(self) -> bool:
        """Whether they also follow one plan over all of them, and read one agreement."""
        stores = [box.store for box in self.boxes.values()]
        refs = {box.plane.state.plans.ref for box in self.boxes.values() if box.plane is not None}
        plan = self.boxes["a"].plane.state.plans.plan if self.boxes["a"].plane is not None else None
        return (
            self.one_leader()
            and all(box.store is not None and not box.store.blocker for box in self.boxes.values())
            and len(refs) == 1
            and plan is not None
            and plan.nodes == ABC
            and {store.view().plan for store in stores if store is not None} == refs
        )

    def one_plan(self) -> bool:
        """Whether all run with a vote, and hold one plan: then one disk may be lost."""
        refs = {box.plane.state.plans.ref if box.plane is not None else None for box in self.boxes.values()}
        return len(refs) == 1 and None not in refs and all(b.store and not b.store.blocker for b in self.boxes.values())

    def lose_disk(self, node: str) -> None:
        shutil.rmtree(self.boxes[node].directory)
        self.latest.pop(node, None)
        self.held.pop(node, None)


@contextmanager
def translated() -> Iterator[None]:
    """Turns other errors into the agreement's, the only ones that a solver raises."""
    try:
        yield
    except PeerRefused as error:
        raise CoordUnavailable(str(error)) from error


@contextmanager
def virtual_cluster(folder: Path, seed: int, nodes: Sequence[str] = ABC, voters: int = 5) -> Iterator[Cluster]:
    """Makes boxes that list each other, not started; the first `voters` have a vote."""
    loop = VirtualLoop()
    made = Cluster(folder, loop, seed, nodes, voters)
    transport = type("Transport", (Transport,), {"cluster": made})
    state = random.getstate()
    random.seed(seed)
    try:
        with (
            mock.patch.object(control_plane, "Channel", Channel),
            mock.patch.object(control_plane, "Transport", transport),
            mock.patch.object(PlanSolver, "solve", lambda _solver, task: made.solve(task)),
            mock.patch.object(PlanSolver, "prepare", mock.AsyncMock()),
            agreed_by(made.agreement, type("Told", (Told,), {"cluster": made})),
            mock.patch.object(leader, "random", SimpleNamespace(Random=lambda: random.Random(made.rng.random()))),
            mock.patch("os.fsync"),
        ):
            try:
                yield made
            finally:
                loop.run_until_complete(_end(made))
    finally:
        random.setstate(state)
        loop.close()


async def _end(cluster: Cluster) -> None:
    for box in cluster.boxes.values():
        if box.plane is not None:
            await box.die()
    await asyncio.sleep(1)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
