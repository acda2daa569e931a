"""What recording costs: two running daemons, alike but for record.dir, asked in turn.

    python -m tools.bench.recording [--pairs 60] [--starts 4] [--tokens 256]

A pair is the same greedy completion from both, one right after the other, in random order; the figure is the time that
the client waits. Daemons are started anew `--starts` times, in alternating order, so that where a process happens to
lie in memory is not taken for a cost. Prints the overhead with a 95 % interval over pairs, and over starts.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
from scipy.stats import binom
from scipy.stats import t as student

from edgemoe import demo
from edgemoe.cli.client import Client
from edgemoe.pack import ensure_store
from tools.demo import daemon, wait_until_ready

WARM = 5  # completions of each daemon that are not counted


def ask(client: httpx.Client, number: int, tokens: int) -> float:
    """Seconds that one completion takes."""
    body = {"prompt": f"number {number}", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began_s = time.perf_counter()
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == tokens
    return time.perf_counter() - began_s


def pairs(store: Path, start: int, count: int, tokens: int) -> list[float]:
    """log(time with recording / time without) of each pair, from two fresh daemons."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="edgemoe-recording-")))
        clients = {}
        for records in (bool(start % 2), not start % 2):
            name = "with" if records else "without"
            socket = folder / name / "edgemoe.sock"
            socket.parent.mkdir()
            sets = {"device.0.kind": "cpu", "memory.kv_bytes": "16MiB", "engine.threads": 1}
            sets |= {"memory.ram_bytes": "64MiB", "memory.headroom_bytes": "64MiB"}
            sets |= {"record.dir": folder / "records"} if records else {}
            command = [sys.executable, "-m", "edgemoe", "serve", "--model", str(store), "--socket", str(socket)]
            command += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
            process = opened.enter_context(daemon(command, folder / name / "log"))
            with Client(socket) as client:
                wait_until_ready(process, client)
            transport = httpx.HTTPTransport(uds=str(socket))
            clients[name] = opened.enter_context(httpx.Client(transport=transport, base_url="http://e", timeout=60))
            for number in range(WARM):
                ask(clients[name], number, tokens)
        rng = random.Random(start)
        ratios = []
        for number in range(count):
            took_s = {name: ask(clients[name], number, tokens) for name in rng.sample(list(clients), 2)}
            ratios.append(math.log(took_s["with"] / took_s["without"]))
        assert any((folder / "records").glob("*.routes"))
        return ratios


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval."""
    mean, half = statistics.fmean(values), 0.0
    if len(values) > 1:
        half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def median(values: list[float]) -> tuple[float, float, float]:
    """Median and 95 % interval, from ranks alone: what else ran on the machine does not widen it."""
    below = int(binom.ppf(0.025, len(values), 0.5))
    ranked = sorted(values)
    return statistics.median(values), ranked[max(0, below - 1)], ranked[min(len(values) - 1, len(values) - below)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60, help="at each start")
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    store = ensure_store(demo.model_path(), Path(".cache/stores"))
    starts = [pairs(store, start, options.pairs, options.tokens) for start in range(options.starts)]
    every = [ratio for ratios in starts for ratio in ratios]
    by_start = [statistics.median(ratios) for ratios in starts]
    for what, figures in (
        ("mean of all pairs", interval(every)),
        ("median of all pairs", median(every)),
        ("mean of the starts' medians", interval(by_start)),
    ):
        figure, low, high = (f"{100 * math.expm1(value):+.2f} %" for value in figures)
        print(f"{what}: {figure} [{low}, {high}]")


if __name__ == "__main__":
    main()
