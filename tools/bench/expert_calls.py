"""The cost of a remote expert call, against an echo of the same bytes over the same kind of channel.

    python -m tools.bench.expert_calls --hidden 2048 --width 768 --experts 4 --rows 1 8 64
    python -m tools.bench.expert_calls --rows 1 --move 32      # MB/s of migration meanwhile

Two boxes of the test bed (needs root). results/expert_calls.md describes the method and the other options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import zmq

from edgemoe.cluster.data.data_plane import DataPlane, OwnExperts
from edgemoe.cluster.data.expert_fetch import PeerStore
from edgemoe.cluster.data.messages import ExpertCall
from edgemoe.cluster.rpc import channel as rpc_channel
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Failure, Question
from edgemoe.cluster.rpc.keys import Peer, Secret
from edgemoe.engine.prefix_transfer import ByteArray
from edgemoe.errors import StoreError
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.peer_compute import PeerCompute
from edgemoe.ipc.messages import PeerEngine
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import ExpertGeometry, ExpertId, ServedModel, Tier
from edgemoe.types.peers import ExpertWork, RemoteCall
from edgemoe.types.placement import PlacementPlan, pack_bits
from edgemoe.types.step import EntryKind, TokenGroups
from edgemoe.wire.protocol import Message, MessageLanguage
from edgemoe.worker.cluster_member import TURN_S, HomeFetchPacer
from tools.bench.stats import core_s
from tools.testbed.bed import Bed

EXPERTS = 16
SUM = "0" * 32  # of any expert: all are alike
HALF_S = 0.5


def leave_out_curve(peer_key: str) -> None:
    """Disables encryption in this process; every peer counts as the owner of that key."""
    options = {zmq.CURVE_SECRETKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SERVERKEY, zmq.CURVE_SERVER}
    really_set = zmq.Socket.set

    def set_others(socket: Any, option: int, value: Any) -> None:
        if option not in options:
            really_set(socket, option, value)

    zmq.Socket.set = set_others  # type: ignore[assignment, method-assign]
    rpc_channel.key_of = lambda frame: peer_key.encode()  # type: ignore[attr-defined]


class Echo(Message, frozen=True, tag="Echo"):
    """A message as long as an ExpertCall's body."""

    layer: int = 0
    rows: int = 1
    experts: int = 1
    calls: int = 1


ECHO: MessageLanguage[Echo | Failure] = MessageLanguage(Echo, Failure)


async def echo(question: Question[Any]) -> Answer[Any]:
    """Answers with the hidden states, as long as the sums would be."""
    return Answer(question.message, [question.tensors[0]])


class Shelf:
    """The store of a box, all zeros; the other box has none."""

    def __init__(self, here: bool) -> None:
        self._here = here

    def checksum(self, layer: int, expert: int) -> str | None:
        return SUM if self._here else None

    def learn(self, layer: int, expert: int, checksum: str) -> None:
        pass

    def has(self, layer: int, expert: int) -> bool:
        return self._here

    async def part(self, layer: int, expert: int, offset: int, size_bytes: int) -> bytes:
        return bytes(size_bytes)


class NoPrefixes:
    """A box without keys and values."""

    encoding = ""
    entry_bytes = dict.fromkeys(EntryKind, 0)

    def needed_windows(self, count: int) -> range:
        return range(0)

    def has(self, key: bytes, kind: EntryKind) -> bool:
        return False

    def read(self, key: bytes, kind: EntryKind) -> None:
        return None

    async def take_in(self, keys: Sequence[bytes], data: ByteArray, kind: EntryKind) -> bool:
        return False


class NoPieces:
    """A box without a store to download."""

    async def part(self, digest: str, offset: int, size_bytes: int) -> tuple[memoryview, int]:
        raise StoreError("there is no store here")


