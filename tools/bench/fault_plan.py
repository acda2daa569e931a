"""The row of the table of faults in which a plan moves: experts go to a box that is back, and something happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tools.bench.fault_state import FILLING, fill
from tools.bench.fault_trial import NODES, Record, Trial, clock
from tools.bench.pins import lost_pins
from tools.testbed.bed import BedError
from tools.testbed.daemons import Daemon

MOVE_BYTES_PER_S = 2e6  # so that a move outlasts a request
HOMES_S = 90.0  # within which every expert has a home again


def plan_change(trial: Trial) -> Record:
    """A box has left and is back; while experts move to it, one is killed, cut off, restarted, or its disk is full.

    Judged by what the engines log of their pins, too: no plan has a box that lives drop the last pinned copy.
    """
    mover = trial.cluster[trial.rng.choice(NODES)]
    mover.stop()
    began_s = time.time()
    mover.start()
    mover.wait_ready()
    version = _wait_move(trial, began_s)
    hit = trial.cluster[trial.rng.choice(NODES)]
    way = trial.rng.choice(("kill", "cut", "disk", "restart"))
    at_s, moving = [0.0], [False]

    def fault() -> None:
        at_s[0], moving[0] = time.time(), _moves(trial)
        end[0] = _begin(trial, hit, way)

    end: list[Callable[[], None]] = [lambda: None]
    found = trial.requests(trial.others(hit), fault)
    end[0]()
    trial.cluster.settle()
    homes_s = _wait_still(trial)
    lost = [one for one in lost_pins({d.box.name: d.events() for d in trial.cluster}) if one[0] >= began_s]
    return {
        "hit": hit.box.name,
        "mover": mover.box.name,
        "way": way,
        "version": version,
        "moving": moving[0],
        "homes_s": homes_s,
        "pins_lost": len(lost),
        "lost": lost[-3:],
        "requests": found,
        **trial.coordination(at_s[0]),
    }


def _begin(trial: Trial, hit: Daemon, way: str) -> Callable[[], None]:
    """Does it; what ends it is returned."""
    if way in ("kill", "restart"):
        hit.kill()
        if way == "restart":
            hit.start()
        return hit.wait_ready if way == "restart" else lambda: trial.again(hit)
    filling = trial.cluster.state_dir(hit.box.name) / FILLING
    if way == "disk":
        fill(filling)
    else:
        hit.box.link(up=False)

    def over() -> None:
        trial.cluster.bed.mend()
        filling.unlink(missing_ok=True)

    timer = threading.Timer(trial.rng.uniform(2.0, 4.0), over)
    timer.start()
    return timer.join


def _wait_move(trial: Trial, since_s: float, within_s: float = 60.0) -> int:
    """Returns the version of the first step of a migration since then. Raises BedError."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        for daemon in trial.cluster:
            for event in daemon.events():
                if event["event"] == "new plan" and event["moving"] and clock(event) >= since_s:
                    return int(event["version"])
        time.sleep(0.05)
    raise BedError("no plan moved an expert")


def _moves(trial: Trial) -> bool:
    members = trial.cluster[trial.cluster.leader()].http.get("/health").json()["cluster"]["members"]
    return any(member["to_come"] or member["to_go"] for member in members)


def _wait_still(trial: Trial) -> float:
    """Returns after how many seconds every box says that nothing moves any more. Raises BedError."""
    began_s = time.monotonic()
    while _moves(trial):
        if time.monotonic() - began_s > HOMES_S:
            raise BedError("experts still move")
        time.sleep(0.1)
    return round(time.monotonic() - began_s, 2)
