"""Models larger than their memory: this daemon, and transformers with accelerate's disk offload.

    python -m tools.bench.offload --store /tmp/bf16 --store /tmp/int4 --checkpoint /tmp/model --json

Each runs in a memory cgroup (version 1, needs root) and decodes random tokens in turns. The bound is the time to read a
token's missing bytes at the disk's median rate. `speed` is relative to the first store.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edgemoe.store.manifest import Manifest
from edgemoe.telemetry.metrics import BYTES_MOVED, TIER_EXPERTS, TIER_HITS, TIER_SLOTS, named, parse

console = Console(stderr=True)
CGROUPS = Path("/sys/fs/cgroup/memory")
FILL_S = 120.0  # allowed for filling a slab


@contextmanager
def memory_cgroup(name: str, limit_bytes: int) -> Iterator[Path]:
    """Makes a version 1 memory cgroup, page cache included, and removes it at the end."""
    path = CGROUPS / f"edgemoe-{name}-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        raise SystemExit(f"{path}: cannot limit memory ({error}); this benchmark needs root and cgroup v1") from error
    try:
        yield path
    finally:
        for _ in range(50):
            try:
                path.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def spawn(command: list[str], cgroup: Path, **kwargs: Any) -> subprocess.Popen[str]:
    """Starts `command` inside `cgroup`, from its first instruction on."""
    joined = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *command]
    return subprocess.Popen(joined, text=True, **kwargs)


class Accelerate:
    """transformers with as much as fits in RAM, and the rest offloaded to disk. Speaks lines of JSON with a child."""

    def __init__(self, model: Path, cgroup: Path, ram_mib: int, scratch: Path) -> None:
        command = [sys.executable, "-m", "tools.bench.offload", "--child", str(ram_mib), "--checkpoint", str(model)]
        self.child = spawn([*command, "--scratch", str(scratch)], cgroup, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read()

    def decode(self, tokens: int) -> float:
        """Returns seconds per token over `tokens` decode steps."""
        assert self.child.stdin
        self.child.stdin.write(f"{tokens}\n")
        self.child.stdin.flush()
        return float(self._read()["s_per_token"])

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"accelerate's process ended with {self.child.wait()}; give it more memory")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self.child.stdin
        self.child.stdin.close()
        self.child.wait(60)


def accelerate_child(model: Path, ram_mib: int, scratch: Path) -> None:
    """Runs the process behind `Accelerate`."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    limits = {"cpu": f"{ram_mib}MiB"}
    transport = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, device_map="auto", max_memory=limits, offload_folder=str(scratch)
    )
    with torch.inference_mode():
        past = transport(torch.randint(0, transport.config.vocab_size, (1, 8)), use_cache=True).past_key_values
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            started = time.perf_counter()
            for _ in range(int(line)):
                transport(torch.randint(0, transport.config.vocab_size, (1, 1)), past_key_values=past, use_cache=True)
            print(json.dumps({"s_per_token": (time.perf_counter() - started) / int(line)}), flush=True)


