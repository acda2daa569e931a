"""A long run of ordinary and rude clients against a running daemon: no request may fail, no resource may leak.

    python -m tools.bench.soak --socket /run/edgemoe/edgemoe.sock --pid PID --rate 2 --minutes 30
    python -m tools.bench.soak --hostile-peer 100 --minutes 30      # three hostile peers of a daemon of its own

Memory, files, threads and gauges are sampled. At the end the daemon must be idle. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from edgemoe.telemetry.metrics import parse, select
from tools.fuzzing.fuzz_channel import WHATS, hostile, presence
from tools.fuzzing.peer import HostilePeer
from tools.fuzzing.target import Target, target

console = Console(stderr=True)
MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("bad JSON", b'{"model": '),
    ("no messages", b"{}"),
    ("wrong type", b'{"model": "M", "messages": "hello"}'),
    ("unknown model", b'{"model": "no-such-model", "messages": [{"role": "user", "content": "hi"}]}'),
    ("negative max_tokens", b'{"model": "M", "messages": [{"role": "user", "content": "hi"}], "max_tokens": -4}'),
    ("not UTF-8", b'{"model": "\xff\xfe"}'),
    ("deep nesting", b"[" * 5000),
)
WORDS = [
    "the",
    "box",
    "serves",
    "experts",
    "from",
    "memory",
    "while",
    "apps",
    "wait",
    "for",
    "tokens",
    "and",
    "nothing",
    "is",
    "lost",
    "when",
    "a",
    "peer",
    "dies",
]
IDLE_GAUGES = (
    "edgemoe_live_requests",
    "edgemoe_num_requests_running",
    "edgemoe_num_requests_waiting",
    "edgemoe_kv_blocks_referenced",
)


class Soak:
    """Sends requests at `rate` per second for `seconds`, and counts the answers by kind."""

    def __init__(self, client: httpx.AsyncClient, model: str, rate: float, seconds: float, seed: int) -> None:
        self.client, self.model, self.rate, self.seconds = client, model, rate, seconds
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.took_s: list[float] = []  # requests that were read to their end

    async def run(self) -> None:
        ends = time.monotonic() + self.seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < ends:
                group.create_task(self._one(self.random.random()))
                await asyncio.sleep(self.random.expovariate(self.rate))

    async def _one(self, dice: float) -> None:
        try:
            async with asyncio.timeout(120):
                await (self._malformed() if dice < 0.15 else self._chat(hang_up=dice < 0.4, stream=dice < 0.85))
        except (httpx.HTTPError, TimeoutError) as error:
            self._wrong(repr(error))

    async def _malformed(self) -> None:
        name, body = self.random.choice(MALFORMED)
        body = body.replace(b'"M"', json.dumps(self.model).encode())
        headers = {"content-type": "application/json"}
        response = await self.client.post("/v1/chat/completions", content=body, headers=headers)
        self.counts["malformed"] += 1
        if not 400 <= response.status_code < 500 or "error" not in response.json():
            self._wrong(f"{name}: status {response.status_code}: {response.text[:200]}")

    async def _chat(self, hang_up: bool, stream: bool) -> None:
        text = " ".join(self.random.choices(WORDS, k=self.random.randint(3, 120)))
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.random.randint(4, 48),
            "temperature": self.random.choice((0.0, 0.8)),
            "stream": stream or hang_up,
        }
        began_s = time.monotonic()
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code == 429:
                self.counts["rejected"] += 1
                return
            if response.status_code != 200:
                self._wrong(f"status {response.status_code}: {(await response.aread())[:200]!r}")
                return
            await (self._hang_up(response) if hang_up else self._read(response, stream))
        if not hang_up:
            self.took_s.append(time.monotonic() - began_s)

    async def _hang_up(self, response: httpx.Response) -> None:
        lines = response.aiter_lines()
        for _ in range(self.random.randint(1, 8)):
            await anext(lines, None)
        self.counts["hung up"] += 1

    async def _read(self, response: httpx.Response, stream: bool) -> None:
        text = (await response.aread()).decode()
        ended = text.rstrip().endswith("data: [DONE]") if stream else "choices" in json.loads(text)
        self.counts["completed"] += ended
        if not ended or '"error"' in text:
            self._wrong(f"unfinished: {text[-200:]}")

    def _wrong(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.unexpected) < 20:
            self.unexpected.append(what)


def process_tree(root: int) -> list[int]:
    """Returns `root` and its descendants."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def sample(pids: list[int]) -> dict[str, float]:
    """Returns resident bytes, open files and threads of each live process, by its program."""
    taken: defaultdict[str, float] = defaultdict(float)
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):  # it has just ended
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            runs = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            taken[f"rss_mb.{runs}"] += round(int(status["VmRSS"].split()[0]) / 1024, 2)
            taken[f"threads.{runs}"] += int(status["Threads"])
            taken[f"files.{runs}"] += files
    return dict(taken)


