"""Wake-ups of an idle daemon, and the processor time that they take.

    python -m tools.bench.idle --seconds 60 --threads        # alone, and as one of three boxes

A wake-up is a voluntary context switch, as the kernel counts them for each thread. The first thread of a front or an
engine runs its event loop. With `--threads` each thread is a row. Needs root, for the test bed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tools.bench.fault_rows import ROWS
from tools.bench.faults import EXPERTS, cluster, common
from tools.bench.stats import core_s
from tools.testbed.bed import Bed
from tools.testbed.daemons import Daemon
from tools.testbed.float32_model import float32_demo

SETTLE_S = 15.0  # by then all work of a start is done


class Seen(NamedTuple):
    """The wake-ups and processor time of a process so far."""

    wakes: Mapping[tuple[int, str], float]  # by thread and its name
    core_s: float


def seen(pid: int) -> Seen:
    """Reads the counters of a process. Raises OSError if it has ended."""
    wakes = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        wakes[int(task.name), lines["Name"]] = int(lines["voluntary_ctxt_switches"])
    return Seen(wakes, core_s(pid))


def watch(daemons: Sequence[Daemon], seconds: float) -> dict[str, tuple[int, Seen]]:
    """Returns the processes of these daemons by name, with each one's wake-ups and core share per second."""
    time.sleep(SETTLE_S)
    pids = {}
    for daemon in daemons:
        engine = daemon.http.get("/health").json()["engine"]["pid"]
        parent = Path(f"/proc/{engine}/stat").read_text().rsplit(")", 1)[1].split()[1]
        pids[f"front {daemon.box.name}"], pids[f"engine {daemon.box.name}"] = int(parent), int(engine)
    before, began_s = {name: seen(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)
    after, took_s = {name: seen(pid) for name, pid in pids.items()}, time.monotonic() - began_s
    found = {}
    for name, now in after.items():
        was = before[name]
        wakes = {thread: round((count - was.wakes.get(thread, 0)) / took_s, 1) for thread, count in now.wakes.items()}
        found[name] = pids[name], Seen(wakes, (now.core_s - was.core_s) / took_s)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/edgemoe-idle"))
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    store = float32_demo(options.work)
    with Bed(["alone"]) as bed, tempfile.TemporaryDirectory(dir=options.work) as folder:
        daemon = Daemon(bed["alone"], Path(folder), common(store, EXPERTS))
        try:
            daemon.start()
            daemon.wait_ready()
            found = watch([daemon], options.seconds)
        finally:
            daemon.close()
    with (
        tempfile.TemporaryDirectory(dir=options.work) as folder,
        cluster(Path(folder), store, ROWS["kill-peer"]) as boxes,
    ):
        found |= watch(list(boxes), options.seconds)
        led = boxes.leader()
    table = Table("process", "wakes a second: loop", "all threads", "of a core, %", title=f"{led} leads")
    for name, (pid, did) in found.items():
        loop = sum(count for (thread, _), count in did.wakes.items() if thread == pid)
        table.add_row(name, f"{loop:.0f}", f"{sum(did.wakes.values()):.0f}", f"{100 * did.core_s:.1f}")
        for (thread, label), count in sorted(did.wakes.items(), key=lambda one: -one[1]) if options.threads else ():
            if count and thread != pid:
                table.add_row(f"  {label}", "", f"{count:.1f}", "")
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
