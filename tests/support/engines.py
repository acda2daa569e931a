"""Whole engines with real channels on loopback, several in one process, each with a loop and a compute thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.cluster.rpc.keys import Secret, generate
from edgemoe.config.settings import (
    ClusterSettings,
    DeviceSettings,
    EngineSettings,
    MemorySettings,
    ModelSettings,
    Settings,
)
from edgemoe.ipc.messages import ChannelsOpened, FromEngine, PeerEngine, PeerList, Plan
from edgemoe.policy.placement.problem import PlacementProblem, by_size
from edgemoe.policy.placement.uniform import uniform
from edgemoe.store.manifest import Manifest, spec_of
from edgemoe.types.placement import PlacementPlan, PlacementPolicy, pack_bits
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.worker.assemble import assemble
from edgemoe.worker.cluster_member import ClusterMember
from support.kept import STORES
from support.waiting import WITHIN_S, wait_until

LAYERS, EXPERTS = 3, 6  # of the tiny models


class EngineBox:
    """One box's engine, without its process."""

    def __init__(
        self,
        node: str,
        store: Path,
        slots: int,
        directory: Path,
        timeout_s: float = 5.0,
        devices: Sequence[int] = (),
        placement: PlacementPolicy = "rendezvous",
        check_share: float = 0.01,
    ) -> None:
        """Makes a box with `slots` experts in RAM, and `devices` experts in emulated devices."""
        self.node, self.boot = node, f"boot-of-{node}"
        key_file = directory / f"{node}.key"
        self.secret: Secret = generate(key_file)
        expert_bytes = spec_of(Manifest.load(store)).geometry.stride_bytes(0)
        self.settings = Settings(
            model=ModelSettings(path=str(store), store_dir=str(STORES)),
            memory=MemorySettings(ram_bytes=slots * expert_bytes, kv_bytes=4 << 20),
            device=tuple(
                DeviceSettings(kind="emulated", expert_bytes=count * expert_bytes, link_bytes_per_s=1 << 40)
                for count in devices
            )
            or (DeviceSettings(kind="cpu"),),
            engine=EngineSettings(threads=1, step_tokens=64, prefix_cache=False),
            cluster=ClusterSettings(
                node=node,
                key_file=str(key_file),
                listen="127.0.0.1:7540",
                call_timeout_s=timeout_s,
                placement=placement,
                check_share=check_share,
            ),
        )
        self.told: list[FromEngine] = []
        self.emitted: list[Emission] = []
        self.assembly = assemble(self.settings, self.emitted.extend, lambda *_: None)
        self.tiers = self.assembly.tiers
        self._loop = asyncio.new_event_loop()
        self._up: Future[None] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._live()), daemon=True)
        self._thread.start()
        self._up.result(60)
        self.assembly.engine.start(1, lambda error: None)
        self.alive = True

    async def _live(self) -> None:
        made = self.assembly
        assert made.sharing is not None
        self.side = ClusterMember(
            self.settings.cluster, self.boot, made.model, made.engine, made.tiers, made.sharing, self.told.append
        )
        self.side.listen()
        tasks = [asyncio.create_task(work) for work in (self.side.run(), self.tiers.run())]
        self._up.set_result(None)
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.side.close()

    def obey(self, message: PeerList | Plan) -> None:
        self._loop.call_soon_threadsafe(self.side.on_message, message)

    @property
    def remote(self) -> Any:
        return self.tiers.experts.remote

    @property
    def engine_of(self) -> PeerEngine:
        ports = next(message for message in self.told if isinstance(message, ChannelsOpened))
        return PeerEngine(
            node=self.node,
            boot=self.boot,
            calls=f"127.0.0.1:{ports.calls_port}",
            bulk=f"127.0.0.1:{ports.bulk_port}",
        )

    def knows(self, *others: EngineBox) -> bool:
        """Whether it has met the others, and has their present RAM contents."""
        peers = self.side.plane.calls.peers
        return all(
            box.node in peers
            and peers[box.node].ready
            and (peers[box.node].ram == (box.tiers.residency.ram.where >= 0)).all()
            for box in others
        )

    def submit(
        self,
        prompt: Sequence[int],
        name: str = "r",
        max_tokens: int = 12,
        remaining_s: float = 60.0,
        emitted: Sequence[int] = (),
    ) -> None:
        """Submits a request for greedy tokens; `emitted` are the tokens of an engine that died."""
        request = Request(
            id=name, prompt=tuple(prompt), sampling=Sampling(temperature=0.0, max_tokens=max_tokens), seed=1
        )
        self.assembly.engine.loop.submit(request, tuple(emitted), 2 if emitted else 1, remaining_s)

    def end(self, name: str = "r", within_s: float = WITHIN_S) -> Emission:
        wait_until(lambda: any(one.request == name and one.finish for one in self.emitted), within_s)
        return next(one for one in self.emitted if one.request == name and one.finish)

    def tokens(self, name: str = "r") -> list[int]:
        return [one.token for one in self.emitted if one.request == name and one.token is not None]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 12, tag: str = "", within_s: float = WITHIN_S
    ) -> list[list[int]]:
        """Returns greedy tokens of all prompts, run together."""
        for n, prompt in enumerate(prompts):
            self.submit(prompt, f"{tag}{n}", max_tokens)
        ends = [self.end(f"{tag}{n}", within_s) for n in range(len(prompts))]
        assert [one.error for one in ends if one.finish == "error"] == []
        return [self.tokens(f"{tag}{n}") for n in range(len(prompts))]

    def die(self) -> None:
        """Breaks its sockets, as when its process is killed."""
        if self.alive:
            self.alive = False
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)
            assert not self._thread.is_alive()