class Edgemoe:
    """This daemon, as a user runs it, answering over its socket."""

    def __init__(self, store: Path, cgroup: Path, ram_mib: int, headroom_mib: int, scratch: Path) -> None:
        socket, started = str(scratch / "api.sock"), time.perf_counter()
        command = [sys.executable, "-m", "edgemoe", "serve", "--model", str(store), "--set", f"api.socket={socket}"]
        settings = (
            *([f"memory.ram_bytes={ram_mib}MiB"] if ram_mib else []),
            "memory.kv_bytes=32MiB",
            f"memory.headroom_bytes={headroom_mib}MiB",
            "device.0.kind=cpu",
            "engine.prefix_cache=false",
            "engine.context_tokens=2048",
        )
        self.log = (scratch / "daemon.log").open("w")
        sets = [word for setting in settings for word in ("--set", setting)]
        self.child = spawn([*command, *sets], cgroup, stdout=self.log, stderr=self.log)
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://edgemoe", timeout=600)
        self._wait(scratch / "daemon.log")
        self.ready_s = time.perf_counter() - started
        self.rng = np.random.default_rng(0)
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]
        self.filled_s = self._fill(started)
        self.name, self.moved = store.name, dict[str, float]()  # metrics' growth while tokens were decoded
        self.experts = sum(len(layer.experts) for layer in Manifest.read(store).layers)

    def _wait(self, log: Path) -> None:
        for _ in range(1200):
            if self.child.poll() is not None:
                break
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"the daemon did not become ready:\n{log.read_text()[-2000:]}")

    def _fill(self, started: float) -> float:
        """Returns the seconds from the start until the slab is full; it fills in idle time."""
        slots, full = (named(family, tier="ram") for family in (TIER_SLOTS, TIER_EXPERTS))
        while (found := self.metrics())[full] < found[slots] and time.perf_counter() - started < FILL_S:
            time.sleep(0.1)
        return time.perf_counter() - started

    def decode(self, tokens: int) -> float:
        """Returns seconds per token after a new random prompt, without the first token, here and in `moved`."""
        body = {
            "model": self.model,
            "prompt": self.rng.integers(0, 1000, 8).tolist(),
            "max_tokens": tokens + 1,
            "min_tokens": tokens + 1,
            "ignore_eos": True,
            "temperature": 2.0,
            "stream": True,
        }
        times = list[float]()
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"the daemon refused: {response.read()!r}")
            for line in response.iter_lines():
                if line.startswith("data: {") and '"finish_reason":null' in line.replace(" ", ""):
                    times.append(time.perf_counter())
                    if len(times) == 1:
                        before = self.metrics()
        for key, value in self.metrics().items():
            self.moved[key] = self.moved.get(key, 0.0) + value - before.get(key, 0.0)
        return (times[-1] - times[0]) / (len(times) - 1)

    def metrics(self) -> dict[str, float]:
        return parse(self.client.get("/metrics").text)

    def close(self) -> None:
        self.child.terminate()
        self.child.wait(60)
        self.log.close()


def disk_bytes_per_s(path: Path, total_bytes: int = 1 << 28) -> float:
    """Returns the rate of direct reads of 4 MiB, on two threads, from the largest file under `path`."""
    from concurrent.futures import ThreadPoolExecutor

    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    size, chunk = largest.stat().st_size, 4 << 20
    offsets = [n * chunk % (size - chunk) // 4096 * 4096 for n in range(total_bytes // chunk)]

    def read(part: list[int]) -> None:
        fd = os.open(largest, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, chunk) as buffer:
            for offset in part:
                os.preadv(fd, [buffer], offset)
        os.close(fd)

    started = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, (offsets[n::4] for n in range(4))))
    return len(offsets) * chunk / (time.perf_counter() - started)


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    limit, names = args.memory_mib << 20, [str(store) for store in args.store]
    with ExitStack() as stack:
        theirs = accelerate(args, scratch, stack) if args.checkpoint else None
        ours: dict[str, Edgemoe] = {}
        groups = {}
        for number, name in enumerate(names):
            (scratch / f"run-{number}").mkdir()
            groups[name] = stack.enter_context(memory_cgroup(f"edgemoe-{number}", limit))
            ours[name] = Edgemoe(Path(name), groups[name], args.ram_mib, args.headroom_mib, scratch / f"run-{number}")
            stack.callback(ours[name].close)
            ours[name].decode(args.tokens)  # fills the slab
            ours[name].moved.clear()
        rounds: dict[str, list[float]] = {name: [] for name in names}
        accelerated, disks = [], []
        for _ in track(range(args.rounds), "rounds", console=console):
            disks.append(disk_bytes_per_s(args.store[0]))
            accelerated += [theirs.decode(args.accelerate_tokens)] if theirs else []
            for name, each in ours.items():
                rounds[name].append(each.decode(args.tokens))
        tokens, disk = args.rounds * args.tokens, median(disks)
        found = [summarise(each, tokens, disk, rounds[name], rounds[names[0]]) for name, each in ours.items()]
        for name, one in zip(names, found, strict=True):
            one["peak_mib"] = int((groups[name] / "memory.max_usage_in_bytes").read_text()) >> 20
    result: dict[str, Any] = {"memory_mib": args.memory_mib, "disk_gb_per_s": round(disk / 1e9, 2), "stores": found}
    if accelerated:
        result["accelerate_ms_per_token"] = round(median(accelerated) * 1000, 1)
    return result


