"""Rows of the table of faults in which a box loses its state, has wrong settings, or is suspended."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench.fault_trial import NODES, Record, Trial, clock
from tools.testbed.bed import BedError
from tools.testbed.daemons import Daemon

STATE_BYTES = 256 << 20  # etcd allocates 64 MB of its log in advance
LEASE_S = 1.5  # cluster.lease_s, as the boxes have it
FILLING = "filling"


def disk_full(trial: Trial) -> Record:
    """Fills the state's disk of a box that does not lead, while the leader is stopped for 3 s.

    Meanwhile the third box may be elected. The full box has room for entries, allocated in etcd's log in advance, but
    none for an epoch.
    """
    leader, at_s = trial.leader(), [0.0]
    hit = trial.rng.choice(trial.others(leader))
    filling = trial.cluster.state_dir(hit.box.name) / FILLING
    timers: list[threading.Timer] = []

    def end() -> None:
        filling.unlink()
        trial.cluster.bed.mend()

    def fault() -> None:
        at_s[0] = time.time()
        fill(filling)
        leader.box.pause()
        timers.append(threading.Timer(3.0, end))
        timers[0].start()

    found = trial.requests(list(trial.cluster), fault)
    timers[0].join()
    time.sleep(0.5)
    trial.cluster.wait_settled()
    return {"hit": hit.box.name, "paused": leader.box.name, "requests": found, **trial.coordination(at_s[0])}


def fill(path: Path) -> None:
    """Fills the disk with a file."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def power_loss(trial: Trial) -> Record:
    """Kills a box with SIGKILL and damages the end of its etcd's log, cut or zeroed, before it starts again."""
    hit, at_s = trial.cluster[trial.rng.choice(NODES)], [0.0]

    def fault() -> None:
        at_s[0] = time.time()
        hit.kill()

    found = trial.requests(trial.others(hit), fault)
    journal = max((trial.cluster.state_dir(hit.box.name) / "etcd/data/member/wal").glob("*.wal"))
    size, written = journal.stat().st_size, len(journal.read_bytes().rstrip(b"\0"))
    kept, way = trial.rng.randrange(written + 1), trial.rng.choice(("cut", "zeros"))
    os.truncate(journal, kept)
    if way == "zeros":
        os.truncate(journal, size)
    trial.again(hit)
    lost = {"way": way, "kept_bytes": kept, "written_bytes": written}
    return {"hit": hit.box.name, **lost, "requests": found, **trial.coordination(at_s[0])}


def wrong_config(trial: Trial) -> Record:
    """Starts a box with wrong rules of leadership, alone, and later with the right ones.

    Under the wrong rules it logs to another file. No other box may obey it, and all show it as refused. Raises BedError
    if they do not, or it does not run.
    """
    hit, at_s = trial.cluster[trial.rng.choice(NODES)], [0.0]
    wrong = {"cluster.coordination": "single", "cluster.leader": hit.box.name}
    marks = {daemon.box.name: daemon.log_bytes() for daemon in trial.others(hit)}

    def fault() -> None:
        hit.kill()
        at_s[0] = time.time()
        hit.start(wrong)

    found = trial.requests(trial.others(hit), fault)
    for daemon in trial.others(hit):
        wait_refused(daemon, hit)
    time.sleep(2 * LEASE_S)
    obeyed = sum(
        event["event"] == "leader" and event["node"] == hit.box.name and clock(event) > at_s[0]
        for daemon in trial.others(hit)
        for event in daemon.events(marks[daemon.box.name])
    )
    hit.kill()
    trial.again(hit)
    return {"hit": hit.box.name, "wrong_obeyed": obeyed, "requests": found, **trial.coordination(at_s[0])}


def wait_refused(daemon: Daemon, hit: Daemon, within_s: float = 30.0) -> None:
    """Waits until that box shows the faulty one as heard and refused. Raises BedError."""
    ends, states = time.monotonic() + within_s, dict[str, str]()
    while states.get(hit.box.name) != "refused":
        if not hit.alive or time.monotonic() > ends:
            raise BedError(f"{hit.box.name} {'runs' if hit.alive else 'ended'}; {daemon.box.name} shows {states}")
        time.sleep(0.1)
        members = daemon.http.get("/health").json()["cluster"]["members"]
        states = {member["node"]: member["state"] for member in members}


def hosted_request_forgotten(trial: Trial) -> Record:
    """Sends several requests to one front, which forwards some; a box that runs them unlists the front for a moment.

    The box then drops the requests of the unknown front.
    """

    def relist_front(hit: Daemon, front: Daemon) -> None:
        relist(trial, hit, {front.box.name: ""})
        relist(trial, hit, {})

    _, found = trial.forwarded(relist_front)
    trial.cluster.wait_settled()
    return found


def relist(trial: Trial, daemon: Daemon, keys: dict[str, object], within_s: float = 20.0) -> None:
    """Changes keys in that box's list, and waits until it has read the list again. Raises BedError."""
    mark, ends = daemon.log_bytes(), time.monotonic() + within_s
    trial.cluster.write_peers(trial.cluster.peers_file(daemon.box.name), keys=keys)
    while not any(event["event"] == "list of peers read again" for event in daemon.events(mark)):
        if time.monotonic() > ends:
            raise BedError(f"{daemon.box.name} did not read its list again")
        time.sleep(0.02)


def suspend(trial: Trial) -> Record:
    """Stops the leader for longer than its lease, and lets it continue with requests of its own.

    A real suspend also stops or shifts the machine's clock; tests/cluster/control/test_cluster_model.py tests that.
    """
    hit, at_s = trial.leader(), [0.0]
    timers: list[threading.Timer] = []
    resume: Callable[[], None] = hit.box.resume

    def fault() -> None:
        at_s[0] = time.time()
        hit.box.pause()
        timers.append(threading.Timer(LEASE_S * trial.rng.uniform(1.5, 4.0), resume))
        timers[0].start()

    found = trial.requests(list(trial.cluster), fault)
    new = trial.wait_epoch(at_s[0])
    timers[0].join()
    time.sleep(1.0)
    trial.cluster.wait_settled()
    return {"hit": hit.box.name, "requests": found, **trial.coordination(at_s[0]), "new_epoch_s": new["new_epoch_s"]}
