"""Rows of the table of faults: the fault of each, and one trial of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edgemoe.telemetry import metrics as names
from tools.bench import fault_apart, fault_gray
from tools.bench.fault_plan import MOVE_BYTES_PER_S, plan_change
from tools.bench.fault_state import STATE_BYTES, disk_full, hosted_request_forgotten, power_loss, suspend, wrong_config
from tools.bench.fault_trial import NODES, Record, Trial
from tools.bench.intruder import GUEST, INTRUDER, KINDS, Intruder
from tools.testbed.daemons import Daemon


def kill_peer(trial: Trial) -> Record:
    """Kills a computing box with SIGKILL."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    found = trial.requests(trial.others(hit), hit.kill)
    trial.again(hit)
    return {"hit": hit.box.name, "requests": found}


def leader_kill(trial: Trial) -> Record:
    """Kills the leader with SIGKILL."""
    hit, at_s = trial.leader(), [0.0]

    def fault() -> None:
        at_s[0] = time.time()
        hit.kill()

    found = trial.requests(trial.others(hit), fault)
    new = trial.wait_epoch(at_s[0])
    trial.again(hit)
    return {"hit": hit.box.name, "requests": found, **new}


def leader_stop(trial: Trial) -> Record:
    """Stops the leader for 5 s with SIGSTOP."""
    hit, at_s = trial.leader(), [0.0]
    thread: list[threading.Timer] = []

    def fault() -> None:
        at_s[0] = time.time()
        hit.box.pause()
        thread.append(threading.Timer(5.0, hit.box.resume))
        thread[0].start()

    found = trial.requests(trial.others(hit), fault)
    new = trial.wait_epoch(at_s[0])
    thread[0].join()
    time.sleep(1.0)
    trial.cluster.wait_settled()
    new |= {name: value for name, value in trial.coordination(at_s[0]).items() if name != "new_epoch_s"}
    return {"hit": hit.box.name, "requests": found, **new}


def partition(trial: Trial) -> Record:
    """Disconnects one box's cable for 2 to 4 s; all boxes get requests."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return disturbed(trial, hit, lambda: hit.box.link(up=False), trial.rng.uniform(2.0, 4.0))


def one_way(trial: Trial) -> Record:
    """Drops all packets from the leader for 2 to 4 s, but none to it."""
    hit = trial.leader()

    def cut() -> None:
        for other in trial.others(hit):
            hit.box.cut(other.box)

    return disturbed(trial, hit, cut, trial.rng.uniform(2.0, 4.0))


def slow_link(trial: Trial) -> Record:
    """Slows a box's link to 20 Mbit/s."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return disturbed(trial, hit, lambda: hit.box.rate(20), 1.0)