@contextmanager
def running(*boxes: EngineBox, know: bool = True) -> Iterator[None]:
    """Runs the boxes, introduced to each other, until the end."""
    try:
        if know:
            meet(*boxes)
        yield
    finally:
        for box in boxes:
            box.assembly.engine.loop.stop()
        for box in boxes:
            box.die()
            box._loop.close()
            box.assembly.close()
            box.tiers.check_integrity(idle=True)


def peers_of(*boxes: EngineBox) -> PeerList:
    """Returns the front's message to an engine about these boxes."""
    keys = {box.node: (box.secret.public.decode(),) for box in boxes}
    return PeerList(keys=keys, engines=tuple(box.engine_of for box in boxes))


def meet(*boxes: EngineBox) -> None:
    for box in boxes:
        others = [other for other in boxes if other is not box]
        box.obey(peers_of(*others))
    wait_until(lambda: all(box.knows(*(other for other in boxes if other is not box)) for box in boxes))


def plan_for(boxes: Sequence[EngineBox], replicas: int = 1, version: int = 1) -> PlacementPlan:
    """Makes the uniform plan, as a leader does from the boxes' announcements."""
    model = boxes[0].assembly.model
    rooms = [box.tiers.residency.homes.capacities for box in boxes]
    problem = PlacementProblem(
        slots=tuple((sum(room),) for room in rooms),
        activations=np.zeros((len(boxes), model.layers, model.experts)),
        expert_bytes=model.expert_bytes,
        on_disk=np.stack([box.tiers.on_disk for box in boxes]),
    )
    placement = by_size(problem, model.layer_bytes, rooms, lambda part, _: uniform(part, replicas))
    bits = tuple(pack_bits(homes) for homes in placement.homes)
    nodes = tuple(box.node for box in boxes)
    return PlacementPlan(1, version, model.digest, model.layers, model.experts, nodes, bits)


def adopt(plan: PlacementPlan, *boxes: EngineBox) -> None:
    """Returns when all homes are in memory, and everybody knows."""
    for box in boxes:
        box.obey(Plan(plan=plan))
    wait_until(lambda: all(box.side.plan == plan and not box.tiers.residency.homes.missing() for box in boxes))
    wait_until(lambda: all(box.knows(*(other for other in boxes if other is not box)) for box in boxes))


def prompts(seed: int = 0, lengths: Sequence[int] = (3, 40, 17, 70)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 96, length).tolist() for length in lengths]
