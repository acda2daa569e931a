"""Sends mutated messages to the three channels of a box: it must not crash, nor accept a wrong message.

    python -m tools.bench.frames --frames 1000000

Changes: bits, lengths, frames dropped, doubled, swapped or invented. One in four gets a valid checksum afterwards; if
it is readable by chance it is counted apart. At the end every channel must still answer. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zmq

from edgemoe.cluster.control.messages import CONTROL, Announce, Heartbeat
from edgemoe.cluster.data.messages import BULK, EXPERT_CALLS, ExpertCall, FetchExpert, Hello
from edgemoe.cluster.rpc import envelope
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Envelope, Question, seal, unseal
from edgemoe.cluster.rpc.keys import AllowList, Secret
from edgemoe.cluster.rpc.transport import Transport
from edgemoe.wire.protocol import MessageLanguage

CHANNELS: dict[str, MessageLanguage[Any]] = {"control": CONTROL, "calls": EXPERT_CALLS, "bulk": BULK}
MARK = 5.0e5  # the remaining_ms of messages with valid checksums
Frames = list[bytes]


def serve_child() -> None:
    """Runs the box: reads keys, prints its ports, serves; prints its counts when standard input ends."""
    keys = json.loads(sys.stdin.readline())
    asyncio.run(_serve(keys))


async def _serve(keys: dict[str, str]) -> None:
    transport = Transport(
        "box", "boot", Secret(keys["secret"].encode(), keys["public"].encode()), AllowList({"peer": (keys["peer"],)})
    )
    taken = {"wrong": 0, "possible": 0}

    async def serve(question: Question[Any]) -> Answer[Any]:
        if question.envelope.id == 1:
            return Answer(question.message)
        taken["possible" if question.envelope.remaining_ms == MARK else "wrong"] += 1
        return Answer(question.message)

    channels: dict[str, Channel[Any]] = {
        name: Channel(transport, name, language, serve) for name, language in CHANNELS.items()
    }
    print(json.dumps({name: channel.bind("127.0.0.1") for name, channel in channels.items()}), flush=True)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for _ in sys.stdin:
            seen = {
                **taken,
                "rejected": sum(channel.mishaps.rejected for channel in channels.values()),
                "rss_mb": _rss_mb(),
            }
            print(json.dumps(seen), flush=True)
        loop.call_soon_threadsafe(told.set)

    threading.Thread(target=listen, daemon=True).start()
    tasks = [asyncio.create_task(work) for work in (transport.run(), *(channel.run() for channel in channels.values()))]
    await told.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    transport.close()


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 1e6, 1)


def originals() -> dict[str, list[tuple[msgspec.Struct, list[bytes]]]]:
    """Returns messages of each channel, with their tensors. Returns the message with some changes."""
    index = np.array([3, 5, 1, 1, 0, 0, 1065353216, 1065353216], np.int32).tobytes()
    bits = bytes(24)
    return {
        "control": [
            (Heartbeat(), []),
            (Announce(release="1", role="box", address="192.0.2.1:1", devices=("cpu",)), []),
        ],
        "calls": [
            (Hello("d" * 32, 6, 32, 768, 147456, bits, bits), [b"probe" * 50]),
            (ExpertCall(1, 1, 2, 2), [bytes(768), index]),
        ],
        "bulk": [(FetchExpert(1, 2, 0, 4096), [])],
    }


def mutate(frames: Sequence[bytes], rng: random.Random) -> Frames:
    """Returns the message with some changes."""
    changed = [bytearray(frame) for frame in frames]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        victim = rng.randrange(len(changed))
        frame = changed[victim]
        match rng.randrange(8):
            case 0 | 1 | 2 if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 3 if frame:
                del frame[rng.randrange(len(frame)) :]
            case 4:
                frame += rng.randbytes(rng.randrange(1, 200))
            case 5:
                changed.insert(rng.randrange(len(changed) + 1), bytearray(frame))
            case 6 if len(changed) > 1:
                del changed[victim]
            case _:
                changed[victim] = bytearray(rng.randbytes(rng.randrange(0, 300)))
    return [bytes(frame) for frame in changed]


def resealed(frames: Sequence[bytes], rng: random.Random) -> Frames:
    """Returns the message with a changed body and a valid checksum."""
    head = unseal(frames)
    body = bytearray(bytes(head.body))
    for _ in range(rng.randrange(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    row = msgspec.structs.replace(head, body=msgspec.Raw(bytes(body)), remaining_ms=MARK)
    packed = _pack(row)
    return [envelope.HEAD.pack(envelope.MAGIC, envelope.FRAMING, xxhash.xxh3_64_digest(packed)) + packed, *frames[1:]]


def _pack(row: Envelope) -> bytes:
    return msgspec.msgpack.encode(row)


def attack(total: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    (public, secret), (peer_public, peer_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    command = [sys.executable, "-m", "tools.bench.frames", "--child"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"public": public.decode(), "secret": secret.decode(), "peer": peer_public.decode()}))
    child.stdin.write("\n")
    child.stdin.flush()
    ports = json.loads(child.stdout.readline())
    context = zmq.Context()
    sockets = {}
    for name in CHANNELS:
        socket = sockets[name] = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDTIMEO, 20_000)
        socket.set(zmq.RCVTIMEO, 20_000)
        socket.set(zmq.IDENTITY, b"peer:boot")
        socket.set(zmq.CURVE_SERVERKEY, public)
        socket.set(zmq.CURVE_PUBLICKEY, peer_public)
        socket.set(zmq.CURVE_SECRETKEY, peer_secret)
        socket.connect(f"tcp://127.0.0.1:{ports[name]}")
    pool = [
        (name, [bytes(frame) for frame in seal(body, tensors, id=9, remaining_ms=1000)])
        for name, messages in originals().items()
        for body, tensors in messages
    ]

    def ask() -> dict[str, Any]:
        """Returns the box's state, once it has read all messages and every channel has answered."""
        for name, messages in originals().items():
            body, tensors = messages[0]
            sockets[name].send_multipart([bytes(frame) for frame in seal(body, tensors, id=1, remaining_ms=1000)])
            while unseal(sockets[name].recv_multipart()).id != 1:
                pass
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("how are you\n")
        child.stdin.flush()
        return dict(json.loads(child.stdout.readline()))

    broken = whole = unchanged = 0
    try:
        early: dict[str, Any] = {}
        for number in range(total):
            name, frames = rng.choice(pool)
            if rng.random() < 0.25:
                changed = resealed(frames, rng)
                whole += 1
            else:
                changed = mutate(frames, rng)
                if changed == frames:
                    unchanged += 1
                    continue
                broken += 1
            sockets[name].send_multipart(changed)
            if number == min(total - 1, 20_000):
                early = ask()
        late = ask()
    finally:
        alive = child.poll() is None
        child.stdin.close()
        for socket in sockets.values():
            socket.close(0)
        context.term()
        status = child.wait(30)
        child.stdout.close()
    return {
        "broken": broken,
        "broken_taken": late["wrong"],
        "right_sums": whole,
        "right_sums_possible": late["possible"],
        "rejected": late["rejected"],
        "alive": alive,
        "exit": status,
        "rss_mb_early": early["rss_mb"],
        "rss_mb_late": late["rss_mb"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve_child()
        return 0
    found = attack(args.frames, args.seed)
    print(json.dumps(found))
    return 0 if found["alive"] and not found["broken_taken"] and not found["exit"] else 1


if __name__ == "__main__":
    sys.exit(main())
