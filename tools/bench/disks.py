"""Reads a store's experts from one disk and from two, each throttled to the same rate by a control group. Needs root.

    python -m tools.bench.disks --store STORE [--disk-mb-per-s 100] [--rounds 3] [--seconds 4]

The disks are files with a file system each. `of_ceiling` is the rate over the sum of the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median

from edgemoe.experts.transfer.loader import READERS
from edgemoe.store.files import page_memory
from edgemoe.store.manifest import Manifest
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import padded
from tools.testbed.limits import ROOT, Group, Limits, disk_of

SLACK_BYTES = 64 << 20  # of the file systems' own
LIMIT_S = 120.0


@contextmanager
def mounted(image: Path, size_bytes: int, place: Path) -> Iterator[None]:
    """Makes a file system in a file, as a disk of its own."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


async def read_experts(store: ExpertStore, seconds: float) -> float:
    """Reads experts in turns by as many readers as the engine has; returns bytes a second."""
    manifest = store.manifest
    experts = [(layer, entry.expert) for layer, part in enumerate(manifest.layers) for entry in part.experts]
    turns, began, done_bytes = cycle(experts), time.perf_counter(), 0

    async def reader() -> None:
        nonlocal done_bytes
        room = page_memory(padded(max(store.expert_bytes(*expert) for expert in experts)))
        while time.perf_counter() - began < seconds:
            expert = next(turns)
            await store.read(*expert, room)
            done_bytes += store.expert_bytes(*expert)

    await asyncio.gather(*(reader() for _ in range(READERS)))
    return done_bytes / (time.perf_counter() - began)


def child(store: Path, mirrors: list[Path], seconds: float) -> None:
    """Prints the bytes a second of one reading."""
    with ExpertStore(store, Manifest.load(store), mirrors=mirrors) as opened:
        print(asyncio.run(read_experts(opened, seconds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--mirror", type=Path, action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--disk-mb-per-s", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    if args.child:
        return child(args.store, args.mirror, args.seconds)
    rate, size_bytes = args.disk_mb_per_s * 1e6, Manifest.load(args.store).total_bytes
    taken: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("a", "b"):
            stack.enter_context(mounted(scratch / f"{name}.img", size_bytes * 5 // 4 + SLACK_BYTES, scratch / name))
            shutil.copytree(args.store, scratch / name / args.store.name)
        group = Group(f"edgemoe-disks-{os.getpid()}")
        group.make(Limits(disk_bytes_per_s=int(rate), disk_of=scratch / "a"))
        stack.callback(group.remove)
        (ROOT / "blkio" / group.name / "blkio.throttle.read_bps_device").write_text(
            f"{disk_of(scratch / 'b')} {int(rate)}"
        )
        command = [sys.executable, "-m", __spec__.name, "--child", "--seconds", str(args.seconds)]
        command += ["--store", str(scratch / "a" / args.store.name)]
        for _ in range(args.rounds):
            for disks, mirrors in ((1, []), (2, ["--mirror", str(scratch / "b")])):
                done = subprocess.run(
                    group.enter([*command, *mirrors]), capture_output=True, text=True, check=True, timeout=LIMIT_S
                )
                taken[disks].append(float(done.stdout))
    print(
        json.dumps(
            {
                f"{disks} disks": {
                    "mb_per_s": [round(each / 1e6, 1) for each in values],
                    "of_ceiling": round(median(values) / (disks * rate), 3),
                }
                for disks, values in taken.items()
            }
            | {"ratio": round(median(b / a for a, b in zip(taken[1], taken[2], strict=True)), 2)}
        )
    )
    return None


if __name__ == "__main__":
    main()
