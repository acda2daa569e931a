"""The row of the table of faults with a migration: experts move to a box that has returned, and a fault comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from tools.bench.fault_state import FILLING, fill
from tools.bench.fault_trial import NODES, Record, Trial
from tools.bench.pins import homeless, lost_pins
from tools.testbed.bed import BedError
from tools.testbed.daemons import READY_S, Daemon

MOVE_BYTES_PER_S = 2e6  # so that a move outlasts a request
AWAY_S = 3.5  # longer than `absent_s`, after which a box loses its homes: a quiet machine has it back sooner
HOMES_S = 90.0  # within which every expert has a home again
Marks = Mapping[str, int]  # box -> bytes of its log


def plan_change(trial: Trial) -> Record:
    """Moves experts to a box that has returned; meanwhile one is killed, cut off, restarted, or its disk is full.

    The engines' logs must show that no plan makes a live box drop a last pinned copy. A dead box's experts must be
    pinned elsewhere before it is started again.
    """
    mover = trial.cluster[trial.rng.choice(NODES)]
    hit = trial.cluster[trial.rng.choice(NODES)]
    way = trial.rng.choice(("kill", "cut", "disk", "restart"))
    mover.stop()
    marks = {daemon.box.name: daemon.log_bytes() for daemon in trial.cluster}
    began_s, at_s, moving = time.time(), [0.0], [False]
    trial.whole_s = trial.whole_s or 1.0  # no undisturbed run: the migration would end meanwhile
    time.sleep(AWAY_S)
    mover.start()
    _wait(lambda: _count(mover, marks, "engine", phase="warm-up"), READY_S)

    def fault() -> None:
        _wait(lambda: _steps_to(trial, mover, marks), 30.0)
        time.sleep(trial.rng.uniform(0.0, 0.7))
        at_s[0], moving[0] = time.time(), _moves(trial)
        trial.mark()
        end[0] = _begin(trial, hit, way)

    end: list[Callable[[], None]] = [lambda: None]
    found = trial.requests([each for each in trial.others(hit) if each is not mover], fault, waits=False)
    hit_at = datetime.fromtimestamp(at_s[0])
    died = hit.box.name if way in ("kill", "restart") else ""
    if way == "kill":
        _wait_homes(trial, hit_at, died)
    end[0]()
    trial.cluster.wait_settled()
    homes_s = _wait_still(trial)
    logs = _logs(trial)
    lost = [one for one in lost_pins(logs) if one[0] >= began_s]
    count, again_s = homeless(logs, hit_at, died)
    return {
        "hit": hit.box.name,
        "mover": mover.box.name,
        "way": way,
        "moving": moving[0],
        "homes_s": homes_s,
        "homeless": count,
        "again_s": again_s,
        "drops": sum(_count(daemon, marks, "pins dropped") for daemon in trial.cluster),
        "pins_lost": len(lost),
        "lost": lost[-3:],
        "requests": found,
        **trial.coordination(at_s[0]),
    }


def _begin(trial: Trial, hit: Daemon, way: str) -> Callable[[], None]:
    """Injects the fault; returns the function that ends it."""
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


def _wait(condition: Callable[[], object], within_s: float) -> None:
    """Waits for a migration. Raises BedError if none comes."""
    ends = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > ends:
            raise BedError("no plan moved an expert")
        time.sleep(0.02)


def _logs(trial: Trial) -> dict[str, list[Record]]:
    return {daemon.box.name: daemon.events() for daemon in trial.cluster}


def _wait_homes(trial: Trial, since: datetime, died: str) -> None:
    """Waits until the dead box's experts have a pinned copy again, for HOMES_S at most."""
    ends = time.monotonic() + HOMES_S
    while homeless(_logs(trial), since, died)[1] is None and time.monotonic() < ends:
        time.sleep(0.5)


def _count(daemon: Daemon, marks: Marks, event: str, **fields: object) -> int:
    """Counts such events in its log since then."""
    return sum(one["event"] == event and fields.items() <= one.items() for one in daemon.events(marks[daemon.box.name]))


def _steps_to(trial: Trial, mover: Daemon, marks: Marks) -> bool:
    """Whether a step of a migration since then names that box."""
    events = [one for daemon in trial.cluster for one in daemon.events(marks[daemon.box.name])]
    steps = {one["version"] for one in events if one["event"] == "new plan" and one["moving"]}
    return any(
        one["event"] == "plan" and one["version"] in steps and mover.box.name in one["nodes"].split(",")
        for one in events
    )


def _moves(trial: Trial) -> bool:
    members = trial.cluster[trial.cluster.leader()].http.get("/health").json()["cluster"]["members"]
    return any(member["to_come"] or member["to_go"] for member in members)


def _wait_still(trial: Trial) -> float:
    """Returns the seconds until every box reports that no expert moves any more. Raises BedError."""
    began_s = time.monotonic()
    while _moves(trial):
        if time.monotonic() - began_s > HOMES_S:
            raise BedError("experts still move")
        time.sleep(0.1)
    return round(time.monotonic() - began_s, 2)
