"""The other boxes, in one process, and the work of the measured one within a stretch of time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edgemoe.cluster.rpc.keys import Peer, Secret, generate
from tools.bench.many_boxes.measured_box import OWN, Box

SAME_SPEED = 0.2


def free_ports(count: int) -> list[int]:
    """Returns free ports outside the range of outgoing connections."""
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


class Window(NamedTuple):
    """A stretch of time of the measured box."""

    seconds: float
    core_s: float
    speed_s: float  # mean time of the loop for the core's speed
    in_bytes: int
    out_bytes: int
    beats: int
    looks: int
    done: int  # operations that were requested


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
        """Kills a box without a message; once that is noticed, starts it again and waits until it knows everything."""
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
            "tools.bench.many_boxes.measured_box",
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
        """Has the measured box send another announcement."""
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
        """Measures the box during `work`, which returns its number of operations; None if the core's speed changed."""
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
        """Measures `count` windows, or fewer if the core's speed changes often."""
        found: list[Window] = []
        for _ in range(3 * count):
            if len(found) < count and (one := await self.window(work)) is not None:
                found.append(one)
        return found
