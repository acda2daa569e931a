"""One box's tokens with two idle boxes beside it, and without them: the choices of the guard of help, and their cost.

    python -m tools.bench.helped --link 1000 --disk-mb 125 --width 1024 --rounds 12

Needs root. Each round asks a box alone and a box of three for the same answer, in alternating order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import select
from tools.bench.faults import EXPERTS, common
from tools.testbed.bed import Bed
from tools.testbed.daemons import Cluster, Daemon
from tools.testbed.float32_model import float32_demo
from tools.testbed.limits import Limits

BEGINNINGS = ("The kitchen", "A river", "My brother", "Winter", "The old ship", "Numbers", "A garden", "The teacher")


def asked(daemon: Daemon, prompt: str, tokens: int) -> tuple[float, str]:
    """Returns the milliseconds of each token after the first, and the text."""
    answer = daemon.complete(prompt, tokens, timeout_s=120)
    times = answer.times_s
    return 1e3 * (times[-1] - times[0]) / max(1, len(times) - 1), answer.text


def help_of(daemon: Daemon) -> tuple[float, float]:
    """Returns the layer-steps that lacked experts and were computed alone, and with help."""
    values = daemon.metrics()
    alone, helped = (select(values, names.REMOTE_PLANS, tokens="few", plan=plan) for plan in ("alone", "helped"))
    return alone, helped


def decision(daemon: Daemon) -> dict[str, float]:
    """Returns whether the box lends its memory, and the time of its steps over that expected of it alone."""
    values = daemon.metrics()
    ratio, homes = round(values[names.MEMORY_RATIO], 3), values[names.HOME_EXPERTS]
    return {"lent": values[names.MEMORY_LENT], "expected": ratio, "homes": homes}


def measure(alone: Daemon, helped: Daemon, warm_s: float, rounds: int, tokens: int) -> dict[str, Any]:
    """Returns the figures of some rounds, after others that count for nothing."""
    pairs: list[tuple[float, float]] = []
    wrong, before, turn, ends_s = 0, None, 0, time.monotonic() + warm_s
    while len(pairs) < rounds:
        turn += 1
        if before is None and time.monotonic() >= ends_s:
            before = help_of(helped)
        prompt = f"{BEGINNINGS[turn % len(BEGINNINGS)]} is {turn} times"
        found = {}
        for daemon in (alone, helped) if turn % 2 else (helped, alone):
            found[daemon.box.name] = asked(daemon, prompt, tokens)
        (own_ms, text), (with_ms, other) = found[alone.box.name], found[helped.box.name]
        wrong += text != other
        pairs += [] if before is None else [(own_ms, with_ms)]
        print(f"{turn}: {own_ms:.1f} {with_ms:.1f} ms {decision(helped)}", file=sys.stderr)
    assert before is not None
    after = help_of(helped)
    own, helped_steps = (now - then for now, then in zip(after, before, strict=True))
    return {
        "alone_ms": round(statistics.median(own_ms for own_ms, _ in pairs), 2),
        "beside_two_ms": round(statistics.median(with_ms for _, with_ms in pairs), 2),
        "ratio": round(statistics.median(with_ms / own_ms for own_ms, with_ms in pairs), 3),
        "ratio_of_sums": round(sum(with_ms for _, with_ms in pairs) / sum(own_ms for own_ms, _ in pairs), 3),
        "helped_share": round(helped_steps / max(1.0, own + helped_steps), 3),
        "layer_steps": own + helped_steps,
        "wrong": wrong,
        **decision(helped),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=float, default=1000.0, help="Mbit/s of each box")
    parser.add_argument("--disk-mb", type=float, default=0.0, help="megabytes a second of each box; 0: no limit")
    parser.add_argument("--width", type=int, default=1024, help="of the experts; 1024 makes them 2.4 MB")
    parser.add_argument("--share", type=float, default=1 / 3, help="of the experts that each box has memory for")
    parser.add_argument("--warm-s", type=float, default=20.0, help="seconds of rounds before the measured ones")
    parser.add_argument("--migrate-s", type=float, default=300.0, help="between searches for a better plan")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-faults")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    store = float32_demo(args.work, args.width)
    settings = common(store, int(args.share * EXPERTS))
    limits = Limits(disk_bytes_per_s=int(args.disk_mb * 1e6), disk_of=store)
    with (
        tempfile.TemporaryDirectory(dir=args.work, prefix="helped-") as scratch,
        Bed(["a", "b", "c"], args.link, limits) as bed,
        Bed(["d"], args.link, limits) as apart,
    ):
        alone = Daemon(apart["d"], Path(scratch) / "d", settings)
        shared = {"cluster.replicas": 1, "cluster.route": "pull", "cluster.migrate_s": args.migrate_s}
        cluster = Cluster(bed, Path(scratch), settings | shared)
        daemons = [*cluster, alone]
        try:
            for daemon in daemons:
                daemon.start()
            for daemon in daemons:
                daemon.wait_ready(180)
            cluster.wait_settled(180)
            time.sleep(2)
            found = measure(alone, next(iter(cluster)), args.warm_s, args.rounds, args.tokens)
        finally:
            for daemon in daemons:
                daemon.close()
    told = {"link_mbit": args.link, "disk_mb": args.disk_mb, "share": round(args.share, 2), "migrate_s": args.migrate_s}
    print(json.dumps(told | found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
