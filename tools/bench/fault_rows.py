"""What may happen to a box, and what one trial of it finds: the rows of the table of faults."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from edgemoe.telemetry import metrics
from tools.bench.intruder import GUEST, INTRUDER, KINDS, Intruder
from tools.testbed.daemons import Answer, Cluster, Daemon

NODES = ("a", "b", "c")
TOKENS = 16
DEADLINE_S = 30.0
Record = dict[str, Any]
Answers = dict[tuple[int, ...], str]  # prompt -> what one box alone says


@dataclass(slots=True)
class Trial:
    """One trial under way."""

    cluster: Cluster
    answers: Answers
    rng: random.Random

    def pick(self, count: int) -> list[tuple[int, ...]]:
        return self.rng.sample(sorted(self.answers), count)

    def leader(self) -> Daemon:
        return self.cluster[self.cluster.leader()]

    def others(self, than: Daemon) -> list[Daemon]:
        return [daemon for daemon in self.cluster if daemon is not than]

    def requests(self, fronts: Sequence[Daemon], fault: Callable[[], None] | None) -> list[Record]:
        """One request at each front, first undisturbed, then with `fault`, if any, after a few tokens of theirs."""
        prompts = self.pick(len(fronts))
        calm = self._ask(fronts, prompts, lambda: None)
        if fault is None:
            return [self._record(*row) for row in zip(fronts, prompts, calm, calm, strict=True)]
        whole_s = min((answer.took_s for answer in calm if answer.took_s), default=0.1)
        wait_s = self.rng.uniform(0.2, 0.8) * whole_s

        def later() -> None:
            time.sleep(wait_s)
            fault()

        stirred = self._ask(fronts, prompts, later)
        return [self._record(*row) for row in zip(fronts, prompts, calm, stirred, strict=True)]

    def _ask(
        self, fronts: Sequence[Daemon], prompts: Sequence[tuple[int, ...]], meanwhile: Callable[[], None]
    ) -> list[Answer]:
        """All at once."""
        answers = [Answer() for _ in fronts]

        def ask(n: int) -> None:
            answers[n] = fronts[n].complete(prompts[n], TOKENS, timeout_s=DEADLINE_S)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(fronts))]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join()
        return answers

    def _record(self, front: Daemon, prompt: tuple[int, ...], calm: Answer, answer: Answer) -> Record:
        wanted = self.answers[prompt]
        return {
            "front": front.box.name,
            "calm_right": calm.text == wanted,
            "complete": answer.finish == "length" and not answer.error,
            "right": answer.text == wanted,
            "prefix": wanted.startswith(answer.text),
            "error": answer.error,
            "calm_s": round(calm.took_s, 4),
            "took_s": round(answer.took_s, 4),
            "gap_s": round(
                max((b - a for a, b in zip([0.0, *answer.times_s], answer.times_s, strict=False)), default=0.0), 4
            ),
        }

    def coordination(self, since_s: float) -> Record:
        """When a new leader was there after `since_s`, and whether anybody followed a deposed one."""
        led: list[float] = []
        stale: list[Record] = []
        for daemon in self.cluster:
            highest = 0
            for event in daemon.events(0):
                epoch = event.get("epoch", 0)
                if event["event"] == "leading" and _clock(event) >= since_s:
                    led.append(_clock(event) - since_s)
                if event["event"] in ("leader", "leading"):
                    stale += [event | {"box": daemon.box.name, "after": highest}] if epoch < highest else []
                    highest = max(highest, epoch)
        return {"new_epoch_s": round(min(led), 3) if led else None, "stale_obeyed": len(stale), "stale": stale[-1:]}


def _clock(event: Record) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def again(trial: Trial, daemon: Daemon) -> None:
    """Starts what was killed and waits until all is as before."""
    daemon.start()
    daemon.wait_ready()
    trial.cluster.settle()


# --- the rows ---------------------------------------------------------------------------------------------------


def kill_peer(trial: Trial) -> Record:
    """kill -9 of a box that computes for the others."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    found = trial.requests(trial.others(hit), hit.kill)
    again(trial, hit)
    return {"hit": hit.box.name, "requests": found}


def leader_kill(trial: Trial) -> Record:
    """kill -9 of the leader."""
    hit, at_s = trial.leader(), [0.0]

    def fault() -> None:
        at_s[0] = time.time()
        hit.kill()

    found = trial.requests(trial.others(hit), fault)
    new = wait_epoch(trial, at_s[0])
    again(trial, hit)
    return {"hit": hit.box.name, "requests": found, **new}


