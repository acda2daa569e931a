"""The cost of a box's control plane among many boxes: processor, bytes, connections, memory, by kind of message.

    python -m tools.bench.many_boxes --boxes 3,12,24,48,64
    python -m tools.bench.many_boxes --boxes 64 --role follower --only steady

The measured box is a process with a real control plane; results/many_boxes.md describes the others and the method.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.bench.many_boxes.crowd import Crowd, Window
from tools.bench.many_boxes.crowd_load import Load, idle


async def measure(boxes: int, voters: int, leads: bool, count: int, only: str) -> dict[str, Any]:
    """Returns the figures of one size of cluster."""
    with tempfile.TemporaryDirectory() as folder:
        crowd = Crowd(boxes, voters, leads, Path(folder))
        await crowd.begin()
        try:
            homes = boxes - (voters - 1)
            now = await crowd.until(lambda now: now["planned"] == homes and bool(now["leading"]) == leads)
            load, found = Load(crowd), dict[str, list[Window]]()
            for box in load.fronts:
                load.use(box)
            await asyncio.sleep(3.0)
            found["steady"] = await crowd.windows(idle, count)
            for name, work in load.cases().items() if leads else ():
                if only in name:
                    found[name] = await crowd.windows(work, max(2, count // 2))
            found["steady"] += await crowd.windows(idle, count)
            if leads and only in "gone and back":
                found["gone and back"] = await crowd.windows(crowd.lose_and_find, 2)
            now = await crowd.sample()
        finally:
            await crowd.end()
    return {"boxes": boxes, "fastest_s": crowd.fastest_s, **reckoned(found, crowd.fastest_s)} | {
        name: now[name] for name in ("rss", "fds", "threads", "links", "alive")
    }


def reckoned(found: dict[str, list[Window]], fastest_s: float) -> dict[str, Any]:
    """Computes core shares and bytes per second in the steady state, and the cost of each event beyond it."""

    def core_s(one: Window) -> float:
        return one.core_s * fastest_s / one.speed_s

    def middle(values: Iterator[float]) -> float:
        return statistics.median(list(values) or [math.nan])

    steady = [one for one in found["steady"] if not one.looks]  # no box came or went
    share = middle(core_s(one) / one.seconds for one in steady)
    incoming = middle(one.in_bytes / one.seconds for one in steady)
    outgoing = middle(one.out_bytes / one.seconds for one in steady)
    beats = middle(one.beats / one.seconds for one in steady)
    each = {
        name: {
            "core_s": middle((core_s(one) - share * one.seconds) / one.done for one in windows),
            "in_bytes": middle((one.in_bytes - incoming * one.seconds) / one.done for one in windows),
            "out_bytes": middle((one.out_bytes - outgoing * one.seconds) / one.done for one in windows),
        }
        for name, windows in found.items()
        if name != "steady"
    }
    return {
        "share": share,
        "in_bytes_s": incoming,
        "out_bytes_s": outgoing,
        "beats_s": beats,
        "windows": len(steady),
        "each": each,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a JSON object for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", default="3,12,24,48,64")
    parser.add_argument("--voters", type=int, choices=(1, 3, 5), default=1)
    parser.add_argument("--role", choices=("leader", "follower"), default="leader")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--only", default="", help="kinds of message whose name has this")
    options = parser.parse_args(argv)
    for boxes in map(int, options.boxes.split(",")):
        leads = options.role == "leader"
        print(json.dumps(asyncio.run(measure(boxes, options.voters, leads, options.windows, options.only))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