class RandomStore:
    """Experts of random weights."""

    def __init__(self, geometry: ExpertGeometry) -> None:
        dtype = torch.bfloat16 if geometry.bf16 else torch.float32
        size = geometry.expert_bytes(0) // geometry.item_bytes
        self._bytes = (torch.randn(size) * 0.02).to(dtype).view(torch.uint8).numpy()

    def expert_bytes(self, layer: int, expert: int) -> int:
        return len(self._bytes)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        into[: len(self._bytes)] = self._bytes.data


class Box:
    """A box with `experts` of 16 experts of one layer, and an echo channel beside its calls channel. Made on its
    loop.
    """

    def __init__(self, node: str, key: Secret, geometry: ExpertGeometry, threads: int, experts: int) -> None:
        kernels = Kernels(threads, geometry.bf16, Path(tempfile.gettempdir()) / "edgemoe-kernels")
        policy = LRU(1, EXPERTS)
        shelf = Shelf(experts > 0)
        self.store = store = PeerStore(RandomStore(geometry), shelf, lambda _: SUM, geometry)
        policies = {Tier.RAM: policy, Tier.VRAM: policy}
        here = np.arange(EXPERTS)[None] < experts
        slots = max(experts, geometry.top_k) * geometry.stride_bytes(0)
        self.loop = asyncio.get_running_loop()
        self.tiers = ExpertTiers(geometry, store, TierMemory(slots), policies, kernels, on_disk=here)
        host = PeerCompute(self.tiers.second(kernels, deadline_s=5), self.tiers.on_disk)
        holdings = lambda: (self.tiers.residency.resident_mask(), self.tiers.on_disk)  # noqa: E731
        own = OwnExperts(ServedModel("m", geometry), holdings, host, shelf, store, NoPrefixes(), NoPieces())
        self.plane = DataPlane(node, f"boot-{node}", key, own, timeout_s=5)
        self.echo: Channel[Any] = Channel(self.plane.transport, "echo", ECHO, echo)
        self.ports = [*self.plane.bind("0.0.0.0"), self.echo.bind("0.0.0.0")]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for work in (self.plane.run(), self.tiers.run(), self.echo.run()):
                group.create_task(work)


def engine(node: str, told: dict[str, Any]) -> PeerEngine:
    calls, bulk = (f"{told['host']}:{port}" for port in told["ports"][:2])
    return PeerEngine(node=node, boot=f"boot-{node}", calls=calls, bulk=bulk)


def told() -> dict[str, Any]:
    """Reads the next line of standard input."""
    return dict(json.loads(sys.stdin.readline()))


async def serve(args: argparse.Namespace, geometry: ExpertGeometry) -> None:
    """Runs the serving process: reads both keys, prints its ports, serves until killed."""
    keys = told()
    if args.plain:
        leave_out_curve(keys["client"]["public"])
    box = Box(
        "server",
        Secret(*(keys["server"][name].encode() for name in ("secret", "public"))),
        geometry,
        args.threads,
        EXPERTS,
    )
    box.plane.transport.allowed.allow("client", keys["client"]["public"])
    print(json.dumps({"ports": box.ports, "pid": os.getpid()}), flush=True)
    await box.run()


def work_of(geometry: ExpertGeometry, rows: int, experts: int, rng: np.random.Generator) -> ExpertWork:
    """Builds work in which every row chooses each of the experts."""
    hidden = torch.from_numpy(rng.standard_normal((rows, geometry.hidden)).astype(np.float32))
    dtype = torch.bfloat16 if geometry.bf16 else torch.float32
    chosen = np.sort(rng.choice(EXPERTS, experts, replace=False))
    weights = np.full(rows * experts, 1 / experts, np.float32)
    index = np.tile(np.arange(rows), experts)
    return ExpertWork(
        0, chosen, np.arange(experts + 1) * rows, index, weights, hidden.to(dtype).view(torch.uint8).numpy()
    )


