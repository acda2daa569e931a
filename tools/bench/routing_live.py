"""Which box runs which request, live: daemons in boxes of a test bed, asked at all of them. Needs root.

    python -m tools.bench.routing_live DATA --json

    same       requests at all boxes at once, under every rule: the answers of one box alone, and where they ran
    affinity   users with long beginnings of their own, by another box each time: the share that prefix caches had
    load       200 requests of the Azure chat trace with lengths divided by 8, at one rate, beside what is simulated
               by the step times that the engines measured
    apart      the same requests with a box that prefills and two that decode, beside three that do both

All boxes share this machine's cores. Seconds are the clients'. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from edgemoe.config.settings import Route
from edgemoe.telemetry import metrics as names
from tools.bench.arrivals import Arrival, Shape, from_trace
from tools.bench.faults import EXPERTS, common
from tools.bench.routing_beside import LiveCosts, calibrated, counting, simulated
from tools.testbed.bed import Bed
from tools.testbed.daemons import Answer, Cluster, Daemon
from tools.testbed.model import float32_demo

NODES = ("a", "b", "c")
ROLES = {"a": "prefill", "b": "decode", "c": "decode"}
RULES = get_args(Route)
SLOTS = 4
VOCAB = (3, 4096)
SAME, SAME_TOKENS = 8, 48  # requests at each box, twice; tokens of each answer
USERS, ROUNDS, BEGINNING = 6, 6, 384  # tokens that all of a user's prompts begin with
REQUESTS, SCALE = 200, 1 / 8
TRACE = "azure-llm-2023/conv.csv.gz"
SHARE, AT_ONCE = 0.5, 50  # of the rate at which so many of them were answered that came at once
Asked = tuple[Daemon, Sequence[int], int, str]  # box, prompt, tokens, user


def settings(store: Path, rule: str) -> dict[str, object]:
    """Returns what all boxes go by."""
    return common(store, EXPERTS) | {
        "model.store_dir": store.parent,  # beside which compiled kernels are kept
        "memory.kv_bytes": "16MiB",
        "engine.max_sequences": SLOTS,
        "engine.prefix_cache": True,
        "cluster.route": rule,
        "cluster.replicas": 3,
        "cluster.lease_s": 4.0,  # all boxes and their clients share few cores
    }


@contextmanager
def cluster(folder: Path, store: Path, rule: str, apart: bool = False) -> Iterator[Cluster]:
    """Three boxes that have all experts."""
    own: dict[str, dict[str, object]] = {node: {"cluster.role": ROLES[node]} if apart else {} for node in NODES}
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=f"{rule}-") as scratch,
        Bed(list(NODES)) as bed,
        Cluster(bed, Path(scratch), settings(store, rule), own) as made,
    ):
        yield made


def ask(asked: Sequence[Asked], at_s: Sequence[float] | None = None) -> list[Answer]:
    """Returns the answers to requests that are sent at these times, or all at once."""
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


def prompt_of(seed: tuple[int, ...], tokens: int) -> list[int]:
    """Returns the same token ids each time."""
    found: list[int] = np.random.default_rng(seed).integers(*VOCAB, tokens).tolist()
    return found


def counted(made: Cluster, *families: str) -> dict[str, float]:
    """Returns sums over all boxes."""
    found = [daemon.metrics() for daemon in made]
    return {family: sum(names.select(each, family) for each in found) for family in families}


# --- the same answers -----------------------------------------------------------------------------------------


def references(folder: Path, store: Path) -> dict[int, str]:
    """Returns what one box alone says to each prompt."""
    with Bed(["alone"]) as bed, tempfile.TemporaryDirectory(dir=folder) as scratch:
        daemon = Daemon(bed["alone"], Path(scratch), settings(store, "local") | {"cluster.node": ""})
        try:
            daemon.start()
            daemon.wait_ready(300.0)  # kernels are compiled once
            answers = {n: daemon.complete(prompt_of((1, n), 40), SAME_TOKENS) for n in range(SAME * len(NODES))}
        finally:
            daemon.close()
    return {n: answer.text for n, answer in answers.items()}


def same(made: Cluster, wanted: dict[int, str]) -> dict[str, Any]:
    """Returns how many answers were right, and where they ran and why; each is asked twice, by the same user."""
    right, began_s = 0, time.monotonic()
    for _ in range(2):
        asked = [(made[NODES[n % 3]], prompt_of((1, n), 40), SAME_TOKENS, f"user {n % USERS}") for n in wanted]
        right += sum(answer.text == wanted[n] for n, answer in enumerate(ask(asked)))
    where = {key: count for key, count in _routes(made).items() if count}
    told = counted(made, names.OFFERED, names.GRANTED, names.OFFERS_FORECAST)
    return {
        "right": right,
        "of": 2 * len(wanted),
        "took_s": round(time.monotonic() - began_s, 1),
        "offered": told[names.OFFERED],
        "granted": told[names.GRANTED],
        "with a signature": told[names.OFFERS_FORECAST],
        "routes": where,
    }


def _routes(made: Cluster) -> dict[str, float]:
    routes: dict[str, float] = {}
    for daemon in made:
        for name, count in daemon.metrics().items():
            if name.startswith(names.ROUTED):
                key = name.removeprefix(names.ROUTED)
                routes[key] = routes.get(key, 0.0) + count
    return routes


# --- users ------------------------------------------------------------------------------------------------------


def affinity(made: Cluster) -> dict[str, Any]:
    """Returns the share of prompt tokens that prefix caches had."""
    families = (names.PREFIX_HIT_TOKENS, names.PREFIX_MISS_TOKENS)
    before, firsts = counted(made, *families), list[float]()
    for turn in range(ROUNDS):
        asked = [
            (
                made[NODES[(user + turn) % 3]],
                prompt_of((2, user), BEGINNING) + prompt_of((3, user, turn), 16),
                16,
                f"u{user}",
            )
            for user in range(USERS)
        ]
        firsts += [answer.times_s[0] for answer in ask(asked) if turn and answer.times_s]
        time.sleep(1.2)  # engines say what they have counted every half second
    after = counted(made, *families)
    hit, miss = (after[family] - before[family] for family in families)
    return {
        "hit_tokens": hit,
        "share": round(hit / max(1.0, hit + miss), 3),
        "most": round((ROUNDS - 1) / ROUNDS * BEGINNING / (BEGINNING + 16), 3),
        "ttft_mean_s": round(float(np.mean(firsts)), 4),
    }


# --- load -------------------------------------------------------------------------------------------------------


def measured(made: Cluster, requests: Sequence[Arrival]) -> tuple[LiveCosts, float]:
    """Returns what steps take beside clients, and how many a second are answered of requests that come at once."""
    daemons, drawn = list(made), itertools.count()

    def some(at_once: int, prompt: int, tokens: int) -> list[float]:
        asked: list[Asked] = [(d, prompt_of((9, next(drawn)), prompt), tokens, "") for d in daemons * at_once]
        return [answer.times_s[0] for answer in ask(asked) if answer.times_s]

    costs = calibrated(daemons, some)
    with counting(daemons, "decode") as steps:
        began_s = time.monotonic()
        ask([(daemons[n % 3], one.prompt, one.output_tokens, "") for n, one in enumerate(requests)])
        took_s = time.monotonic() - began_s
    return costs.scaled(steps[0]), len(requests) / took_s


def arrivals(data: Path, rate: float, seed: int = 5) -> list[Arrival]:
    """Returns the same requests at any rate."""
    shape = Shape(4096, SCALE, max_prompt_tokens=512, max_output_tokens=128)
    return from_trace(data / TRACE, rate, REQUESTS, shape, seed)


def load(made: Cluster, requests: Sequence[Arrival]) -> dict[str, Any]:
    """Returns what clients saw of requests that come to the boxes in turn."""
    asked = [(made[NODES[n % 3]], one.prompt, one.output_tokens, f"u{n % 20}") for n, one in enumerate(requests)]
    answers = ask(asked, [one.at_s for one in requests])
    whole = [answer for answer in answers if answer.finish == "length" and answer.times_s]
    firsts = np.array([answer.times_s[0] for answer in whole])
    many = [answer for answer in whole if len(answer.times_s) > 1]
    tpot = np.array([(a.times_s[-1] - a.times_s[0]) / (len(a.times_s) - 1) for a in many])
    return figures(firsts, tpot) | {"complete": len(whole), "of": len(asked)}


def figures(ttft_s: Any, tpot_s: Any) -> dict[str, float]:
    """Returns what is compared."""
    return {
        "ttft_mean_s": round(float(np.mean(ttft_s)), 4),
        "ttft_p99_s": round(float(np.quantile(ttft_s, 0.99)), 4),
        "tpot_mean_s": round(float(np.mean(tpot_s)), 5),
        "tpot_p50_s": round(float(np.median(tpot_s)), 5),
        "tpot_p99_s": round(float(np.quantile(tpot_s, 0.99)), 5),
    }


def study(data: Path, work: Path, rate: float, say: Callable[[str, Any], None]) -> dict[str, Any]:
    """Returns all figures."""
    store = float32_demo(work)
    wanted = references(work, store)
    found: dict[str, Any] = {"same": {}, "affinity": {}, "load": {}, "simulated": {}, "apart": {}}
    requests: list[Arrival] = []
    for rule in sorted(RULES, key=lambda rule: rule != "pull"):  # pull first: it says how fast engines are
        with cluster(work, store, rule) as made:
            if not requests:
                costs, most = measured(made, arrivals(data, 1.0, seed=6)[:: REQUESTS // AT_ONCE])
                requests = arrivals(data, rate or SHARE * most)
                found |= {"costs": costs._asdict(), "most_per_s": most, "rate": rate or SHARE * most}
                say("costs", {name: found[name] for name in ("costs", "most_per_s", "rate")})
            if rule in ("pull", "spread"):
                found["load"][rule] = load(made, requests)
                found["simulated"][rule] = figures(*simulated(costs, rule, list(made), SLOTS, requests))
                say(f"load {rule}", (found["load"][rule], found["simulated"][rule]))
            found["same"][rule] = same(made, wanted)
            say(f"same {rule}", found["same"][rule])
            if rule in ("pull", "spread", "gimbal"):
                found["affinity"][rule] = affinity(made)
                say(f"affinity {rule}", found["affinity"][rule])
    with cluster(work, store, "pull", apart=True) as made:
        found["apart"]["apart"] = load(made, requests)
        found["apart"]["apart"] |= counted(made, names.HANDED_OVER, names.KV_PULL_FAILURES)
        found["apart"]["mixed"] = found["load"]["pull"]
        found["same"]["apart"] = same(made, wanted)
        say("apart", found["apart"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: by what engines measure")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-routing")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)

    def say(what: str, value: Any) -> None:
        if not args.json:
            print(f"{what}: {value}", file=sys.stderr, flush=True)

    began_s, before = time.monotonic(), os.getloadavg()[0]
    found = study(args.data, args.work, args.rate, say)
    found |= {"took_s": round(time.monotonic() - began_s), "machine_load_before": before, "cores": os.cpu_count()}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
