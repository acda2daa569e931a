"""Rows of the table of faults in which a box or its link is not dead, but stands still, crawls or comes and goes.

Their measure is the progress of the requests: tokens a second, the slowest request first.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tools.bench.fault_trial import NODES, TOKENS, Record, Trial
from tools.testbed.daemons import Daemon

LONGEST_S = 60.0  # of a fault
SLOW_DISK_BYTES_PER_S = 1_000_000
SPARE_BYTES = 4 << 20  # of memory that a swapping box has for pages of files
Phase = tuple[Callable[[], None], float]  # an act, and the seconds before the next one


def engine_freeze(trial: Trial) -> Record:
    """Stops the engine of a box with SIGSTOP until all requests have ended; all boxes get requests."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    pids = [_engine(hit)]
    return _gray(trial, hit, [(lambda: hit.box.signal(signal.SIGSTOP, pids), LONGEST_S)])


def engine_crawl(trial: Trial) -> Record:
    """Lets the engine of a box run for 3 % of the time, as it does in a box that swaps."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return _gray(trial, hit, _duty(hit, [_engine(hit)], 0.03, 0.5))


def throttled(trial: Trial) -> Record:
    """Lets all processes of a box run for 30 % of the time, as a processor that is too hot does."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return _gray(trial, hit, _duty(hit, hit.box.pids(), 0.3, 0.1))


def link_flaps(trial: Trial) -> Record:
    """Takes a box's link down for 0.2 s, once a second."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    return _gray(trial, hit, [(lambda: hit.box.link(up=False), 0.2), (lambda: hit.box.link(up=True), 0.8)])


def slow_disk(trial: Trial) -> Record:
    """Lets a box read 1 MB a second from its disk, as one that fails does."""
    hit = trial.cluster[trial.rng.choice(NODES)]
    group = hit.box.group
    phases = [(lambda: group.limit_disk(SLOW_DISK_BYTES_PER_S, hit.folder), LONGEST_S)]
    return _gray(trial, hit, phases, lambda: group.limit_disk(0, hit.folder))


def swapping(trial: Trial) -> Record:
    """Leaves a box no memory for pages of files, its programs among them, as in a box that swaps.

    Its kernel may kill the engine, which the box starts again.
    """
    hit = trial.cluster[trial.rng.choice(NODES)]
    group = hit.box.group
    phases = [(lambda: group.squeeze_memory(SPARE_BYTES), LONGEST_S)]
    return _gray(trial, hit, phases, lambda: group.squeeze_memory(-1))


def _engine(daemon: Daemon) -> int:
    return int(daemon.http.get("/health").json()["engine"]["pid"])


def _duty(hit: Daemon, pids: Sequence[int], share: float, period_s: float) -> list[Phase]:
    """Returns phases in which these processes of a box run for that share of the time."""
    return [
        (lambda: hit.box.signal(signal.SIGSTOP, pids), (1 - share) * period_s),
        (lambda: hit.box.signal(signal.SIGCONT, pids), share * period_s),
    ]


def _gray(trial: Trial, hit: Daemon, phases: Sequence[Phase], mend: Callable[[], None] = lambda: None) -> Record:
    """Repeats the phases until all requests have ended, and mends the box."""
    over = threading.Event()

    def disturb(acts: Iterator[Phase], ends_s: float) -> None:
        while not over.is_set() and time.monotonic() < ends_s:
            act, pause_s = next(acts)
            act()
            over.wait(pause_s)

    thread = threading.Thread(target=lambda: disturb(itertools.cycle(phases), time.monotonic() + LONGEST_S))
    try:
        found = trial.requests(list(trial.cluster), thread.start)
    finally:
        over.set()
        thread.join()
        mend()
        hit.box.resume()
        trial.cluster.bed.mend()
    trial.cluster.wait_settled()
    progress = sorted(round(TOKENS / each["took_s"], 1) for each in found if each["took_s"])
    return {"hit": hit.box.name, "requests": found, "progress_per_s": progress, **trial.coordination(time.time())}
