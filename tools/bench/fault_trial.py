"""One trial of a fault: the requests in flight when it comes, and their results."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from edgemoe.telemetry import metrics as names
from tools.bench.obeyed import broken
from tools.testbed.daemons import Answer, Cluster, Daemon

NODES = ("a", "b", "c")
TOKENS = 200
DEADLINE_S = 180.0  # without a token; several wait in turn on a busy machine
Record = dict[str, Any]
Answers = dict[tuple[int, ...], str]  # prompt -> answer of one box alone


@dataclass(slots=True)
class Trial:
    """One trial in progress."""

    cluster: Cluster
    answers: Answers
    rng: random.Random
    whole_s: float = 0.0  # of an undisturbed request, as an earlier trial measured it; 0: this one does
    in_flight: list[bool] = field(default_factory=list)  # by request, when the fault came
    _threads: list[threading.Thread] = field(default_factory=list)

    def pick(self, count: int) -> list[tuple[int, ...]]:
        return self.rng.sample(sorted(self.answers), count)

    def leader(self) -> Daemon:
        return self.cluster[self.cluster.leader()]

    def others(self, than: Daemon) -> list[Daemon]:
        return [daemon for daemon in self.cluster if daemon is not than]

    def requests(
        self, fronts: Sequence[Daemon], fault: Callable[[], None] | None, *, waits: bool = True
    ) -> list[Record]:
        """Sends one request to each front, and injects `fault` after a few of their tokens, or when it chooses.

        The same requests run undisturbed first, unless an earlier trial has measured their duration.
        """
        prompts = self.pick(len(fronts))
        calm = [] if fault and self.whole_s else self._ask(fronts, prompts, lambda: None)
        stirred = calm
        self.in_flight = [False] * len(fronts)
        if fault is not None:
            self.whole_s = self.whole_s or min((answer.took_s for answer in calm if answer.took_s), default=0.1)
            wait_s = self.rng.uniform(0.2, 0.8) * self.whole_s

            def later() -> None:
                if waits:
                    time.sleep(wait_s)
                    self.mark()
                fault()

            stirred = self._ask(fronts, prompts, later)
        calms: Sequence[Answer | None] = calm or [None] * len(fronts)
        rows = zip(fronts, prompts, calms, stirred, strict=True)
        return [self._record(n, *row) for n, row in enumerate(rows)]

    def forwarded(self, fault: Callable[[Daemon, Daemon], None]) -> tuple[Daemon, Record]:
        """Sends several requests to one front, which forwards some; `fault` gets a box that runs them, and the
        front.
        """
        front = self.cluster[self.rng.choice(NODES)]
        others, hosted = self.others(front), [0.0]
        hits = [self.rng.choice(others)]

        def come() -> None:
            ends = time.monotonic() + 2.0
            while time.monotonic() < ends and not hosted[0]:
                read = [(daemon.metrics().get(names.HOSTED_REQUESTS, 0.0), daemon) for daemon in others]
                hosted[0], hits[0] = max(read, key=lambda pair: pair[0])
            self.mark()
            fault(hits[0], front)

        found = self.requests([front] * 4, come)
        return hits[0], {"hit": hits[0].box.name, "requests": found, "guests": hosted[0]}

    def mark(self) -> None:
        """Records the requests in flight as the fault comes."""
        self.in_flight = [thread.is_alive() for thread in self._threads]

    def _ask(
        self, fronts: Sequence[Daemon], prompts: Sequence[tuple[int, ...]], meanwhile: Callable[[], None]
    ) -> list[Answer]:
        """Sends all requests at once."""
        answers = [Answer() for _ in fronts]

        def ask(n: int) -> None:
            answers[n] = fronts[n].complete(prompts[n], TOKENS, timeout_s=DEADLINE_S)

        self._threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(fronts))]
        for thread in self._threads:
            thread.start()
        meanwhile()
        for thread in self._threads:
            thread.join()
        return answers

    def _record(self, n: int, front: Daemon, prompt: tuple[int, ...], calm: Answer | None, answer: Answer) -> Record:
        wanted = self.answers[prompt]
        return {
            "front": front.box.name,
            "in_flight": self.in_flight[n],
            "calm_right": None if calm is None else calm.text == wanted,
            "complete": answer.finish == "length" and not answer.error,
            "right": answer.text == wanted,
            "prefix": wanted.startswith(answer.text),
            "error": answer.error,
            "calm_s": None if calm is None else round(calm.took_s, 4),
            "took_s": round(answer.took_s, 4),
            "gap_s": round(
                max((b - a for a, b in zip([0.0, *answer.times_s], answer.times_s, strict=False)), default=0.0), 4
            ),
        }

    def coordination(self, since_s: float) -> Record:
        """Returns the time until a new leader after `since_s`, and the contradictions in all that boxes obeyed."""
        found = broken({daemon.box.name: daemon.events() for daemon in self.cluster})
        return {"new_epoch_s": self._new_epoch_s(since_s), "stale_obeyed": len(found), "stale": found[-3:]}

    def wait_epoch(self, since_s: float, within_s: float = 15.0) -> Record:
        ends = time.monotonic() + within_s
        while self._new_epoch_s(since_s) is None and time.monotonic() < ends:
            time.sleep(0.1)
        return self.coordination(since_s)

    def _new_epoch_s(self, since_s: float) -> float | None:
        led = [clock(one) for daemon in self.cluster for one in daemon.events() if one["event"] == "leading"]
        return min((round(at_s - since_s, 3) for at_s in led if at_s >= since_s), default=None)

    def again(self, daemon: Daemon) -> None:
        """Starts a killed daemon and waits until the cluster is as before."""
        daemon.start()
        daemon.wait_ready()
        self.cluster.wait_settled()


def clock(event: Record) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()