async def watch(pid: int, samples: list[dict[str, float]], every_s: float, seconds: float) -> None:
    started = time.monotonic()
    with Progress(TextColumn("soak"), BarColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("soak", total=seconds)
        while (elapsed := time.monotonic() - started) < seconds:
            samples.append({"at_s": elapsed, **sample(process_tree(pid))})
            progress.update(bar, completed=elapsed)
            await asyncio.sleep(every_s)


def growth(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns first-quarter mean (without warm-up), last-quarter mean and slope per hour of every series.

    Processes that come and go count while they live.
    """
    settled = [s for s in samples if s["at_s"] > samples[-1]["at_s"] * 0.1]
    result = {}
    for key in set[str]().union(*settled) - {"at_s"}:
        values = np.array([s[key] for s in settled if key in s])
        hours = np.array([s["at_s"] for s in settled if key in s]) / 3600
        quarter = max(1, len(values) // 4)
        slope = float(np.polyfit(hours, values, 1)[0]) if len(values) > 2 else 0.0
        ends = float(values[:quarter].mean()), float(values[-quarter:].mean())
        result[key] = {"early": round(ends[0], 1), "late": round(ends[1], 1), "per_hour": round(slope, 2)}
    return dict(sorted(result.items()))


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    return parse((await client.get("/metrics")).text)


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    transport = httpx.AsyncHTTPTransport(uds=args.socket, limits=httpx.Limits(max_connections=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=None) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        load = Soak(client, model, args.rate, args.minutes * 60, args.seed)
        samples: list[dict[str, float]] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(args.pid, samples, args.every_s, args.minutes * 60))
            group.create_task(load.run())
        await asyncio.sleep(3)
        after = await gauges(client)
    left = {name: value for name in IDLE_GAUGES if (value := select(after, name))}
    return {
        "minutes": args.minutes,
        "rate": args.rate,
        "counts": dict(load.counts),
        "unexpected": load.unexpected,
        "p50_s": round(float(np.percentile(load.took_s or [0.0], 50)), 3),
        "p99_s": round(float(np.percentile(load.took_s or [0.0], 99)), 3),
        "left_behind": left,
        "integrity_errors": sum(v for k, v in after.items() if k.startswith("edgemoe_integrity_errors")),
        "growth": growth(samples),
    }


@contextmanager
def hostile_peers(box: Target, rate: float, seed: int) -> Iterator[list[HostilePeer]]:
    """Runs a hostile peer on each channel of the box, each with a thread of its own; none if `rate` is 0."""
    peers, over = [hostile(box, channel, seed) for channel in WHATS if rate], threading.Event()

    def send(peer: HostilePeer) -> None:
        while not over.wait(1 / rate):
            peer.send()

    threads = [threading.Thread(target=send, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    try:
        with presence(box, peers[WHATS.index("control")], seed) if peers else nullcontext():
            yield peers
    finally:
        over.set()
        for thread in threads:
            thread.join(10)
        for peer in peers:
            peer.close()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--socket", help="the daemon's Unix socket")
    p.add_argument("--pid", type=int, help="process id of the daemon")
    p.add_argument("--hostile-peer", type=float, metavar="RATE", help="with a daemon of its own; see above")
    p.add_argument("--rate", type=float, default=1.0, help="requests per second")
    p.add_argument("--minutes", type=float, default=30.0)
    p.add_argument("--every-s", type=float, default=5.0, help="seconds between samples")
    p.add_argument("--seed", type=int, default=0)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.hostile_peer is None and not (args.socket and args.pid):
        parser().error("name a daemon with --socket and --pid, or give --hostile-peer")
    if args.hostile_peer is None:
        result = asyncio.run(soak(args))
    else:
        with target() as (box, child), hostile_peers(box, args.hostile_peer, args.seed) as peers:
            args.socket, args.pid = str(box.folder / "api.sock"), child.pid
            result = asyncio.run(soak(args)) | {"hostile_messages": sum(peer.sent for peer in peers)}
    console.print_json(data=result["growth"])
    print(json.dumps(result))
    return 1 if result["unexpected"] or result["left_behind"] or result["integrity_errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