def calls_alone(box: Box, pid: int, works: Sequence[ExpertWork]) -> dict[str, float]:
    """Measures calls one after the other, on the compute thread; `pid` is the peer's process."""
    answers: SimpleQueue[RemoteCall] = SimpleQueue()
    took: list[float] = []
    here, there, began_s = time.process_time(), core_s(pid), time.perf_counter()
    for work in works:
        asked_s = time.perf_counter()
        box.plane.calls.call("server", work, answers)
        assert answers.get(timeout=10).error is None
        took.append(time.perf_counter() - asked_s)
    here, there, took_s = time.process_time() - here, core_s(pid) - there, time.perf_counter() - began_s
    return {
        "calls_per_s": round(len(works) / took_s, 1),
        "alone_p50_ms": round(float(np.median(took)) * 1e3, 3),
        "alone_p99_ms": round(float(np.quantile(took, 0.99)) * 1e3, 3),
        "caller_core_ms": round(here / len(works) * 1e3, 3),
        "peer_core_ms": round(there / len(works) * 1e3, 3),
    }


def measure(box: Box, pid: int, geometry: ExpertGeometry, rows: int, experts: int, rounds: int) -> dict[str, float]:
    """Measures calls and echoes in turn, on the compute thread."""
    rng = np.random.default_rng(0)
    peer = box.plane.calls.peers["server"]
    calls: list[float] = []
    echoes: list[float] = []
    answers: SimpleQueue[RemoteCall] = SimpleQueue()
    served: list[float] = []
    peer.measure_work = lambda units, seconds: served.append(seconds)  # type: ignore[method-assign]
    for _ in range(rounds):
        work = work_of(geometry, rows, experts, rng)
        _, tensors = ExpertCall.of(work)
        began_s = time.perf_counter()
        box.plane.calls.call("server", work, answers)
        call = answers.get(timeout=10)
        calls.append(time.perf_counter() - began_s)
        assert call.error is None, call.error
        began_s = time.perf_counter()
        asked = box.echo.ask("server", Echo(0, rows, experts, rows * experts), tensors, timeout_s=5)
        asyncio.run_coroutine_threadsafe(asked, box.loop).result(10)
        echoes.append(time.perf_counter() - began_s)
    alone = calls_alone(box, pid, [work_of(geometry, rows, experts, rng) for _ in range(rounds)])
    best = {name: float(np.quantile(x, 0.05)) * 1e3 for name, x in (("call", calls), ("echo", echoes))}
    p50 = {name: float(np.median(x)) * 1e3 for name, x in (("call", calls), ("echo", echoes), ("served", served))}
    return {
        "rows": rows,
        "call_ms": round(p50["call"], 3),
        "echo_ms": round(p50["echo"], 3),
        "served_ms": round(p50["served"], 3),
        "ratio": round(p50["call"] / p50["echo"], 2),
        "ratio_without_compute": round((p50["call"] - p50["served"]) / p50["echo"], 2),
        "call_p5_ms": round(best["call"], 3),
        "echo_p5_ms": round(best["echo"], 3),
        "call_p99_ms": round(float(np.quantile(calls, 0.99)) * 1e3, 3),
        "echo_p99_ms": round(float(np.quantile(echoes, 0.99)) * 1e3, 3),
        **alone,
    }


