"""What a remote expert call costs, against an echo of the same bytes over the same kind of lane, in one run.

    python tools/bench/expert_calls.py --hidden 2048 --width 768 --experts 4 --rows 1 8 64

A second process has the experts in memory. Calls and echoes alternate; both go through ROUTER and DEALER, CURVE and
the envelope's checksums. A call is timed on the compute thread, from the call to its answer, an echo likewise, with
the same hand-over to the loop and back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from edgemoe.cluster.data.bulk import PeerStore
from edgemoe.cluster.data.messages import Model
from edgemoe.cluster.data.plane import DataPlane
from edgemoe.cluster.wire.keys import Peer, Secret
from edgemoe.cluster.wire.lane import Lane
from edgemoe.cluster.wire.messages import PeerEngine
from edgemoe.cluster.wire.net import Answer, Failure, Question
from edgemoe.experts.arena import ExpertShape
from edgemoe.experts.devices import Tiers
from edgemoe.experts.host import ExpertHost
from edgemoe.kernels.compute import Kernels
from edgemoe.policy.baselines import LRU
from edgemoe.types import ExpertWork, RemoteCall, Tier

EXPERTS = 16


class Echo(msgspec.Struct, frozen=True, tag=True):
    """As long as a Call's body."""

    layer: int = 0
    rows: int = 1
    experts: int = 1
    calls: int = 1


ECHO: msgspec.msgpack.Decoder[Echo | Failure] = msgspec.msgpack.Decoder(Echo | Failure)


async def echo(question: Question[Any]) -> Answer[Any]:
    """The hidden states come back, as sums would."""
    return Answer(question.message, [question.tensors[0]])


class NoShelf:
    """Nothing to be fetched."""

    def checksum(self, layer: int, expert: int) -> str | None:
        return None

    def learn(self, layer: int, expert: int, checksum: str) -> None:
        pass

    def has(self, layer: int, expert: int) -> bool:
        return True

    async def part(self, layer: int, expert: int, offset: int, size_bytes: int) -> bytes:
        raise NotImplementedError


class RandomStore:
    """Experts of random weights."""

    def __init__(self, shape: ExpertShape) -> None:
        dtype = torch.bfloat16 if shape.bf16 else torch.float32
        size = shape.expert_bytes // shape.item_bytes
        self._bytes = (torch.randn(size) * 0.02).to(dtype).view(torch.uint8).numpy()

    def expert_bytes(self, layer: int, expert: int) -> int:
        return len(self._bytes)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        into[: len(self._bytes)] = self._bytes.data


class Box:
    """A box with 16 experts of one layer in memory, and an echo lane beside its calls lane. Made on its loop."""

    def __init__(self, node: str, key: Secret, shape: ExpertShape, threads: int) -> None:
        kernels = Kernels(threads, shape.bf16)
        policy = LRU(1, EXPERTS)
        store = PeerStore(RandomStore(shape), NoShelf(), lambda _: "", shape.expert_bytes)
        policies = {Tier.RAM: policy, Tier.VRAM: policy}
        self.tiers = Tiers(shape, store, EXPERTS * shape.stride_bytes, [], policies, kernels)
        model = Model("m", 1, EXPERTS, shape.hidden * shape.item_bytes, shape.expert_bytes)
        host = ExpertHost(self.tiers.second(kernels, deadline_s=5), self.tiers.on_disk)
        here = lambda: (self.tiers.residency.ram.where >= 0, self.tiers.on_disk)  # noqa: E731
        self.plane = DataPlane(node, f"boot-{node}", key, model, here, host, NoShelf(), store, timeout_s=5)
        self.echo: Lane[Any] = Lane(self.plane._net, "echo", ECHO, echo)
        self.ports = [*self.plane.bind("127.0.0.1"), self.echo.bind("127.0.0.1")]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for work in (self.plane.run(), self.tiers.run(), self.echo.run()):
                group.create_task(work)


def secret(public: str = "", private: str = "") -> Secret:
    pair = (public.encode(), private.encode()) if public else zmq.curve_keypair()
    return Secret(pair[1], pair[0])