def accelerate(args: argparse.Namespace, scratch: Path, stack: ExitStack) -> Accelerate:
    """Starts transformers with accelerate, in a cgroup of its own."""
    (scratch / "offload").mkdir()
    group = stack.enter_context(memory_cgroup("accelerate", args.memory_mib << 20))
    theirs = Accelerate(args.checkpoint, group, args.accelerate_ram_mib, scratch / "offload")
    stack.callback(theirs.close)
    return theirs


def summarise(daemon: Edgemoe, tokens: int, disk: float, taken: list[float], first: list[float]) -> dict[str, Any]:
    """Returns the figures of one store; `first` are the times of the store to compare with."""
    moved = daemon.moved
    read = sum(value for key, value in moved.items() if key.startswith(BYTES_MOVED) and 'from="nvme"' in key)
    per_token, ms = read / tokens, median(taken) * 1000
    slots = daemon.metrics()[named(TIER_SLOTS, tier="ram")]
    hits, misses = (moved[named(TIER_HITS, tier=tier)] for tier in ("ram", "nvme"))
    return {
        "store": daemon.name,
        "resident": round(slots / daemon.experts, 3),
        "hit_ratio": round(hits / (hits + misses), 3),
        "ms_per_token": round(ms, 1),
        "speed": round(median(a / b for a, b in zip(first, taken, strict=True)), 2),
        "rounds_ms": [round(each * 1000, 1) for each in taken],
        "read_mb_per_token": round(per_token / 1e6, 1),
        "bound_ms_per_token": round(per_token / disk * 1000, 1),
        "ready_s": round(daemon.ready_s, 1),
        "filled_s": round(daemon.filled_s, 1),
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"decode inside {result['memory_mib']} MiB")
    for column in ("", "ms/token", "bound", "times the first"):
        table.add_column(column, justify="right")
    for each in result["stores"]:
        table.add_row(each["store"], *(f"{each[key]:.1f}" for key in ("ms_per_token", "bound_ms_per_token", "speed")))
    if "accelerate_ms_per_token" in result:
        table.add_row("transformers + accelerate", f"{result['accelerate_ms_per_token']:.0f}")
    console.print(table)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--store", type=Path, action="append", help="packed store; given once for each to compare")
    p.add_argument("--checkpoint", type=Path, help="Hugging Face checkpoint for transformers and accelerate")
    p.add_argument("--memory-mib", type=int, default=1200, help="memory limit of each side, page cache included")
    p.add_argument("--ram-mib", type=int, default=620, help="of it, our slab of experts; 0: what the daemon decides")
    p.add_argument("--headroom-mib", type=int, default=150, help="of it, what the daemon leaves free beside its slabs")
    p.add_argument("--accelerate-ram-mib", type=int, default=500, help="of it, what accelerate keeps in RAM")
    p.add_argument("--tokens", type=int, default=24, help="tokens per round, ours")
    p.add_argument("--accelerate-tokens", type=int, default=3, help="tokens per round, theirs")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", action="store_true", help="print only the JSON line on standard output")
    p.add_argument("--scratch", type=Path, help="folder for sockets, logs and offload files")
    p.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.child:
        accelerate_child(args.checkpoint, args.child, args.scratch)
        return 0
    if not args.store:
        raise SystemExit("name at least one packed store with --store")
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="offload-") as scratch:
        result = measure(args, Path(scratch))
    show(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
