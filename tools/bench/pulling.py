"""Two of four boxes have a model and the others pull it from them: how fast, and what the death of one of them costs.

    python -m tools.bench.pulling --scratch DIR [--width 1024] [--rounds 3]

Needs root. Boxes are network namespaces with links of 500 Mbit/s in both directions; a and b run daemons, in c and d
`edgemoe pull --from-peers` runs, at the same time. In the last round a is killed (SIGKILL) when c has a third of the
store. Prints one JSON object for each round. The rate of a puller is the bytes
of its store over the time from its start to its end, starting Python included, and those from the first megabyte on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgemoe.store.catalog import verify
from edgemoe.store.manifest import Manifest
from tools.bench.faults import common
from tools.testbed.bed import Bed, BedError, Box
from tools.testbed.daemons import Cluster, Daemon
from tools.testbed.model import float32_demo

LINK_MBIT = 500.0
PULLERS = ("c", "d")
LIMIT_S = 300.0


class Puller:
    """`edgemoe pull --from-peers` in a box."""

    def __init__(self, box: Box, cluster: Cluster, folder: Path) -> None:
        self.box, self.stores = box, folder / f"stores-{box.name}"
        shutil.rmtree(self.stores, ignore_errors=True)
        given = {**cluster.settings_of(box), "model.store_dir": self.stores}
        given["cluster.peers_file"] = cluster.peers_file("a")
        words = [word for key, value in given.items() for word in ("--set", f"{key}={_word(value)}")]
        command = [sys.executable, "-m", "edgemoe", "pull", "--from-peers", "m", *words]
        self.log = (folder / f"pull-{box.name}.log").open("w")
        self.before_bytes, self.began_s = box.received_bytes(), time.monotonic()
        self.first_s = 0.0
        self.took_s = 0.0
        self.child = box.spawn(command, stdout=self.log, stderr=self.log)

    def look(self) -> int:
        """Returns the bytes that have come; notes when the first and the last did."""
        came = self.box.received_bytes() - self.before_bytes
        if not self.first_s and came > 1 << 20:
            self.first_s = time.monotonic() - self.began_s
        if not self.took_s and self.child.poll() is not None:
            self.took_s = time.monotonic() - self.began_s
        return came

    def result(self) -> dict[str, Any]:
        """Raises BedError where it did not end well."""
        self.log.close()
        if self.child.returncode:
            raise BedError(f"{self.box.name}: {Path(self.log.name).read_text()[-2000:]}")
        (store,) = (path for path in self.stores.iterdir() if path.is_dir())
        size = Manifest.load(store).total_bytes
        faults = verify(store)
        return {
            "box": self.box.name,
            "mbit_per_s": round(8e-6 * size / self.took_s),
            "from_first_byte_mbit_per_s": round(8e-6 * size / (self.took_s - self.first_s)),
            "took_s": round(self.took_s, 1),
            "damaged": len(faults),
        }


def rounds(cluster: Cluster, folder: Path, store: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yields what each round measured; a dies in the last."""
    bytes_of_store = Manifest.load(store).total_bytes
    for number in range(count):
        dies = number == count - 1
        pullers = [Puller(cluster.bed[name], cluster, folder) for name in PULLERS]
        ends = time.monotonic() + LIMIT_S
        killed_at = 0
        while not all(puller.took_s for puller in pullers):
            came = [puller.look() for puller in pullers]
            if dies and not killed_at and came[0] > bytes_of_store / 3:
                cluster["a"].kill()
                killed_at = came[0]
            if time.monotonic() > ends:
                raise BedError(f"the stores did not come within {LIMIT_S:.0f} s")
            time.sleep(0.05)
        found = [puller.result() for puller in pullers]
        yield {"store_mb": round(bytes_of_store / 1e6), "killed_at_mb": round(killed_at / 1e6), "pullers": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="for the model, stores and logs")
    parser.add_argument("--width", type=int, default=1024, help="of the demo model's experts")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    store = float32_demo(args.scratch, args.width)
    settings = common(store, 8) | {"cluster.migrate_s": 0, "cluster.coordination": "single", "cluster.leader": "a"}
    with tempfile.TemporaryDirectory(dir=args.scratch) as fresh, Bed(["alone"]) as bed:
        daemon = Daemon(bed["alone"], Path(fresh), common(store, 8))
        daemon.start()
        daemon.wait_ready(LIMIT_S)  # kernels are compiled once
        daemon.close()
    with (
        tempfile.TemporaryDirectory(dir=args.scratch) as fresh,
        Bed("abcd", LINK_MBIT) as bed,
        Cluster(bed, Path(fresh) / "cluster", settings, empty=PULLERS) as cluster,
    ):
        for row in rounds(cluster, Path(fresh), store, args.rounds):
            print(json.dumps(row), flush=True)
    return 0


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