def engine(node: str, told: dict[str, Any]) -> PeerEngine:
    calls, bulk = (f"{told.get('host', '127.0.0.1')}:{port}" for port in told["ports"][:2])
    return PeerEngine(node=node, boot=f"boot-{node}", key=told["public"], calls=calls, bulk=bulk)


async def serve(shape: ExpertShape, threads: int) -> None:
    """The second process: reads the other's key, says its own and its ports, serves until killed."""
    other = json.loads(sys.stdin.readline())
    box = Box("server", secret(other["server_public"], other["server_secret"]), shape, threads)
    box.plane._net.allowed.allow("client", other["public"])
    print(json.dumps({"ports": box.ports, "public": other["server_public"]}), flush=True)
    await box.run()


def work_of(shape: ExpertShape, rows: int, experts: int, rng: np.random.Generator) -> ExpertWork:
    """Every row calls each of the experts."""
    hidden = torch.from_numpy(rng.standard_normal((rows, shape.hidden)).astype(np.float32))
    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    chosen = np.sort(rng.choice(EXPERTS, experts, replace=False))
    weights = np.full(rows * experts, 1 / experts, np.float32)
    index = np.tile(np.arange(rows), experts)
    return ExpertWork(
        0, chosen, np.arange(experts + 1) * rows, index, weights, hidden.to(dtype).view(torch.uint8).numpy()
    )


def measure(box: Box, shape: ExpertShape, rows: int, experts: int, rounds: int) -> dict[str, float]:
    """On the compute thread."""
    rng, loop = np.random.default_rng(0), box.plane.calls._loop
    peer = box.plane.calls.peers["server"]
    calls: list[float] = []
    echoes: list[float] = []
    answers: SimpleQueue[RemoteCall] = SimpleQueue()
    served: list[float] = []
    peer.measure_work = lambda units, seconds: served.append(seconds)  # type: ignore[method-assign]
    for _ in range(rounds):
        work = work_of(shape, rows, experts, rng)
        _, tensors = box.plane.calls._model.call(work)
        began_s = time.perf_counter()
        box.plane.calls.call("server", work, answers)
        call = answers.get(timeout=10)
        calls.append(time.perf_counter() - began_s)
        assert call.error is None, call.error
        began_s = time.perf_counter()
        asked = box.echo.ask("server", Echo(0, rows, experts, rows * experts), tensors, timeout_s=5)
        asyncio.run_coroutine_threadsafe(asked, loop).result(10)
        echoes.append(time.perf_counter() - began_s)
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
    }


async def compare(args: argparse.Namespace, shape: ExpertShape) -> None:
    key, server_key = secret(), secret()
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        hello = {
            "public": key.public.decode(),
            "server_public": server_key.public.decode(),
            "server_secret": server_key.secret.decode(),
        }
        child.stdin.write(json.dumps(hello) + "\n")
        child.stdin.flush()
        told = json.loads(await asyncio.to_thread(child.stdout.readline))
        box = Box("client", key, shape, 1)
        running = asyncio.create_task(box.run())
        box.plane.set_peers([engine("server", told)])
        box.echo.connect(Peer("server", f"127.0.0.1:{told['ports'][2]}", told["public"]))
        async with asyncio.timeout(60):
            while not (box.echo.is_up("server") and (p := box.plane.calls.peers["server"]).ready and p.ram.all()):
                await asyncio.sleep(0.05)
        for rows in args.rows:
            await asyncio.to_thread(measure, box, shape, rows, args.experts, 20)
            found = await asyncio.to_thread(measure, box, shape, rows, args.experts, args.rounds)
            print(json.dumps(found), flush=True)
        running.cancel()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--experts", type=int, default=4, help="of one call")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = ExpertShape(1, EXPERTS, args.experts, args.hidden, args.width, bf16=not args.float32)
    asyncio.run(serve(shape, args.threads) if args.serve else compare(args, shape))
    sys.stdout.flush()
    assert threading.main_thread().is_alive()
    os._exit(0)


if __name__ == "__main__":
    main()
