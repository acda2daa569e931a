"""A model larger than the memory it may use: this daemon against transformers with accelerate's disk offload.

    python -m tools.bench.make_model --family qwen3_moe --layers 16 --hidden 1024 --experts 64 --expert-width 512 \
        --top-k 8 --out /tmp/model
    python -m tools.bench.offload --model /tmp/model --memory-mib 1200 --json

Both run at once, each in a memory cgroup of its own (version 1, needs root), and decode random tokens in turns, so
that noise hits both alike. With random weights the routing is nearly uniform: the worst case for any cache. The bound
is the bytes that must come from disk for a token, at the disk's rate measured in the same run. The last line is one
JSON object.
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

from edgemoe.telemetry.metrics import parse

console = Console(stderr=True)
CGROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_cgroup(name: str, limit_bytes: int) -> Iterator[Path]:
    """A version 1 memory cgroup with page cache counted in, removed at the end."""
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
    """transformers with what fits in RAM and the rest offloaded to disk. Speaks lines of JSON with a child."""

    def __init__(self, model: Path, cgroup: Path, ram_mib: int, scratch: Path) -> None:
        command = [sys.executable, "-m", "tools.bench.offload", "--child", str(ram_mib), "--model", str(model)]
        self.child = spawn([*command, "--scratch", str(scratch)], cgroup, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read()

    def decode(self, tokens: int) -> float:
        """Seconds per token over `tokens` decode steps."""
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
    """The process behind `Accelerate`."""
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

    def __init__(self, store: Path, cgroup: Path, ram_mib: int, scratch: Path) -> None:
        socket = str(scratch / "api.sock")
        command = [sys.executable, "-m", "edgemoe", "serve", "--model", str(store), "--set", f"api.socket={socket}"]
        settings = (
            f"memory.ram_bytes={ram_mib}MiB",
            "memory.kv_bytes=32MiB",
            "memory.headroom_bytes=0",
            "device.0.kind=cpu",
            "engine.prefix_cache=false",
            "engine.context_tokens=2048",
        )
        self.log = (scratch / "daemon.log").open("w")
        sets = [word for setting in settings for word in ("--set", setting)]
        self.child = spawn([*command, *sets], cgroup, stdout=self.log, stderr=self.log)
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://edgemoe", timeout=600)
        self._wait(scratch / "daemon.log")
        self.rng = np.random.default_rng(0)
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

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

    def decode(self, tokens: int) -> float:
        """Seconds per token, first token left out. A new random prompt each time; sampling is uniform."""
        body = {
            "model": self.model,
            "prompt": self.rng.integers(0, 1000, 8).tolist(),
            "max_tokens": tokens + 1,
            "min_tokens": tokens + 1,
            "ignore_eos": True,
            "temperature": 2.0,
            "stream": True,
        }
        times = []
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"the daemon refused: {response.read()!r}")
            for line in response.iter_lines():
                if line.startswith("data: {") and '"finish_reason":null' in line.replace(" ", ""):
                    times.append(time.perf_counter())
        return (times[-1] - times[0]) / (len(times) - 1)

    def metrics(self) -> dict[str, float]:
        return parse(self.client.get("/metrics").text)

    def close(self) -> None:
        self.child.terminate()
        self.child.wait(60)
        self.log.close()


def disk_bytes_per_s(path: Path, total_bytes: int = 1 << 30) -> float:
    """Rate of direct reads of 4 MiB, one after the other on two threads, from the largest file below `path`."""
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
    limit = args.memory_mib << 20
    subprocess.run([sys.executable, "-m", "edgemoe", "pack", str(args.model), str(scratch / "store")], check=True)
    for name in ("offload", "run"):
        (scratch / name).mkdir()
    disk = disk_bytes_per_s(scratch / "store")
    with ExitStack() as stack:
        group = [stack.enter_context(memory_cgroup(name, limit)) for name in ("accelerate", "edgemoe")]
        theirs = Accelerate(args.model, group[0], args.accelerate_ram_mib, scratch / "offload")
        stack.callback(theirs.close)
        ours = Edgemoe(scratch / "store", group[1], args.ram_mib, scratch / "run")
        stack.callback(ours.close)
        ours.decode(args.tokens)  # fills the slab
        before = ours.metrics()
        rounds = [
            (theirs.decode(args.accelerate_tokens), ours.decode(args.tokens))
            for _ in track(range(args.rounds), "rounds", console=console)
        ]
        after = ours.metrics()
        peak = int((group[1] / "memory.max_usage_in_bytes").read_text())
    return summarise(rounds, before, after, disk, peak, args)


def summarise(
    rounds: list[tuple[float, float]],
    before: dict[str, float],
    after: dict[str, float],
    disk: float,
    peak: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    delta = {name: after[name] - before.get(name, 0.0) for name in after}
    read = sum(v for k, v in delta.items() if k.startswith("edgemoe_bytes_moved_total") and 'from="nvme"' in k)
    per_token = read / (args.rounds * (args.tokens + 1))
    theirs, ours = (median(times) * 1000 for times in zip(*rounds, strict=True))
    return {
        "memory_mib": args.memory_mib,
        "accelerate_ms_per_token": round(theirs, 1),
        "edgemoe_ms_per_token": round(ours, 1),
        "ratio": round(median(a / b for a, b in rounds), 2),
        "rounds": [[round(a * 1000, 1), round(b * 1000, 1)] for a, b in rounds],
        "disk_gb_per_s": round(disk / 1e9, 2),
        "read_mb_per_token": round(per_token / 1e6, 1),
        "bound_ms_per_token": round(per_token / disk * 1000, 1),
        "peak_mib": peak >> 20,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"decode inside {result['memory_mib']} MiB")
    for column in ("", "ms/token"):
        table.add_column(column, justify="right")
    table.add_row("transformers + accelerate", f"{result['accelerate_ms_per_token']:.0f}")
    table.add_row("edgemoe", f"{result['edgemoe_ms_per_token']:.0f}")
    table.add_row(
        f"bound: {result['read_mb_per_token']:.0f} MB at the disk's rate", f"{result['bound_ms_per_token']:.0f}"
    )
    console.print(table, f"ratio {result['ratio']:.1f}x")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    p.add_argument("--memory-mib", type=int, default=1200, help="memory limit of each side, page cache included")
    p.add_argument("--ram-mib", type=int, default=620, help="of it, our slab of experts")
    p.add_argument("--accelerate-ram-mib", type=int, default=500, help="of it, what accelerate keeps in RAM")
    p.add_argument("--tokens", type=int, default=24, help="tokens per round, ours")
    p.add_argument("--accelerate-tokens", type=int, default=3, help="tokens per round, theirs")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", action="store_true", help="print only the JSON line on standard output")
    p.add_argument("--scratch", type=Path, help="folder for the packed store and offload files")
    p.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.child:
        accelerate_child(args.model, args.child, args.scratch)
        return 0
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="offload-") as scratch:
        result = measure(args, Path(scratch))
    show(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