def fill(box: Box, geometry: ExpertGeometry, experts: int, rows: int, seconds: float) -> dict[str, float]:
    """Measures layer-steps of `rows` tokens, one after the other, with all experts on the peer, on the compute
    thread.
    """
    rng = np.random.default_rng(0)
    hidden = torch.from_numpy(rng.standard_normal((rows, geometry.hidden)).astype(np.float32))
    hidden = hidden.to(torch.bfloat16 if geometry.bf16 else torch.float32)
    ids = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :experts]
    group = TokenGroups.of(ids, np.full((rows, experts), 1 / experts, np.float32))
    remote = box.tiers.experts.remote
    assert remote is not None
    began_s, sent, steps, asked = time.perf_counter(), link_bytes(), 0, remote.asked
    cpu_s = time.process_time()
    while time.perf_counter() - began_s < seconds:
        remote.run(0, hidden, group, None, lambda part, prefill_only: None)
        steps += 1
    took_s = time.perf_counter() - began_s
    out, back = (b - a for a, b in zip(sent, link_bytes(), strict=True))
    payload = steps * rows * geometry.hidden * geometry.item_bytes
    return {
        "rows": rows,
        "steps": steps,
        "calls": remote.asked - asked,
        "experts_remote": remote.experts,
        "step_ms": round(took_s / steps * 1e3, 2),
        "caller_cores": round((time.process_time() - cpu_s) / took_s, 2),
        "sent_mbit_per_s": round(out * 8e-6 / took_s, 1),
        "received_mbit_per_s": round(back * 8e-6 / took_s, 1),
        "payload_mbit_per_s": round(payload * 8e-6 / took_s, 1),
    }


class Moving:
    """Sends experts to a box as a migration does, while `on`."""

    def __init__(self, box: Box, geometry: ExpertGeometry, bytes_per_s: float) -> None:
        bits = pack_bits(np.ones((1, EXPERTS), np.bool_))
        plan = PlacementPlan(1, 1, "m", 1, EXPERTS, ("client", "server"), (bits, bits))
        self.on, self.bytes = False, 0
        self._box, self._size = box, geometry.expert_bytes(0)
        self._moves = HomeFetchPacer(bytes_per_s, self._size, time.monotonic())
        self._moves.on_plan_adopted(plan, "client", first=False)
        box.store.yields = self._moves.is_under_way

    async def run(self) -> None:
        missing = list(map(ExpertId, [0] * EXPERTS, range(EXPERTS)))
        rate = lambda: 1 / self._box.plane.calls.peers["server"].s_per_byte  # noqa: E731
        while True:
            granted = self._moves.next_fetches(missing, time.monotonic(), rate()) if self.on else []
            room = [memoryview(bytearray(self._size)) for _ in granted]
            await asyncio.gather(*(self._box.store.read(*one, into) for one, into in zip(granted, room, strict=True)))
            self.bytes += self._size * len(granted)
            missing = [one for one in missing if one not in granted] or missing[:0]
            if not missing:
                self._moves.next_fetches([], time.monotonic(), rate())
                missing = list(map(ExpertId, [0] * EXPERTS, range(EXPERTS)))
            await asyncio.sleep(TURN_S)


def beside(
    box: Box, geometry: ExpertGeometry, experts: int, rows: int, move_mb: float, seconds: float
) -> dict[str, float]:
    """Measures calls one after the other, with and without arriving experts in turn, on the compute thread."""
    moving = Moving(box, geometry, move_mb * 1e6)
    running = asyncio.run_coroutine_threadsafe(moving.run(), box.loop)
    work = work_of(geometry, rows, experts, np.random.default_rng(0))
    answers: SimpleQueue[RemoteCall] = SimpleQueue()
    took: dict[bool, list[float]] = {False: [], True: []}
    began_s = time.perf_counter()
    while (now_s := time.perf_counter()) - began_s < seconds:
        moving.on = int((now_s - began_s) / HALF_S) % 2 == 1
        box.plane.calls.call("server", work, answers)
        assert answers.get(timeout=10).error is None
        took[moving.on].append(time.perf_counter() - now_s)
    if running.done():
        running.result()
    running.cancel()
    found = {"rows": rows, "limit_mb_per_s": move_mb, "moved_mb_per_s": round(2e-6 * moving.bytes / seconds, 1)}
    for name, which in (("none", False), ("moving", True)):
        ms = 1e3 * np.array(took[which])
        found |= {f"{name}_calls": len(ms), f"{name}_mean_ms": round(float(ms.mean()), 3)}
        found |= {f"{name}_p{q}_ms": round(float(np.quantile(ms, q / 100)), 3) for q in (50, 90, 99)}
    return found


