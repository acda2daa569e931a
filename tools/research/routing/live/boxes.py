"""Three boxes of a test bed with the whole model, requests to them, and their counters."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from tools.bench.arrivals import Arrival
from tools.bench.faults import common
from tools.research.placement.prism.profile import geometry_of
from tools.testbed.bed import Bed, BedError
from tools.testbed.daemons import Answer, Cluster, Daemon
from tools.testbed.limits import NO_LIMITS, Limits

NODES = ("a", "b", "c")
ROLES = {"a": "prefill", "b": "decode", "c": "decode"}
SLOTS = 4
VOCAB = (3, 4096)
READY_S = 300.0
STATS_S = 1.2  # by then an engine has reported its counts
Asked = tuple[Daemon, Sequence[int], int, str]  # box, prompt, tokens, user


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of cluster."""

    rule: str = "pull"
    apart: bool = False  # one box that prefills and two that decode
    share: float = (
        1.0  # of the experts that a box has memory for; with less than all, boxes compute nothing for each other
    )
    module: str = "edgemoe"  # the daemon's module
    limits: Limits = NO_LIMITS


def settings(store: Path, kind: Kind) -> dict[str, object]:
    """Returns the settings of all boxes."""
    return common(store, int(kind.share * geometry_of(store).count)) | {
        "model.store_dir": store.parent,  # beside which compiled kernels are kept
        "memory.kv_bytes": "16MiB",
        "engine.max_sequences": SLOTS,
        "engine.prefix_cache": True,
        "cluster.route": kind.rule,
        "cluster.replicas": 3,
        "cluster.share_experts": kind.share == 1.0,
        "cluster.lease_s": 4.0,  # all boxes and their clients share few cores
    }


@contextmanager
def cluster(folder: Path, store: Path, kind: Kind) -> Iterator[Cluster]:
    """Runs three boxes of that kind."""
    own: dict[str, dict[str, object]] = {node: {"cluster.role": ROLES[node]} if kind.apart else {} for node in NODES}
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=f"{kind.rule}-") as scratch,
        Bed(list(NODES), limits=kind.limits) as bed,
    ):
        made = Cluster(bed, Path(scratch), settings(store, kind), own, modules=dict.fromkeys(NODES, kind.module))
        try:
            for daemon in made:
                daemon.start()
            for daemon in made:
                daemon.wait_ready(READY_S)
            if kind.share == 1.0:
                made.wait_settled(READY_S)
            else:
                gathered(made)
            yield made
        finally:
            made.close()


def gathered(made: Cluster) -> None:
    """Waits until boxes that share no experts, and so have no plan, see each other. Raises BedError."""
    here, ends_s = named(names.CLUSTER_BOXES, state="here"), time.monotonic() + READY_S
    while any(daemon.metrics().get(here) != len(NODES) - 1 for daemon in made):
        if time.monotonic() > ends_s:
            raise BedError("the boxes did not find together")
        time.sleep(0.1)


@contextmanager
def side_by_side(folder: Path, store: Path, kinds: Mapping[str, Kind]) -> Iterator[dict[str, Cluster]]:
    """Runs clusters of several kinds at once; only one of them gets requests at a time."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(cluster(folder, store, kind)) for name, kind in kinds.items()}


# --- asking -----------------------------------------------------------------------------------------------------


def ask(asked: Sequence[Asked], at_s: Sequence[float] | None = None) -> list[Answer]:
    """Returns the answers to requests sent at these times, or all at once."""
    answers = [Answer() for _ in asked]
    began_s = time.monotonic()

    def one(n: int) -> None:
        if at_s is not None:
            time.sleep(max(0.0, at_s[n] - (time.monotonic() - began_s)))
        daemon, prompt, tokens, user = asked[n]
        answers[n] = daemon.complete(prompt, tokens, user=user, timeout_s=300.0)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def send(made: Cluster, requests: Sequence[Arrival], users: Sequence[str], due: bool = True) -> list[Answer]:
    """Returns the answers to requests sent to the boxes in turn, when due or all at once."""
    asked = [
        (made[NODES[n % 3]], one.prompt, one.output_tokens, user)
        for n, (one, user) in enumerate(zip(requests, users, strict=True))
    ]
    return ask(asked, [one.at_s for one in requests] if due else None)


def prompt_of(seed: tuple[int, ...], tokens: int) -> list[int]:
    """Returns the same token ids each time."""
    found: list[int] = np.random.default_rng(seed).integers(*VOCAB, tokens).tolist()
    return found


# --- figures ----------------------------------------------------------------------------------------------------


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Returns figures of the clients' answers."""
    whole = [answer for answer in answers if answer.finish == "length" and answer.times_s]
    many = [answer for answer in whole if len(answer.times_s) > 1]
    ttft_s = np.array([answer.times_s[0] for answer in whole])
    tpot_s = np.array([(a.times_s[-1] - a.times_s[0]) / (len(a.times_s) - 1) for a in many])
    return times(ttft_s, tpot_s) | {"complete": len(whole), "of": len(answers)}


def times(ttft_s: Any, tpot_s: Any) -> dict[str, float]:
    """Returns the compared figures of these times."""
    return {
        "ttft_mean_s": round(float(np.mean(ttft_s)), 4),
        "ttft_p99_s": round(float(np.quantile(ttft_s, 0.99)), 4),
        "tpot_mean_s": round(float(np.mean(tpot_s)), 5),
        "tpot_p50_s": round(float(np.median(tpot_s)), 5),
        "tpot_p99_s": round(float(np.quantile(tpot_s, 0.99)), 5),
    }


def counted(made: Cluster, families: Sequence[str], **labels: str) -> dict[str, float]:
    """Returns sums over all boxes of the metrics with these labels."""
    found = [daemon.metrics() for daemon in made]
    return {family: sum(names.select(each, family, **labels) for each in found) for family in families}


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns the growth of each metric."""
    return {family: after[family] - before[family] for family in before}
