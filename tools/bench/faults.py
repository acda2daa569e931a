"""What a cluster of three boxes does when something happens to one: a table of faults, trial by trial.

    python -m tools.bench.faults --trials 200 --log /var/tmp/faults.jsonl             # all rows; goes on where it ended
    python -m tools.bench.faults --rows kill-peer,leader-stop --trials 10 --minutes 8
    python -m tools.bench.faults --log /var/tmp/faults.jsonl --table                  # of what has been logged

Needs root. Each trial is seeded by its row and number: which box, which prompts, when. Prompts are random tokens and
all answers differ; what one box alone says, with all experts in memory, in float32, is what must come out. A trial is
one line of the log: what was hit, and of every request whether it was complete, right, how long it took without and
with the fault. The cluster is started once for a row and only what was killed is started again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from tools.testbed.bed import Bed
from tools.testbed.daemons import Answer, Cluster, Daemon
from tools.testbed.model import float32_demo, part_of

NODES = ("a", "b", "c")
EXPERTS, SLOT_BYTES = 192, 147456  # of the demo model in float32
TOKENS, PROMPT_TOKENS, PROMPTS = 16, 12, 16
DEADLINE_S = 30.0
Record = dict[str, Any]
Answers = dict[tuple[int, ...], str]  # prompt -> what one box alone says


@dataclass(slots=True)
class Trial:
    """One trial under way."""

    cluster: Cluster
    answers: Answers
    rng: random.Random
    marks: dict[str, int]  # log lengths when it began

    def pick(self, count: int) -> list[tuple[int, ...]]:
        return self.rng.sample(sorted(self.answers), count)

    def leader(self) -> Daemon:
        return self.cluster[self.cluster.leader()]

    def others(self, than: Daemon) -> list[Daemon]:
        return [daemon for daemon in self.cluster if daemon is not than]

    def requests(self, fronts: Sequence[Daemon], fault: Callable[[], None]) -> list[Record]:
        """One request at each front, first undisturbed, then with `fault` after a few tokens of theirs."""
        prompts = self.pick(len(fronts))
        calm = [
            front.complete(prompt, TOKENS, timeout_s=DEADLINE_S) for front, prompt in zip(fronts, prompts, strict=True)
        ]
        stirred: list[Answer] = [Answer() for _ in fronts]

        def ask(n: int) -> None:
            stirred[n] = fronts[n].complete(prompts[n], TOKENS, timeout_s=DEADLINE_S)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(fronts))]
        for thread in threads:
            thread.start()
        whole_s = min((answer.took_s for answer in calm if answer.took_s), default=0.1)
        time.sleep(self.rng.uniform(0.2, 0.8) * whole_s)
        fault()
        for thread in threads:
            thread.join()
        return [self._record(*row) for row in zip(fronts, prompts, calm, stirred, strict=True)]

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
        stale = 0
        for daemon in self.cluster:
            highest = 0
            for event in daemon.events(0):
                epoch = event.get("epoch", 0)
                if event["event"] == "leading" and _clock(event) >= since_s:
                    led.append(_clock(event) - since_s)
                if event["event"] in ("leader", "leading"):
                    stale += epoch < highest
                    highest = max(highest, epoch)
        return {"new_epoch_s": round(min(led), 3) if led else None, "stale_obeyed": stale}


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
    return {"hit": hit.box.name, "requests": found, **new, "stale_obeyed": trial.coordination(at_s[0])["stale_obeyed"]}


def partition(trial: Trial) -> Record:
    """One box's cable pulled for 4 s; everybody gets requests."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return disturbed(trial, hit, lambda: hit.box.link(up=False), 4.0)


def one_way(trial: Trial) -> Record:
    """What the leader sends arrives nowhere for 4 s, the other way all is well."""
    hit = trial.leader()

    def cut() -> None:
        for other in trial.others(hit):
            hit.box.cut(other.box)

    return disturbed(trial, hit, cut, 4.0)


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
    found = trial.requests(list(trial.cluster), lambda: None)
    back = sum(after[name] < before[name] for name in NODES)
    return {"before": before, "after": after, "regressions": back, "requests": found}


def forward_kill(trial: Trial) -> Record:
    """Several requests at one front, which passes some on; a box that runs them is killed mid-stream."""
    front = trial.cluster[trial.rng.choice(NODES)]
    hit = trial.rng.choice(trial.others(front))
    running = [0.0]

    def fault() -> None:
        running[0] = hit.metrics().get("edgemoe_requests_running", 0.0)
        hit.kill()

    found = trial.requests([front] * 4, fault)
    again(trial, hit)
    return {"hit": hit.box.name, "requests": found, "running_there": running[0]}


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
}


