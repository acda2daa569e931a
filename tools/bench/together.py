"""Three boxes that share experts, against separate boxes, and against forwarding whole requests [Prism, II-B, Table
I].

    python -m tools.bench.together --prompts DIR --width 1024 --cpus 0.6 --disk-mb 125 --seconds 40

Needs root. Arms: alone (missing experts come from the disk), redirect (requests go to the least loaded box), together
(the box with an expert computes it). All arms must give the same tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.faults import EXPERTS, common
from tools.bench.stats import core_s
from tools.testbed.bed import Bed
from tools.testbed.daemons import Answer, Cluster, Daemon
from tools.testbed.float32_model import float32_demo
from tools.testbed.limits import Limits

TASKS = {"a": "bbh_multistep_arithmetic_two", "b": "bbh_geometric_shapes", "c": "bbh_causal_judgement"}
CLIENTS = {"a": 2, "b": 1, "c": 1}
ARMS = ("alone", "redirect", "together")


def prompts_of(folder: Path, task: str, count: int, chars: int) -> list[str]:
    with gzip.open(folder / f"{task}.jsonl.gz", "rt") as file:
        return [json.loads(line)["prompt"][:chars] for line, _ in zip(file, range(count), strict=False)]


def load(daemons: Sequence[Daemon], prompts: dict[str, list[str]], tokens: int, seconds: float) -> list[Any]:
    """Returns (box, prompt, answer) of all requests that the clients sent within `seconds`."""
    done: list[tuple[str, str, Answer]] = []
    ends = time.monotonic() + seconds

    def client(daemon: Daemon, first: int) -> None:
        name, turn = daemon.box.name, first
        while time.monotonic() < ends:
            prompt = prompts[name][turn % len(prompts[name])]
            turn += CLIENTS[name]
            done.append((name, prompt, daemon.complete(prompt, tokens, timeout_s=120)))

    threads = [threading.Thread(target=client, args=(d, n)) for d in daemons for n in range(CLIENTS[d.box.name])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def summary(arm: str, done: Sequence[Any], wanted: dict[str, str], tokens: int, took_s: float) -> dict[str, Any]:
    """Returns the figures of an arm."""
    latency = {}
    for name in TASKS:
        times = [answer.took_s for box, _, answer in done if box == name]
        latency[name] = round(sum(times) / max(1, len(times)), 3)
    total = [answer.took_s for _, _, answer in done]
    return {
        "arm": arm,
        "requests": len(done),
        "wrong": sum(answer.text != wanted[prompt] for _, prompt, answer in done),
        "errors": sorted({answer.error for _, _, answer in done if answer.error}),
        "latency_s": latency | {"all": round(sum(total) / max(1, len(total)), 3)},
        "tokens_per_s": round(len(done) * tokens / took_s, 2),
    }


def run_arm(arm: str, bed: Bed, folder: Path, store: Path, prompts: dict[str, list[str]], args: Any) -> Any:
    """Starts the boxes of one arm, warms them up, measures."""
    settings = common(store, EXPERTS // 3)
    if arm != "alone":
        shares = arm == "together"
        more = {
            "cluster.share_experts": shares,
            "cluster.route": "pull" if shares else "least",
            "cluster.replicas": 1,
        }
        cluster = Cluster(bed, folder, settings | more)
        daemons = list(cluster)
    else:
        daemons = [Daemon(box, folder / box.name, settings) for box in bed.boxes.values()]
    try:
        for daemon in daemons:
            daemon.start()
        for daemon in daemons:
            daemon.wait_ready(180)
        if arm == "together":
            cluster.wait_settled(180)
        else:
            time.sleep(3)
        load(daemons, prompts, args.tokens, args.seconds / 4)
        before = [daemon.metrics() for daemon in daemons]
        pids = [pid for daemon in daemons for pid in daemon.box.pids()]
        used_s, began_s = sum(map(core_s, pids)), time.monotonic()
        done = load(daemons, prompts, args.tokens, args.seconds)
        took_s, used_s = time.monotonic() - began_s, sum(map(core_s, pids)) - used_s
        return done, took_s, used_s, [_moved(b, d.metrics()) for b, d in zip(before, daemons, strict=True)]
    finally:
        for daemon in daemons:
            daemon.close()


def _moved(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns one box's megabytes read from the disk, experts computed elsewhere, and late calls."""
    delta = {name: after[name] - before.get(name, 0.0) for name in after}
    read = sum(v for k, v in delta.items() if k.startswith("edgemoe_bytes_moved_total") and 'from="nvme"' in k)
    return {
        "read_mb": round(read / 1e6, 1),
        "remote_experts": delta.get("edgemoe_remote_experts_total", 0.0),
        "remote_stall_s": round(delta.get("edgemoe_remote_stall_seconds_total", 0.0), 2),
        "late": delta.get('edgemoe_remote_retries_total{why="late"}', 0.0),
    }


def references(folder: Path, store: Path, prompts: dict[str, list[str]], tokens: int) -> dict[str, str]:
    """Returns the answers of one box with everything in memory, without limits."""
    with Bed(["alone"]) as bed:
        daemon = Daemon(bed["alone"], folder / "big", common(store, EXPERTS))
        try:
            daemon.start()
            daemon.wait_ready()
            return {p: daemon.complete(p, tokens).text for texts in prompts.values() for p in texts}
        finally:
            daemon.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--cpus", type=float, default=0.6, help="of each box")
    parser.add_argument("--disk-mb", type=float, default=20.0, help="megabytes per second that each box reads")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each arm")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--chars", type=int, default=200, help="of each prompt")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--width", type=int, default=0, help="of the experts; 1024 makes them 2.4 MB")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-faults")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    store = float32_demo(args.work, args.width)
    prompts = {name: prompts_of(args.prompts, task, 8, args.chars) for name, task in TASKS.items()}
    limits = Limits(cpus=args.cpus, disk_bytes_per_s=int(args.disk_mb * 1e6), disk_of=store)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="together-") as scratch:
        wanted = references(Path(scratch), store, prompts, args.tokens)
        for number, arm in enumerate(args.arms.split(",")):
            with Bed(list(TASKS), limits=limits) as bed:
                done, took_s, used_s, moved = run_arm(arm, bed, Path(scratch) / f"{number}-{arm}", store, prompts, args)
            found = summary(arm, done, wanted, args.tokens, took_s)
            found |= {"core_ms_per_token": round(used_s * 1e3 / (len(done) * args.tokens), 2)}
            found |= {"boxes": dict(zip(TASKS, moved, strict=True))}
            print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
