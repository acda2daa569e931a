"""What a box's control plane costs among many boxes: processor, bytes, connections and memory, by kind of message.

    python -m tools.bench.many_boxes --boxes 3,12,24,48,64
    python -m tools.bench.many_boxes --boxes 64 --role follower --only steady

A process of its own is the box that is measured: a real control plane, with real connections and keys, in a list of N.
The others are real control planes too, all in this process; of them each connects to the measured box (and the voters)
only, so that a machine can hold them, and none has an engine: cards, reports and offers are made up, for a model of
48 x 128 experts. With `--voters` 3 or 5 there is an agreement, whose other voters are witnesses; else the measured box
leads by its settings, which also holds on a machine that has no time for elections.

Processor time is of the whole process, ZeroMQ's thread and the agreement's included, in seconds of a core at the
highest speed that was seen: a loop is timed at both ends of every window. Windows in which it changed are left out.
Rates are those of a machine that keeps up; what a message costs is what it costs on any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgemoe.cluster.control.coordination.clock import since_boot
from edgemoe.cluster.control.local_services import NoServices
from edgemoe.cluster.control.plane import ControlPlane
from edgemoe.cluster.rpc.control_messages import (
    Announce,
    Beat,
    EngineCard,
    EngineUse,
    GetPlan,
    Report,
    RequestGrant,
    RequestOffer,
)
from edgemoe.cluster.rpc.keys import Peer, Secret, generate, load_secret
from edgemoe.cluster.rpc.messages.choices import EngineChoices, SignatureTable
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PeerError
from edgemoe.types.placement import PlacementPlan, pack_bits

LAYERS, EXPERTS = 48, 128
MODEL, OWN = "m" * 32, "box"
WINDOW_S, SAME_SPEED = 1.0, 0.2
TCP_INFO = struct.Struct("=QQII")  # bytes acknowledged and received, segments out and in; at offset 120
HEADERS = 52  # of IP and TCP, of a segment


def bits(share: float, seed: int = 0) -> bytes:
    """A bitmap of the model's experts."""
    return pack_bits(np.random.default_rng(seed).random((LAYERS, EXPERTS)) < share)