# --- running ----------------------------------------------------------------------------------------------------


def common(store: Path, experts: int) -> dict[str, object]:
    return {
        "model.path": store,
        "model.name": "m",
        "memory.ram_bytes": (experts * 16 // 15 + 3) * SLOT_BYTES,
        "memory.kv_bytes": "8MiB",
        "memory.headroom_bytes": 0,
        "device.0.kind": "cpu",
        "engine.threads": 1,
        "engine.max_sequences": 8,
        "engine.prefix_cache": False,
    }


def references(folder: Path, store: Path) -> Answers:
    """What one box says that has everything in memory."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(3, 4096) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    with Bed(["alone"]) as bed:
        daemon = Daemon(bed["alone"], folder / "alone", common(store, EXPERTS))
        try:
            daemon.start()
            daemon.wait_ready()
            answers = {prompt: daemon.complete(prompt, TOKENS).text for prompt in prompts}
        finally:
            daemon.close()
    distinct = {text: prompt for prompt, text in answers.items() if len(text) >= TOKENS // 2}
    return {prompt: text for text, prompt in distinct.items()}


@contextmanager
def cluster(folder: Path, store: Path, kind: Kind) -> Iterator[Cluster]:
    """Three boxes; the disk of each lists its own share of the experts only, `replicas` boxes have each."""
    shares = {
        node: {"model.path": part_of(store, folder / f"store-{node}", lambda _, e, n=n: (e - n) % 3 < kind.replicas)}  # type: ignore[misc]
        for n, node in enumerate(NODES)
    }
    settings = common(store, EXPERTS * kind.replicas // 3) | {"cluster.replicas": kind.replicas}
    if kind.spread:
        settings["cluster.route"] = "spread"
    with Bed(NODES) as bed, Cluster(bed, folder / "cluster", settings, shares) as made:
        yield made


def run_row(name: str, trials: Sequence[int], log: Path, work: Path, ends: float) -> None:
    kind = ROWS[name]
    store = float32_demo(work)
    with tempfile.TemporaryDirectory(dir=work, prefix=f"{name}-") as scratch:
        answers = references(Path(scratch), store)
        with cluster(Path(scratch), store, kind) as made:
            for number in trials:
                if time.monotonic() > ends:
                    return
                marks = {daemon.box.name: daemon.log_bytes() for daemon in made}
                trial = Trial(made, answers, random.Random(f"{name} {number}"), marks)
                began_s = time.monotonic()
                record = {"row": name, "trial": number, **kind.run(trial)}
                record["trial_s"] = round(time.monotonic() - began_s, 2)
                with log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(json.dumps(record), file=sys.stderr, flush=True)


def read(log: Path) -> list[Record]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def table(records: Sequence[Record]) -> Iterator[str]:
    yield (
        "| fault | trials | requests | complete | of them right | wrong tokens | added latency p50 / p99 / max | "
        "new epoch p50 / max | stale obeyed |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in ROWS:
        rows = [record for record in records if record["row"] == name]
        if not rows:
            continue
        asked = [request for row in rows for request in row["requests"]]
        complete = [request for request in asked if request["complete"]]
        right = sum(request["right"] for request in complete)
        wrong = sum(not request["prefix"] for request in asked)
        added = [request["took_s"] - request["calm_s"] for request in complete]
        late = " / ".join(f"{np.quantile(added, q):.2f}" for q in (0.5, 0.99, 1.0)) + " s" if added else ""
        epochs = [row["new_epoch_s"] for row in rows if row.get("new_epoch_s") is not None]
        new = f"{np.median(epochs):.2f} / {max(epochs):.2f} s" if epochs else ""
        stale = max(row.get("stale_obeyed", 0) + row.get("regressions", 0) for row in rows)
        yield (
            f"| {name} | {len(rows)} | {len(asked)} | {len(complete)} | {right} | {wrong} | {late} | {new} | {stale} |"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="of the table, separated by commas")
    parser.add_argument("--trials", type=int, default=3, help="of each row, those in the log included")
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-faults")
    parser.add_argument("--minutes", type=float, default=1e9, help="no trial begins after so long")
    parser.add_argument("--table", action="store_true", help="only prints what the log holds")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    for name in args.rows.split(",") if not args.table else ():
        done = {record["trial"] for record in read(args.log) if record["row"] == name}
        todo = [number for number in range(args.trials) if number not in done]
        if todo and time.monotonic() < ends:
            run_row(name, todo, args.log, args.work, ends)
    print("\n".join(table(read(args.log))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