def peer_stop(trial: Trial) -> Record:
    """Stops a box for 5 s with SIGSTOP; the others get requests."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return disturbed(trial, hit, hit.box.pause, 5.0, trial.others(hit))


def disturbed(
    trial: Trial, hit: Daemon, fault: Callable[[], None], seconds: float, fronts: Sequence[Daemon] = ()
) -> Record:
    """Runs a trial of a fault that ends by itself."""
    at_s = [0.0]
    timers: list[threading.Timer] = []

    def begin() -> None:
        at_s[0] = time.time()
        fault()
        timers.append(threading.Timer(seconds, trial.cluster.bed.mend))
        timers[0].start()

    found = trial.requests(fronts or list(trial.cluster), begin)
    timers[0].join()
    time.sleep(0.5)
    trial.cluster.wait_settled()
    return {"hit": hit.box.name, "requests": found, **trial.coordination(at_s[0])}


def restart_all(trial: Trial) -> Record:
    """Kills every box and starts all again: no epoch is lower than before."""
    before = {daemon.box.name: daemon.epoch() for daemon in trial.cluster}
    for daemon in trial.cluster:
        daemon.kill()
    for daemon in trial.cluster:
        daemon.start()
    for daemon in trial.cluster:
        daemon.wait_ready()
    trial.cluster.wait_settled()
    at_s = time.time()
    while time.time() - at_s < 15 and min(d.epoch() for d in trial.cluster) <= max(before.values()):
        time.sleep(0.1)
    after = {daemon.box.name: daemon.epoch() for daemon in trial.cluster}
    found = trial.requests(list(trial.cluster), None)
    back = sum(after[name] < before[name] for name in NODES)
    return {"before": before, "after": after, "regressions": back, "requests": found}


def forward_kill(trial: Trial) -> Record:
    """Sends several requests to one front, which forwards some; a box that runs them is killed mid-stream."""
    hit, found = trial.forwarded(lambda hit, _: hit.kill())
    trial.again(hit)
    return found


def route_kill(trial: Trial) -> Record:
    """Kills the leader while requests of the other two wait for its routing decision."""
    hit, at_s, offers = trial.leader(), [0.0], [0.0]
    fronts = trial.others(hit)

    def fault() -> None:
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends and not offers[0]:
            offers[0] = sum(front.metrics().get(names.OFFERS_OPEN, 0.0) for front in fronts)
        trial.mark()
        at_s[0] = time.time()
        hit.kill()

    found = trial.requests(fronts * 3, fault, waits=False)
    new = trial.wait_epoch(at_s[0])
    trial.again(hit)
    return {"hit": hit.box.name, "requests": found, "offers": offers[0], **new}


def wrong_key(trial: Trial) -> Record:
    """Tries every channel of every box without a valid key, while the boxes serve requests."""
    kind, victim = trial.rng.choice(KINDS), trial.rng.choice(NODES)
    with Intruder(trial.cluster) as intruder:
        found: list[Any] = []
        asked = trial.requests(list(trial.cluster), lambda: found.append(intruder.try_(kind, victim)))
    (tried,) = found
    return {"kind": kind, "hit": victim, **msgspec.structs.asdict(tried), "requests": asked}


@dataclass(frozen=True, slots=True)
class Kind:
    """A row: its trial, and the cluster that it needs."""

    run: Callable[[Trial], Record]
    replicas: int = 2
    spread: bool = False
    empty: tuple[str, ...] = ()  # boxes without a daemon
    state_bytes: int = 0  # size of the file system with each box's state, if it has one of its own
    settings: tuple[tuple[str, object], ...] = ()  # differences from the other rows' settings
    prompt_tokens: int = 12
    apart: bool = False  # boxes have the roles of `fault_apart`
    spoils_kv: bool = False  # box a damages some of the keys and values that it sends
    absent_s: tuple[float, ...] = (30.0, 2.0)  # after which a box loses its homes; trials take turns


def _apart(run: Callable[[Trial], Record], spoils_kv: bool = False) -> Kind:
    return Kind(
        run,
        settings=fault_apart.SETTINGS,
        prompt_tokens=fault_apart.PROMPT_TOKENS,
        apart=True,
        spoils_kv=spoils_kv,
    )


ROWS = {
    "kill-peer": Kind(kill_peer),
    "leader-kill": Kind(leader_kill),
    "leader-stop": Kind(leader_stop),
    "partition": Kind(partition),
    "one-way": Kind(one_way),
    "slow-link": Kind(slow_link),
    "peer-stop": Kind(peer_stop),
    "restart-all": Kind(restart_all),
    "kill-peer-1": Kind(kill_peer, replicas=1, settings=(("api.request_timeout_s", 20),)),  # requests wait for the box
    "forward-kill": Kind(forward_kill, spread=True),
    "route-kill": Kind(route_kill, settings=(("engine.max_sequences", 1),)),
    "suspend": Kind(suspend),
    "disk-full": Kind(disk_full, state_bytes=STATE_BYTES),
    "power-loss": Kind(power_loss),
    "wrong-config": Kind(wrong_config),
    "guest-forgotten": Kind(hosted_request_forgotten, spread=True),
    "plan-change": Kind(
        plan_change,
        state_bytes=STATE_BYTES,
        settings=(("cluster.migrate_bytes_per_s", MOVE_BYTES_PER_S), ("log.level", "debug")),
        absent_s=(2.0,),
    ),
    "wrong-key": Kind(wrong_key, empty=(INTRUDER, GUEST)),
    "engine-freeze": Kind(fault_gray.engine_freeze),
    "engine-crawl": Kind(fault_gray.engine_crawl),
    "throttled": Kind(fault_gray.throttled),
    "link-flaps": Kind(fault_gray.link_flaps),
    "slow-disk": Kind(fault_gray.slow_disk),
    "swapping": Kind(fault_gray.swapping),
    "prefill-kill": _apart(fault_apart.prefill_kill),
    "decode-kill": _apart(fault_apart.decode_kill),
    "kv-corrupt": _apart(fault_apart.kv_corrupt, spoils_kv=True),
}
