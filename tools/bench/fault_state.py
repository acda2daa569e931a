"""Rows of the table of faults in which a box loses what it keeps, or is told wrong things, or stands still."""

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

STATE_BYTES = 8 << 20
LEASE_S = 1.5  # cluster.lease_s, as the boxes have it
FILLING = "filling"


def disk_full(trial: Trial) -> Record:
    """No room for the state of a box that does not lead, during 3 s in which the leader stands still.

    Meanwhile the third may lead, where Raft has it lead already: the box that was hit has room for its entries, in what
    its journal has allocated beforehand, but none for a vote.
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
    """Until nothing more goes in."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def power_loss(trial: Trial) -> Record:
    """kill -9 of a box; of its journal what follows some byte is lost, cut off or zeros, when it starts again."""
    hit, at_s = trial.cluster[trial.rng.choice(NODES)], [0.0]

    def fault() -> None:
        at_s[0] = time.time()
        hit.kill()

    found = trial.requests(trial.others(hit), fault)
    journal = trial.cluster.state_dir(hit.box.name) / "raft.journal"
    size, written = journal.stat().st_size, len(journal.read_bytes().rstrip(b"\0"))
    kept, way = trial.rng.randrange(written + 1), trial.rng.choice(("cut", "zeros"))
    os.truncate(journal, kept)
    if way == "zeros":
        os.truncate(journal, size)
    trial.again(hit)
    lost = {"way": way, "kept_bytes": kept, "written_bytes": written}
    return {"hit": hit.box.name, **lost, "requests": found, **trial.coordination(at_s[0])}


def wrong_config(trial: Trial) -> Record:
    """A box is started again by other rules of who leads, alone or with other voters, and later by the right ones.

    What it obeys by the wrong rules is its own affair, and logged aside; nobody else is to obey it, and all others show
    it as refused. Raises BedError where they do not, or it does not run.
    """
    hit, at_s = trial.cluster[trial.rng.choice(NODES)], [0.0]
    way = trial.rng.choice(("single", "voters"))
    others = hit.folder / "other-peers.toml"
    trial.cluster.write_peers(others, silent=[hit.box.name])
    alone = {"cluster.coordination": "single", "cluster.leader": hit.box.name}
    wrong = alone if way == "single" else {"cluster.peers_file": others}
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
    told = {"way": way, "wrong_obeyed": obeyed}
    return {"hit": hit.box.name, **told, "requests": found, **trial.coordination(at_s[0])}


def wait_refused(daemon: Daemon, hit: Daemon, within_s: float = 30.0) -> None:
    """Until that box shows the one that was hit as one that it hears and refuses. Raises BedError."""
    ends, states = time.monotonic() + within_s, dict[str, str]()
    while states.get(hit.box.name) != "refused":
        if not hit.alive or time.monotonic() > ends:
            raise BedError(f"{hit.box.name} {'runs' if hit.alive else 'ended'}; {daemon.box.name} shows {states}")
        time.sleep(0.1)
        members = daemon.http.get("/health").json()["cluster"]["members"]
        states = {member["node"]: member["state"] for member in members}


def hosted_request_forgotten(trial: Trial) -> Record:
    """Several requests at one front, which passes some on; a box that runs them does not list the front for a moment.

    So the front is one that the box does not know, and its requests are dropped there.
    """

    def relist_front(hit: Daemon, front: Daemon) -> None:
        relist(trial, hit, {front.box.name: ""})
        relist(trial, hit, {})

    _, found = trial.forwarded(relist_front)
    trial.cluster.wait_settled()
    return found


def relist(trial: Trial, daemon: Daemon, keys: dict[str, object], within_s: float = 20.0) -> None:
    """That box's list has other keys; returns when it has read the list again. Raises BedError."""
    mark, ends = daemon.log_bytes(), time.monotonic() + within_s
    trial.cluster.write_peers(trial.cluster.peers_file(daemon.box.name), keys=keys)
    while not any(event["event"] == "list of peers read again" for event in daemon.events(mark)):
        if time.monotonic() > ends:
            raise BedError(f"{daemon.box.name} did not read its list again")
        time.sleep(0.02)


def suspend(trial: Trial) -> Record:
    """The leader stands still for longer than its lease, and goes on with requests of its own.

    A real suspend also stops the clock that counts from the start of the machine, or makes it jump; that part is what
    tests/cluster/control/test_cluster_model.py tries.
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
