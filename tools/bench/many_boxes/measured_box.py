"""The measured box, as a process of its own: a real control plane without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgemoe.cluster.control.control_plane import ControlPlane, NoServices
from edgemoe.cluster.control.coordination.coord_store import since_boot
from edgemoe.cluster.control.messages import Announce, ChannelDescription, Heartbeat
from edgemoe.cluster.rpc.keys import Peer, load_secret
from edgemoe.config.settings import ClusterSettings
from edgemoe.types.placement import PlacementPlan, pack_bits

LAYERS, EXPERTS = 48, 128
MODEL, OWN = "m" * 32, "box"
TCP_INFO = struct.Struct("=QQII")  # bytes acknowledged and received, segments out and in; at offset 120
HEADERS = 52  # IP and TCP headers of a segment


def bits(share: float, seed: int = 0) -> bytes:
    """Draws a bitmap of the model's experts."""
    return pack_bits(np.random.default_rng(seed).random((LAYERS, EXPERTS)) < share)


def engine_card(node: str, boxes: int, ram: bytes = b"", plan: str = "") -> ChannelDescription:
    return ChannelDescription(
        boot=f"engine-{node}",
        calls_port=7541,
        bulk_port=7542,
        model=MODEL,
        layers=LAYERS,
        experts=EXPERTS,
        expert_bytes=1 << 20,
        budget_experts=max(1, 3 * LAYERS * EXPERTS // boxes),
        disk=bits(2.0),
        ram=ram or bits(0.0),
        shares=True,
        plan=plan,
    )


class Box(NoServices):
    """A box without an engine, which reports its homes of a plan as present at once."""

    def __init__(self, folder: Path, node: str, peers: dict[str, Peer], role: Any, leader: str) -> None:
        self.node, self.beats, self.looks, self.boxes = node, 0, 0, len(peers)
        secret = load_secret(folder / f"{node}.key")
        settings = ClusterSettings(
            node=node,
            key_file=str(folder / f"{node}.key"),
            listen=peers[node].address,
            state_dir=str(folder / node),
            coordination="raft" if any(peer.voter for peer in peers.values()) else "single",
            leader="" if any(peer.voter for peer in peers.values()) else leader,
            migrate_s=0.0,
        )
        card = engine_card(node, self.boxes) if role == "box" else None
        announce = Announce(release="1", role=role, address=peers[node].address, engine=card)
        self.plane = ControlPlane(settings, f"boot-{node}", secret, peers, announce, since_boot, self)
        self.plane.listen()

    def load(self) -> Heartbeat:
        card = self.plane.announcement.engine
        return Heartbeat(engine=card.boot, requests=1, slots=32, capacity=64) if card is not None else Heartbeat()

    def on_beat(self, node: str, beat: Heartbeat) -> None:
        self.beats += 1

    def on_members_changed(self) -> None:
        self.looks += 1

    def follow_plan(self, plan: PlacementPlan) -> None:
        ref = self.plane.state.plans.ref
        if ref is not None and self.node in plan.nodes:
            self.says(engine_card(self.node, self.boxes, pack_bits(plan.homes_of(self.node)), ref.digest))

    def says(self, engine: ChannelDescription) -> None:
        self.plane.set_announcement(msgspec.structs.replace(self.plane.announcement, engine=engine))


def core_speed() -> float:
    """Returns the seconds that a loop takes."""
    began = time.thread_time()
    for _ in range(100_000):
        pass
    return time.thread_time() - began


def tcp_totals() -> dict[str, int]:
    """Returns bytes and segments of all of this process's connections."""
    total = {"links": 0, "in_bytes": 0, "out_bytes": 0}
    for entry in list(Path("/proc/self/fd").iterdir()):
        if not os.path.realpath(entry).rpartition("/")[2].startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, received, segments_out, segments_in = TCP_INFO.unpack_from(info, 120)
                total["links"] += 1
                total["in_bytes"] += received + HEADERS * segments_in
                total["out_bytes"] += sent + HEADERS * segments_out
    return total


def sample(box: Box) -> dict[str, Any]:
    """Returns the process's counters and state; the timing of the core is done before and not counted."""
    before = time.process_time()
    speed = min(core_speed() for _ in range(3))
    tcp = tcp_totals()
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    plane = box.plane
    return {
        "wall_s": time.monotonic(),
        "idle_s": time.process_time() - before,  # spent on this sample
        "process_s": before,
        "end_s": time.process_time(),
        "speed_s": speed,
        "beats": box.beats,
        "looks": box.looks,
        "rss": int(status["VmRSS"].split()[0]) << 10,
        "threads": int(status["Threads"]),
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "alive": len(plane.state.members.alive()),
        "leading": plane.leading,
        "granted": plane.desk.queue.granted,
        "planned": len(plane.state.plans.plan.nodes) if plane.state.plans.plan else 0,
        "digest": plane.state.plans.ref.digest if plane.state.plans.ref else "",
        "untold": len(plane.state.unacknowledged()),
        **tcp,
    }


async def be_measured() -> None:
    """Runs the child: a line in for a sample or another announcement, a line out."""
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    asked = json.loads(await reader.readline())
    peers = {node: msgspec.convert(peer, Peer) for node, peer in asked["peers"].items()}
    box = Box(Path(asked["folder"]), OWN, peers, "box", asked["leader"])
    running = asyncio.ensure_future(box.plane.run())
    said = 0
    while line := (await reader.readline()).strip():
        if line == b"say":
            said += 1
            box.says(engine_card(OWN, len(peers), bits(0.05, said)))
        else:
            print(json.dumps(sample(box)), flush=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(be_measured())
