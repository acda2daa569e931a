"""Downloads of a model from peers: two of four boxes have it. Measures the speed, and the cost of a box's death.

    python -m tools.bench.pulling --scratch DIR [--width 1024] [--rounds 3]

Needs root. c and d run `edgemoe pull --from-peers` at once. Then c downloads slowly beside a daemon on its store, which
must answer like b. In the last round a is killed when c has a third.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgemoe.store.catalog import verify
from edgemoe.store.manifest import MANIFEST, Manifest
from tools.bench.faults import common
from tools.testbed.bed import Bed, BedError, Box
from tools.testbed.daemons import Cluster, Daemon, Settings
from tools.testbed.float32_model import float32_demo

LINK_MBIT = 500.0
PULLERS = ("c", "d")
LIMIT_S = 300.0
SLOWLY = "8MB/s"
PROMPTS = ("Mia has a", "The capital of France is", "Once upon a time")


class Puller:
    """`edgemoe pull --from-peers` in a box."""

    def __init__(self, box: Box, settings: Settings, folder: Path, *words: str) -> None:
        self.box, self.stores = box, folder / f"stores-{box.name}"
        shutil.rmtree(self.stores, ignore_errors=True)
        given = {**settings, "model.store_dir": self.stores}
        said = [word for key, value in given.items() for word in ("--set", f"{key}={_word(value)}")]
        command = [sys.executable, "-m", "edgemoe", "pull", "--from-peers", "m", *words, *said]
        self.log = (folder / f"pull-{box.name}.log").open("w")
        self.before_bytes, self.began_s = box.received_bytes(), time.monotonic()
        self.first_s = 0.0
        self.took_s = 0.0
        self.child = box.spawn(command, stdout=self.log, stderr=self.log)

    @property
    def store(self) -> Path | None:
        """Returns the store, once there is one."""
        return next((path.parent for path in self.stores.glob(f"*/{MANIFEST}")), None)

    def poll_received(self) -> int:
        """Returns the received bytes; records the times of the first and the last ones."""
        came = self.box.received_bytes() - self.before_bytes
        if not self.first_s and came > 1 << 20:
            self.first_s = time.monotonic() - self.began_s
        if not self.took_s and self.child.poll() is not None:
            self.took_s = time.monotonic() - self.began_s
        return came

    def result(self) -> dict[str, Any]:
        """Waits for its end. Raises BedError if it failed."""
        self.log.close()
        if self.child.returncode or self.store is None:
            raise BedError(f"{self.box.name}: {Path(self.log.name).read_text()[-2000:]}")
        size = Manifest.load(self.store).total_bytes
        return {
            "box": self.box.name,
            "mbit_per_s": round(8e-6 * size / self.took_s),
            "from_first_megabyte_mbit_per_s": round(8e-6 * size / (self.took_s - self.first_s)),
            "took_s": round(self.took_s, 1),
            "damaged": len(verify(self.store)),
        }


def both_pull(cluster: Cluster, folder: Path, store_bytes: int, *, dies: bool) -> dict[str, Any]:
    """Returns the download rates of c and d; a dies, if asked, when c has a third."""
    before_s, sources = _used_s(), [pid for name in "ab" for pid in cluster.bed[name].pids()]
    sources_before_s = sum(map(_cpu_s, sources))
    pullers = [Puller(cluster.bed[name], settings_of(cluster, name), folder) for name in PULLERS]
    killed_at = 0
    sources_s = 0.0

    def all_came() -> bool:
        nonlocal killed_at, sources_s
        came = [puller.poll_received() for puller in pullers]
        if dies and not killed_at and came[0] > store_bytes / 3:
            cluster["a"].kill()
            killed_at = came[0]
        return all(puller.took_s for puller in pullers)

    _until(all_came)
    if not dies:
        sources_s = sum(map(_cpu_s, sources)) - sources_before_s
    found: dict[str, Any] = {"store_mb": round(store_bytes / 1e6), "pullers": [puller.result() for puller in pullers]}
    found |= {"killed_a_at_mb": round(killed_at / 1e6)} if dies else {"cpu_s_of_a_and_b": round(sources_s, 1)}
    return found | {"cpu_s_of_pullers": round(_used_s() - before_s, 1)}


def serve_meanwhile(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Returns the answers of a daemon on an incomplete store, and whether it used the experts that arrived."""
    puller = Puller(cluster.bed["c"], settings_of(cluster, "c"), folder, "--rate", SLOWLY)
    store = _until(lambda: puller.store)
    own = {**settings_of(cluster, "c"), "model.path": store}
    daemon = Daemon(cluster.bed["c"], folder / "daemon-c", own)
    try:
        daemon.start()
        daemon.wait_ready(LIMIT_S)
        coming = puller.child.poll() is None
        at_first = sum(len(layer.experts) for layer in Manifest.load(store).layers)
        said = [[each.complete(prompt, 24).text for prompt in PROMPTS] for each in (daemon, cluster["b"])]
        _until(lambda: puller.poll_received() and puller.took_s)
        whole = sum(len(layer.experts) for layer in Manifest.load(store).layers)
        _until(lambda: any(e["event"] == "the store has grown" and e["experts"] == whole for e in daemon.events()))
        fetched = daemon.metrics()["edgemoe_experts_fetched_total"]
    finally:
        daemon.close()
    return {
        "served_while_it_came": coming,
        "experts_when_ready": at_first,
        "experts_at_last": whole,
        "experts_from_others": int(fetched),
        "answers_like_b": said[0] == said[1] and all(said[0]),
        **puller.result(),
    }


def settings_of(cluster: Cluster, name: str) -> dict[str, object]:
    return {**cluster.settings_of(cluster.bed[name]), "cluster.peers_file": cluster.peers_file("a")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="for the model, stores and logs")
    parser.add_argument("--width", type=int, default=1024, help="of the demo model's experts; 0: as they are")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    args.scratch.mkdir(parents=True, exist_ok=True)
    store = float32_demo(args.scratch, args.width)
    store_bytes = Manifest.load(store).total_bytes
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
        for _ in range(args.rounds - 1):
            print(json.dumps(both_pull(cluster, Path(fresh), store_bytes, dies=False)), flush=True)
        print(json.dumps(serve_meanwhile(cluster, Path(fresh))), flush=True)
        print(json.dumps(both_pull(cluster, Path(fresh), store_bytes, dies=True)), flush=True)
    return 0


def _until(condition: Callable[[], Any]) -> Any:
    ends = time.monotonic() + LIMIT_S
    while not (found := condition()):
        if time.monotonic() > ends:
            raise BedError(f"it did not come about within {LIMIT_S:.0f} s")
        time.sleep(0.05)
    return found


def _used_s() -> float:
    """Returns the processor time of ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / 100


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
