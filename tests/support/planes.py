"""Fronts' sides of a cluster on loopback, without engines: real channels, made-up experts, an agreement in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgemoe.cluster.control.control_plane import ControlPlane, NoServices
from edgemoe.cluster.control.coordination.coord_store import since_boot
from edgemoe.cluster.control.messages import Announce, BoxReport, ChannelDescription, Heartbeat
from edgemoe.cluster.rpc.keys import Peer, Secret, generate
from edgemoe.config.settings import ClusterSettings
from edgemoe.types.placement import PlacementPlan, pack_bits
from support.fake_agreement import FakeAgreement, agreed_by
from support.ports import free_ports
from support.waiting import WITHIN_S, until

ABC = ("a", "b", "c")
LAYERS, EXPERTS = 2, 6
ALL = pack_bits(np.ones((LAYERS, EXPERTS), np.bool_))
NONE = bytes(len(ALL))


def card(boot: str, room: int = 6, model: str = "m" * 32, disk: bytes = ALL, ram: bytes = NONE) -> ChannelDescription:
    return ChannelDescription(
        boot=boot,
        calls_port=1,
        bulk_port=2,
        model=model,
        layers=LAYERS,
        experts=EXPERTS,
        expert_bytes=100,
        budget_experts=room,
        disk=disk,
        ram=ram,
        shares=True,
    )


class Front(NoServices):
    """One box's plane, the task that runs it, and an engine that pins its homes at once."""

    def __init__(self, folder: Path, peer: Peer, key: Secret, peers: dict[str, Peer], **settings: Any) -> None:
        self.node, self.key = peer.node, key
        self.settings = ClusterSettings(
            node=peer.node,
            key_file="unused",
            listen=peer.address,
            state_dir=str(folder / peer.node),
            **{"coordination": "raft", "replicas": 1, "lease_s": 1.0, **settings},
        )
        self.peers, self.starts = peers, 0
        self.engine: ChannelDescription | None = None
        self.role: Any = "box"
        self.task: asyncio.Future[None] | None = None
        self.ahead_s = 0.0  # by which its clock has jumped
        self.busy = Heartbeat()
        self.reported: BoxReport | None = None
        self.hears: Callable[[str, Heartbeat], Any] = lambda _node, _beat: None

    def clock(self) -> float:
        return since_boot() + self.ahead_s

    async def start(self) -> None:
        self.starts += 1
        announce = Announce(release="1", role=self.role, address=self.settings.listen, engine=self.engine)
        boot = f"boot-{self.node}-{self.starts}"
        self.plane = ControlPlane(self.settings, boot, self.key, self.peers, announce, self.clock, self)
        self.plane.listen()
        self.task = asyncio.ensure_future(self.plane.run())

    async def die(self) -> None:
        """Ends the plane without any message."""
        if self.task is not None and not self.task.done():
            if (leader := self.plane._leader) is not None and leader._election is not None:
                leader._election._step_down()  # so that it does not resign
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    def has(self, engine: ChannelDescription | None) -> None:
        """Starts the engine, or ends it."""
        self.engine = engine
        if (plan := self.plane.state.plans.plan) is not None and engine is not None:
            self.follow_plan(plan)
        self.plane.set_announcement(msgspec.structs.replace(self.plane.announcement, engine=self.engine))

    def follow_plan(self, plan: PlacementPlan) -> None:
        ref, engine = self.plane.state.plans.ref, self.engine
        if ref is not None and engine is not None and engine.model == plan.model and self.node in plan.nodes:
            ram = pack_bits(plan.homes_of(self.node))
            self.engine = msgspec.structs.replace(engine, ram=ram, plan=ref.digest)
            self.plane.set_announcement(msgspec.structs.replace(self.plane.announcement, engine=self.engine))

    def load(self) -> Heartbeat:
        return self.busy

    def report(self) -> BoxReport | None:
        return self.reported

    def on_beat(self, node: str, beat: Heartbeat) -> None:
        self.hears(node, beat)

    @property
    def plan_nodes(self) -> tuple[str, ...]:
        return self.plane.state.plans.plan.nodes if self.plane.state.plans.plan else ()


@asynccontextmanager
async def fronts(
    folder: Path,
    nodes: Sequence[str] = ("a", "b", "c"),
    voters: Sequence[str] = ABC,
    *,
    real: bool = False,
    **settings: Any,
) -> AsyncIterator[dict[str, Front]]:
    """Starts fronts that list each other; `voters` have a vote. The agreement is in memory, unless `real`."""
    ports = free_ports(len(nodes))
    keys = {node: generate(folder / f"{node}.key") for node in nodes}
    peers = {
        node: Peer(node, f"127.0.0.1:{port}", keys[node].public.decode(), voter=node in voters, vouches=True)
        for node, port in zip(nodes, ports, strict=True)
    }
    made = {node: Front(folder, peers[node], keys[node], peers, **settings) for node in nodes}
    with contextlib.nullcontext() if real else agreed_by(FakeAgreement()):
        try:
            for front in made.values():
                await front.start()
            yield made
        finally:
            await asyncio.gather(*(front.die() for front in made.values()))


async def led(fronts: Sequence[Front], within_s: float = WITHIN_S) -> str:
    """Waits until all follow one leader; returns its node."""
    await until(lambda: len({f.plane.leader for f in fronts}) == 1 and bool(fronts[0].plane.leader), within_s)
    return fronts[0].plane.leader


async def planned(fronts: Sequence[Front], nodes: Sequence[str], within_s: float = WITHIN_S) -> None:
    """Waits until all follow one plan over these nodes."""
    await until(lambda: all(f.plan_nodes == tuple(nodes) for f in fronts), within_s)
    await until(lambda: len({f.plane.state.plans.ref for f in fronts}) == 1, within_s)