def leader_stop(trial: Trial) -> Record:
    """SIGSTOP of the leader for 5 s."""
    hit, at_s = trial.leader(), [0.0]
    thread: list[threading.Timer] = []

    def fault() -> None:
        at_s[0] = time.time()
        hit.box.pause()
        thread.append(threading.Timer(5.0, hit.box.resume))
        thread[0].start()

    found = trial.requests(trial.others(hit), fault)
    new = wait_epoch(trial, at_s[0])
    thread[0].join()
    time.sleep(1.0)
    trial.cluster.settle()
    new |= {name: value for name, value in trial.coordination(at_s[0]).items() if name != "new_epoch_s"}
    return {"hit": hit.box.name, "requests": found, **new}


def partition(trial: Trial) -> Record:
    """One box's cable pulled for 2 to 4 s; everybody gets requests."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return disturbed(trial, hit, lambda: hit.box.link(up=False), trial.rng.uniform(2.0, 4.0))


def one_way(trial: Trial) -> Record:
    """What the leader sends arrives nowhere for 2 to 4 s, the other way all is well."""
    hit = trial.leader()

    def cut() -> None:
        for other in trial.others(hit):
            hit.box.cut(other.box)

    return disturbed(trial, hit, cut, trial.rng.uniform(2.0, 4.0))


def slow_link(trial: Trial) -> Record:
    """A box's link at 20 Mbit/s."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return disturbed(trial, hit, lambda: hit.box.rate(20), 1.0)


def peer_stop(trial: Trial) -> Record:
    """SIGSTOP of a box for 5 s; the others get requests."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return disturbed(trial, hit, hit.box.pause, 5.0, trial.others(hit))


def disturbed(
    trial: Trial, hit: Daemon, fault: Callable[[], None], seconds: float, fronts: Sequence[Daemon] = ()
) -> Record:
    """A fault that ends by itself."""
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
    trial.cluster.settle()
    return {"hit": hit.box.name, "requests": found, **trial.coordination(at_s[0])}


def restart_all(trial: Trial) -> Record:
    """Every box killed, all started again: no epoch is lower than before."""
    before = {daemon.box.name: daemon.epoch() for daemon in trial.cluster}
    for daemon in trial.cluster:
        daemon.kill()
    for daemon in trial.cluster:
        daemon.start()
    for daemon in trial.cluster:
        daemon.wait_ready()
    trial.cluster.settle()
    at_s = time.time()
    while time.time() - at_s < 15 and min(d.epoch() for d in trial.cluster) <= max(before.values()):
        time.sleep(0.1)
    after = {daemon.box.name: daemon.epoch() for daemon in trial.cluster}
    found = trial.requests(list(trial.cluster), None)
    back = sum(after[name] < before[name] for name in NODES)
    return {"before": before, "after": after, "regressions": back, "requests": found}


def forward_kill(trial: Trial) -> Record:
    """Several requests at one front, which passes some on; a box that runs them is killed mid-stream."""
    front = trial.cluster[trial.rng.choice(NODES)]
    others, guests = trial.others(front), [0.0]
    hits = [trial.rng.choice(others)]

    def fault() -> None:
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends and not guests[0]:
            found = [(daemon.metrics().get(metrics.GUESTS, 0.0), daemon) for daemon in others]
            guests[0], hits[0] = max(found, key=lambda pair: pair[0])
        hits[0].kill()

    found = trial.requests([front] * 4, fault)
    again(trial, hits[0])
    return {"hit": hits[0].box.name, "requests": found, "guests": guests[0]}


def wrong_key(trial: Trial) -> Record:
    """One who should not get in tries every lane of every box, while these serve requests."""
    kind, victim = trial.rng.choice(KINDS), trial.rng.choice(NODES)
    with Intruder(trial.cluster) as intruder:
        found: list[Any] = []
        asked = trial.requests(list(trial.cluster), lambda: found.append(intruder.try_(kind, victim)))
    (tried,) = found
    return {"kind": kind, "hit": victim, **msgspec.structs.asdict(tried), "requests": asked}


def wait_epoch(trial: Trial, since_s: float, within_s: float = 15.0) -> Record:
    ends = time.monotonic() + within_s
    while (new := trial.coordination(since_s))["new_epoch_s"] is None and time.monotonic() < ends:
        time.sleep(0.1)
    return new


@dataclass(frozen=True, slots=True)
class Kind:
    """A row: its trial, and the cluster that it needs."""

    run: Callable[[Trial], Record]
    replicas: int = 2
    spread: bool = False
    empty: tuple[str, ...] = ()  # boxes without a daemon


ROWS = {
    "kill-peer": Kind(kill_peer),
    "leader-kill": Kind(leader_kill),
    "leader-stop": Kind(leader_stop),
    "partition": Kind(partition),
    "one-way": Kind(one_way),
    "slow-link": Kind(slow_link),
    "peer-stop": Kind(peer_stop),
    "restart-all": Kind(restart_all),
    "kill-peer-1": Kind(kill_peer, replicas=1),
    "forward-kill": Kind(forward_kill, spread=True),
    "wrong-key": Kind(wrong_key, empty=(INTRUDER, GUEST)),
}