def link_bytes() -> tuple[int, int]:
    """Returns the bytes sent and received by this box."""
    shown = json.loads(subprocess.run(["ip", "-s", "-j", "link", "show", "e0"], capture_output=True, check=True).stdout)
    return shown[0]["stats64"]["tx"]["bytes"], shown[0]["stats64"]["rx"]["bytes"]


async def call(args: argparse.Namespace, geometry: ExpertGeometry) -> None:
    """Runs the calling process: reads keys and the server's address, measures, prints the results."""
    keys = told()
    if args.plain:
        leave_out_curve(keys["server"]["public"])
    box = Box("client", Secret(*(keys["client"][name].encode() for name in ("secret", "public"))), geometry, 1, 0)
    server = told()
    running = asyncio.create_task(box.run())
    box.plane.set_peers({"server": (keys["server"]["public"],)}, [engine("server", server)])
    box.echo.connect(Peer("server", f"{server['host']}:{server['ports'][2]}", keys["server"]["public"]))
    box.tiers.join(box.plane.calls)
    box.plane.calls.fetch_s = lambda layer, experts, without: np.full(len(experts), np.inf)  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        while not (box.echo.is_up("server") and (p := box.plane.calls.peers["server"]).ready and p.ram.all()):
            await asyncio.sleep(0.05)
    for rows in args.fill or ():
        await asyncio.to_thread(fill, box, geometry, args.experts, rows, 0.5)
        found = await asyncio.to_thread(fill, box, geometry, args.experts, rows, args.seconds)
        print(json.dumps(found), flush=True)
    for move_mb in args.move or ():
        for rows in args.rows:
            found = await asyncio.to_thread(beside, box, geometry, args.experts, rows, move_mb, args.seconds)
            print(json.dumps(found), flush=True)
    for rows in args.rows if not (args.fill or args.move) else ():
        await asyncio.to_thread(measure, box, server["pid"], geometry, rows, args.experts, 20)
        found = await asyncio.to_thread(measure, box, server["pid"], geometry, rows, args.experts, args.rounds)
        print(json.dumps(found), flush=True)
    running.cancel()


def compare(args: argparse.Namespace) -> None:
    """Builds two boxes, starts a process in each, and prints the caller's results."""
    keys = {}
    for name in ("client", "server"):
        public, private = zmq.curve_keypair()
        keys[name] = {"public": public.decode(), "secret": private.decode()}
    command = [sys.executable, "-m", "tools.bench.expert_calls", *sys.argv[1:], "--role"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Bed(["client", "server"], args.link) as bed:
        client: Any
        server: Any
        client, server = (bed[name].spawn([*command, name], **pipes) for name in ("client", "server"))
        for child in (client, server):
            say(child, keys)
        say(client, {**json.loads(server.stdout.readline()), "host": bed["server"].address})
        for line in client.stdout:
            print(line, end="", flush=True)
        if client.wait():
            raise SystemExit("the caller failed")


def say(child: Any, what: dict[str, Any]) -> None:
    child.stdin.write(json.dumps(what) + "\n")
    child.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--experts", type=int, default=4, help="of one call")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--fill", type=int, nargs="+", help="tokens of a layer-step; measures the link's use instead")
    parser.add_argument("--move", type=float, nargs="+", help="megabytes a second; 0: no limit")
    parser.add_argument("--seconds", type=float, default=5.0, help="of --fill and --move")
    parser.add_argument("--link", type=float, default=500.0, help="Mbit/s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without CURVE")
    parser.add_argument("--role", choices=["client", "server"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is None:
        return compare(args)
    torch.set_num_threads(args.threads)
    geometry = ExpertGeometry(
        1, EXPERTS, args.experts, args.hidden, args.width, dtype="float32" if args.float32 else "bfloat16"
    )
    asyncio.run(serve(args, geometry) if args.role == "server" else call(args, geometry))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