def engine_card(node: str, boxes: int, ram: bytes = b"", plan: str = "") -> EngineCard:
    return EngineCard(
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
    """A box without an engine, which says at once that it has what the plan has at home there."""

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

    def load(self) -> Beat:
        card = self.plane.announce.engine
        return Beat(engine=card.boot, requests=1, slots=32, capacity=64) if card is not None else Beat()

    def hear_beat(self, node: str, beat: Beat) -> None:
        self.beats += 1

    def look_around(self) -> None:
        self.looks += 1

    def follow(self, plan: PlacementPlan) -> None:
        ref = self.plane.state.plans.ref
        if ref is not None and self.node in plan.nodes:
            self.says(engine_card(self.node, self.boxes, pack_bits(plan.homes_of(self.node)), ref.digest))

    def says(self, engine: EngineCard) -> None:
        self.plane.say(msgspec.structs.replace(self.plane.announce, engine=engine))


# --- the measured box ---------------------------------------------------------------------------------------------


def core_speed() -> float:
    """Seconds that a loop takes."""
    began = time.thread_time()
    for _ in range(100_000):
        pass
    return time.thread_time() - began


def tcp_totals() -> dict[str, int]:
    """Of all this process's connections."""
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


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, of which no connection's own is drawn."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in range(21000, 32000):
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                break
    return found


def sample(box: Box) -> dict[str, Any]:
    """What the process has done so far, and how it is; the core's speed is timed before and not counted."""
    before = time.process_time()
    speed = min(core_speed() for _ in range(3))
    tcp = tcp_totals()
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    plane = box.plane
    return {
        "wall_s": time.monotonic(),
        "idle_s": time.process_time() - before,  # that this took
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
        "untold": len(plane.state.late()),
        **tcp,
    }


async def be_measured() -> None:
    """The child: a line in for a sample or another card, a line out."""
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


# --- the crowd ----------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A stretch of time of the measured box."""

    seconds: float
    core_s: float
    speed_s: float  # of the loop that is timed, on average
    in_bytes: int
    out_bytes: int
    beats: int
    looks: int
    done: int  # of what was asked of it


class Crowd:
    """The other boxes, and the measured one's process."""

    def __init__(self, boxes: int, voters: int, leads: bool, folder: Path) -> None:
        others = [f"n{i:02}" for i in range(1, boxes)]
        self.leader = OWN if leads else others[0]
        votes = {self.leader, *others[-(voters - 1) :]} if voters > 1 else set()
        keys: dict[str, Secret] = {node: generate(folder / f"{node}.key") for node in [OWN, *others]}
        ports = free_ports(boxes)
        self.peers = {
            node: Peer(node, f"127.0.0.1:{port}", keys[node].public.decode(), voter=node in votes)
            for node, port in zip([OWN, *others], ports, strict=True)
        }
        self.folder, self.votes, self.leads = folder, votes, leads
        self.boxes: dict[str, Box] = {}
        self.tasks: dict[str, asyncio.Future[None]] = {}
        self.fastest_s = float("inf")

    def start(self, node: str) -> None:
        role = "witness" if node in self.votes and node != self.leader else "box"
        box = self.boxes[node] = Box(self.folder, node, self.peers, role, self.leader)
        for other in self.peers:
            if other not in (OWN, node) and not {other, node} <= self.votes and self.leader not in (other, node):
                box.plane.channel.disconnect(other)
        self.tasks[node] = asyncio.ensure_future(box.plane.run())

    async def die(self, node: str) -> None:
        self.tasks[node].cancel()
        await asyncio.gather(self.tasks.pop(node), return_exceptions=True)
        del self.boxes[node]

    async def lose_and_find(self) -> int:
        """A box dies without a word; when that was noticed it comes back, and is told all."""
        node, all_ = next(iter(self.boxes)), len(self.peers) - 1
        await self.die(node)
        await self.until(lambda now: now["alive"] == all_ - 1)
        self.start(node)
        await self.until(lambda now: now["alive"] == all_ and not now["untold"])
        return 1

    async def begin(self) -> None:
        told = {
            "folder": str(self.folder),
            "leader": self.leader,
            "peers": {node: msgspec.structs.asdict(peer) for node, peer in self.peers.items()},
        }
        self.child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tools.bench.many_boxes",
            "--child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._say(json.dumps(told))
        for node in self.peers:
            if node != OWN:
                self.start(node)
                await asyncio.sleep(0)
        await self.until(lambda now: now["alive"] == len(self.peers) - 1)

    async def end(self) -> None:
        for node in list(self.boxes):
            await self.die(node)
        assert self.child.stdin is not None
        self.child.stdin.close()
        await self.child.wait()

    async def _say(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line.encode() + b"\n")
        await self.child.stdin.drain()

    async def say(self) -> None:
        """Has the measured box announce another card."""
        await self._say("say")

    async def sample(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        await self._say("sample")
        found: dict[str, Any] = json.loads(await self.child.stdout.readline())
        self.fastest_s = min(self.fastest_s, found["speed_s"])
        return found

    async def until(self, holds: Callable[[dict[str, Any]], bool], within_s: float = 240.0) -> dict[str, Any]:
        ends = time.monotonic() + within_s
        while not holds(now := await self.sample()):
            if time.monotonic() > ends:
                raise SystemExit(f"the boxes do not settle: {now}")
            await asyncio.sleep(0.5)
        return now

    async def window(self, work: Callable[[], Awaitable[int]]) -> Window | None:
        """What the measured box did while `work`, which returns how much that was; None where the core changed."""
        first = await self.sample()
        done = await work()
        last = await self.sample()
        if abs(first["speed_s"] / last["speed_s"] - 1) > SAME_SPEED:
            return None
        speed_s = statistics.mean([first["speed_s"], last["speed_s"]])
        counted = {name: last[name] - first[name] for name in ("in_bytes", "out_bytes", "beats", "looks")}
        core_s = last["process_s"] - first["end_s"]
        return Window(last["wall_s"] - first["wall_s"], core_s, speed_s, done=done, **counted)

    async def windows(self, work: Callable[[], Awaitable[int]], count: int) -> list[Window]:
        """So many, most of them at one speed."""
        found: list[Window] = []
        for _ in range(3 * count):
            if len(found) < count and (one := await self.window(work)) is not None:
                found.append(one)
        return found


async def idle() -> int:
    await asyncio.sleep(WINDOW_S)
    return 1


# --- what is done to it -------------------------------------------------------------------------------------------


class Load:
    """What the crowd says to the measured box."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd, self.numbers = crowd, itertools.count(1)
        self.rng = np.random.default_rng(1)
        table = self.rng.integers(0, 255, LAYERS * EXPERTS, np.uint8).tobytes()
        places = self.rng.integers(0, 4, LAYERS * EXPERTS, np.uint8).tobytes()
        self.choices = EngineChoices(table, places, (1e-4, 1e-3, 1e-2), 0.01, 1e-5)
        self.signature = SignatureTable(500, self.rng.integers(0, 4000, LAYERS * EXPERTS, np.uint16).tobytes())
        self.report = Report(
            model=MODEL, tokens=1e4, chosen=bytes(2 * LAYERS * EXPERTS), pairs=bytes(192 << 10), resident=bits(0.5)
        )

    @property
    def fronts(self) -> list[Box]:
        return [box for box in self.crowd.boxes.values() if box.plane.announce.engine is not None]

    def use(self, box: Box, **fields: Any) -> None:
        use = EngineUse(
            f"engine-{box.node}", 32, 64, running=4, blocks=4000, free_blocks=3000, tokens_per_s=2000.0, **fields
        )
        box.plane.channel.tell(OWN, use)

    async def each(self, count: int, say: Callable[[Box], Any]) -> int:
        """Has boxes in turn say something, evenly within a window."""
        fronts = self.fronts
        for at in range(count):
            said = say(fronts[at % len(fronts)])
            if said is not None:
                await said
            if at % 5 == 4:
                await asyncio.sleep(5 * WINDOW_S / count)
        await asyncio.sleep(0.2)
        return count

    async def request(self, box: Box, signature: SignatureTable | None) -> None:
        """An offer, and what the engine says that gets it: it is here, it has a token, it has ended."""
        offer = RequestOffer(
            next(self.numbers),
            MODEL,
            prompt_tokens=600,
            max_tokens=400,
            expected_tokens=200,
            user=int(self.rng.integers(1, 1000)),
            prefix=self.rng.integers(0, 1 << 62, 9, np.int64).tobytes(),
            remaining_ms=20_000.0,
            signature=signature,
        )
        try:
            answer = (await box.plane.channel.ask(OWN, offer, timeout_s=5.0)).message
        except PeerError as error:
            print(f"not answered: {error}", file=sys.stderr)
            return
        assert isinstance(answer, RequestGrant)
        taker = self.crowd.boxes.get(answer.place.partition(":")[0], box)
        for _ in range(3):
            self.use(taker, taken=((box.node, offer.number),))

    async def reannounce(self) -> int:
        """Boxes say something new of themselves, which the measured box looks at: so often as it does."""
        before = await self.crowd.sample()
        await self.each(
            60, lambda box: box.says(engine_card(box.node, len(self.crowd.peers), bits(0.05, next(self.numbers))))
        )
        return int((await self.crowd.sample())["looks"] - before["looks"])

    async def fetch(self) -> int:
        """All fetch the plan at once."""
        digest = (await self.crowd.sample())["digest"]
        fronts = self.fronts
        asked = (box.plane.channel.ask(OWN, GetPlan(digest), timeout_s=10.0) for box in fronts)
        await asyncio.gather(*asked)
        return len(fronts)

    async def announced(self) -> int:
        """The measured box says something new of itself to all."""
        await self.crowd.say()
        await self.crowd.until(lambda now: not now["untold"])
        return len(self.crowd.peers) - 1

    def cases(self) -> dict[str, Callable[[], Awaitable[int]]]:
        return {
            "use": lambda: self.each(400, self.use),
            "use and choices": lambda: self.each(100, lambda box: self.use(box, choices=self.choices)),
            "request": lambda: self.each(100, lambda box: self.request(box, None)),
            "request and forecast": lambda: self.each(80, lambda box: self.request(box, self.signature)),
            "announcement heard": self.reannounce,
            "announcement told": self.announced,
            "report": lambda: self.each(40, lambda box: self.crowd_tell(box, self.report)),
            "plan": self.fetch,
        }

    def crowd_tell(self, box: Box, message: msgspec.Struct) -> None:
        box.plane.channel.tell(OWN, message)


async def measure(boxes: int, voters: int, leads: bool, count: int, only: str) -> dict[str, Any]:
    """Figures of one size of cluster."""
    with tempfile.TemporaryDirectory() as folder:
        crowd = Crowd(boxes, voters, leads, Path(folder))
        await crowd.begin()
        try:
            homes = boxes - (voters - 1)
            now = await crowd.until(lambda now: now["planned"] == homes and bool(now["leading"]) == leads)
            load, found = Load(crowd), dict[str, list[Window]]()
            for box in load.fronts:
                load.use(box)
            await asyncio.sleep(3.0)
            found["steady"] = await crowd.windows(idle, count)
            for name, work in load.cases().items() if leads else ():
                if only in name:
                    found[name] = await crowd.windows(work, max(2, count // 2))
            found["steady"] += await crowd.windows(idle, count)
            if leads and only in "gone and back":
                found["gone and back"] = await crowd.windows(crowd.lose_and_find, 2)
            now = await crowd.sample()
        finally:
            await crowd.end()
    return {"boxes": boxes, "fastest_s": crowd.fastest_s, **reckoned(found, crowd.fastest_s)} | {
        name: now[name] for name in ("rss", "fds", "threads", "links", "alive")
    }


def reckoned(found: dict[str, list[Window]], fastest_s: float) -> dict[str, Any]:
    """Shares of a core and bytes a second in the steady state; seconds of a core and bytes of each thing beyond it."""

    def core_s(one: Window) -> float:
        return one.core_s * fastest_s / one.speed_s

    def middle(values: Iterator[float]) -> float:
        return statistics.median(list(values) or [math.nan])

    steady = [one for one in found["steady"] if not one.looks]  # nobody came or went
    share = middle(core_s(one) / one.seconds for one in steady)
    incoming = middle(one.in_bytes / one.seconds for one in steady)
    outgoing = middle(one.out_bytes / one.seconds for one in steady)
    beats = middle(one.beats / one.seconds for one in steady)
    each = {
        name: {
            "core_s": middle((core_s(one) - share * one.seconds) / one.done for one in windows),
            "in_bytes": middle((one.in_bytes - incoming * one.seconds) / one.done for one in windows),
            "out_bytes": middle((one.out_bytes - outgoing * one.seconds) / one.done for one in windows),
        }
        for name, windows in found.items()
        if name != "steady"
    }
    return {
        "share": share,
        "in_bytes_s": incoming,
        "out_bytes_s": outgoing,
        "beats_s": beats,
        "windows": len(steady),
        "each": each,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a JSON object for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", default="3,12,24,48,64")
    parser.add_argument("--voters", type=int, choices=(1, 3, 5), default=1)
    parser.add_argument("--role", choices=("leader", "follower"), default="leader")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--only", default="", help="kinds of message whose name has this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        asyncio.run(be_measured())
        return 0
    for boxes in map(int, options.boxes.split(",")):
        leads = options.role == "leader"
        print(json.dumps(asyncio.run(measure(boxes, options.voters, leads, options.windows, options.only))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
