"""Collects snapshots of engines, this box's and others', while a client watches.

Each call asks the engine and the other fronts for new snapshots, at most once a second. A box without one is shown by
its announcement.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.api.backend import BoxSnapshot
from edgemoe.errors import EdgemoeError
from edgemoe.front.engine_process import LocalConnection
from edgemoe.ipc.messages import SnapshotReply, SnapshotRequest
from edgemoe.types.placement import unpack_bits
from edgemoe.types.snapshot import ELSEWHERE, IN_RAM, MAX_CELLS, NO_EXPERT, ON_DISK, ServingSnapshot

if TYPE_CHECKING:
    from edgemoe.cluster.control.control_plane import ControlPlane
    from edgemoe.cluster.control.messages import ChannelDescription

log = logging.getLogger(__name__)
ASK_EVERY_S, ASK_S = 1.0, 2.0
OLD_S = 5.0  # after which a snapshot is not shown any more


class ClusterSnapshots:
    """Owns the latest snapshot of each box. Outside a cluster this box's name is empty."""

    def __init__(self, door: LocalConnection) -> None:
        self._door = door
        self._plane: ControlPlane | None = None
        self._asked_s = self._asked_others_s = float("-inf")
        self._seen: dict[str, tuple[float, ServingSnapshot]] = {}  # by node: time, snapshot

    def join(self, plane: ControlPlane) -> None:
        """Shows the other boxes too from now on."""
        self._plane = plane

    def on_own_snapshot(self, seen: SnapshotReply) -> None:
        """Keeps the engine's latest snapshot."""
        self._keep(self._node, seen)

    def latest(self) -> list[BoxSnapshot]:
        """Returns the latest snapshot of each box, this one first, and asks for new ones."""
        self._ask()
        self._ask_others()
        snapshots = [BoxSnapshot(self._node, self._fresh(self._node))]
        for member in self._plane.state.members if self._plane is not None else ():
            node, card = member.peer.node, member.announcement
            engine = card.engine if card is not None else None
            if engine is not None and self._is_alive(node):
                snapshots.append(BoxSnapshot(node, self._fresh(node) or announced(engine)))
        return snapshots

    async def reach(self) -> list[dict[str, Any]]:
        """Returns the results of probing ports and clocks between this box and the others."""
        return await self._plane.port_prober.probe_all() if self._plane is not None else []

    def own_snapshot(self) -> SnapshotReply:
        """Returns this box's latest snapshot for another front, and asks the engine for a new one."""
        self._ask()
        return SnapshotReply(self._fresh(self._node))

    @property
    def _node(self) -> str:
        return self._plane.state.node if self._plane is not None else ""

    def _is_alive(self, node: str) -> bool:
        return self._plane is not None and self._plane.state.members.is_alive(node)

    def _fresh(self, node: str) -> ServingSnapshot | None:
        seen_s, snapshot = self._seen.get(node, (float("-inf"), None))
        return snapshot if time.monotonic() - seen_s < OLD_S else None

    def _keep(self, node: str, seen: SnapshotReply) -> None:
        snapshot = seen.snapshot
        if snapshot is not None and len(snapshot.cells) in (0, snapshot.layers * snapshot.experts):
            self._seen[node] = (time.monotonic(), snapshot)

    def _ask(self) -> None:
        if time.monotonic() - self._asked_s >= ASK_EVERY_S:
            self._asked_s = time.monotonic()
            self._door.send(SnapshotRequest())

    def _ask_others(self) -> None:
        if self._plane is None or time.monotonic() - self._asked_others_s < ASK_EVERY_S:
            return
        self._asked_others_s = time.monotonic()
        members = self._plane.state.members
        self._seen = {node: seen for node, seen in self._seen.items() if node == self._node or node in members}
        for member in members:
            if member.beat.engine and self._is_alive(member.peer.node):
                self._plane.spawn(self._ask_other(self._plane, member.peer.node))

    async def _ask_other(self, plane: ControlPlane, node: str) -> None:
        try:
            answer = await plane.channel.ask(node, SnapshotRequest(), timeout_s=ASK_S)
        except EdgemoeError as error:
            log.debug("a box shows nothing", extra={"peer": node, "why": str(error)})
        else:
            if isinstance(answer.message, SnapshotReply) and node in plane.state.members:
                self._keep(node, answer.message)


def announced(engine: ChannelDescription) -> ServingSnapshot:
    """Returns the snapshot that follows from a box's announcement: experts on its disk and at home in its RAM."""
    layers, experts = engine.layers, engine.experts
    nothing = ServingSnapshot(layers=layers, experts=experts, cells=b"")
    if layers * experts > MAX_CELLS:
        return nothing
    try:
        on_disk, in_ram = (unpack_bits(bitmap, layers, experts) for bitmap in (engine.disk, engine.ram))
    except ValueError:  # it contradicts itself
        return nothing
    exists = np.arange(experts) < np.array(engine.experts_of_layers)[:, None]
    cells = np.where(exists, ELSEWHERE, NO_EXPERT).astype(np.uint8)
    cells[on_disk & exists] = ON_DISK
    cells[in_ram & exists] = IN_RAM
    return ServingSnapshot(layers=layers, experts=experts, cells=cells.tobytes())
